"""Which plan a resumed run follows: the one it had, or the one it had and another from here on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.optimizer import NamedOptimizer, Optimizer
from roxxel_dist.train.schedule import schedule_change
from roxxel_dist.train.standing import Standing


@dataclass(frozen=True)
class Start:
    """Where a process takes a run up."""

    step: int
    """Steps done."""
    plan: Plan
    identity: dict[str, str]
    """Of the corpus and the curriculum, for the next checkpoints."""
    standing: Standing
    notes: tuple[str, ...] = ()
    """What people should know."""


def take_up(
    store: CheckpointStore, curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions, *, amend: bool
) -> Start:
    """The newest checkpoint of a run, or its beginning.

    Raises:
        ValueError: the checkpoint is of another run.
    """
    step = store.latest_step()
    if step is None:
        plan = curriculum.plan(options.seed)
        return Start(0, plan, identity(curriculum, options.seed), Standing())
    saved = store.meta(step)
    before, standing = Plan.from_state(saved["plan"]), Standing.of(saved)
    done = step >= min(before.total_steps, options.max_steps or before.total_steps)
    if not amend and (done or standing.gave_up(options.patience)):
        return Start(step, before, {}, standing)  # finished, whatever has become of its data since
    plan = plan_to_follow(curriculum, options.seed, saved, step, amend=amend, where=str(store.folder.parent))
    notes: tuple[str, ...] = ()
    if len(plan.amendments) > len(before.amendments):
        told = f"the plan until now:\n{before.describe()}\nthe plan from step {step + 1} on:\n{plan.describe()}"
        notes, standing.waited = (told,), 0  # else a run that ended by `patience` would end again at once
        old, new = saved.get("schedule"), schedule_of(optimizer, plan.total_steps)
        if old and new:
            notes = (told, schedule_change(step, old["settings"], new["settings"], new["kind"], old["kind"]))
    return Start(step, plan, identity(curriculum, options.seed), standing, notes)


def to_keep(
    step: int, plan: Plan, identity: Mapping[str, str], standing: Standing, optimizer: Optimizer
) -> dict[str, Any]:
    """What a checkpoint after `step` steps says beside its arrays, for `take_up`."""
    schedule = schedule_of(optimizer, plan.total_steps)
    return {**identity, **asdict(standing), "plan": plan.state(step), "schedule": schedule}


def schedule_of(optimizer: Optimizer, total_steps: int) -> dict[str, Any]:
    """{"kind", "settings"} of the learning rate of a run, for its checkpoints; empty where nobody knows it."""
    if not isinstance(optimizer, NamedOptimizer):
        return {}
    return {"kind": optimizer.config.lr_schedule, "settings": optimizer.settings(total_steps)}


def identity(curriculum: Curriculum, seed: int) -> dict[str, str]:
    """What a checkpoint says its run was made with: another one is another run."""
    corpus = "+".join(data.fingerprint for data in curriculum.datasets.values())
    return {"corpus": corpus, "curriculum": curriculum.plan(seed).fingerprint}


def plan_to_follow(
    curriculum: Curriculum, seed: int, saved: Mapping[str, Any], step: int, *, amend: bool, where: str
) -> Plan:
    """The plan of a run that is resumed after `step` steps.

    Args:
        curriculum: what is asked for now.
        seed: of the data order.
        saved: `identity` and the plan's state as the checkpoint has them.
        step: steps done.
        amend: whether the curriculum may be another one from here on.
        where: the run, for messages.

    Raises:
        ValueError: the curriculum or its data is another one, and `amend` was not asked for, or it cannot be so.
    """
    before = Plan.from_state(saved["plan"])
    now = identity(curriculum, seed)
    changed = [what for what, value in now.items() if saved[what] != value]
    if not changed:
        return before
    if not amend:
        what = changed[0]
        raise ValueError(
            f"the run in {where} was made with another {what} ({saved[what]}, now {now[what]}): put it back to resume, "
            f"change it from step {step + 1} on with --amend, or start in a new run directory"
        )
    if before.seed != seed:
        raise ValueError(f"seed is {seed}, and the run in {where} has {before.seed}: --amend cannot change it")
    ranges = {name: data.ranges for name, data in curriculum.datasets.items()}
    # What a rewind has amended behind this step was not read yet: it is found out again.
    known = [amendment for amendment in saved["plan"]["amendments"] if amendment["from_step"] <= step]
    before = Plan.from_state({**saved["plan"], "amendments": known})
    for name, mine in ranges.items():
        _check_ranges(name, before.amendments[-1].sources, mine)
    return before.amend(step, curriculum.shapes, datasets=ranges)


def _check_ranges(name: str, sources: Mapping[str, Any], now: Sequence[tuple[int, int]]) -> None:
    """Shards may be added at the end or taken away from it: else nobody could say what was read already."""
    if name not in sources:
        return
    before = [tuple(one) for one in sources[name].units.ranges]
    for shard, (old, new) in enumerate(zip(before, map(tuple, now), strict=False)):
        if old != new:
            raise ValueError(
                f"the data {name!r} differs from what the run read, from shard {shard} on: --amend takes shards that "
                f"are added at the end or taken away from it, with the same val_fraction"
            )
