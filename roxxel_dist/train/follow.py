"""Which plan a resumed run follows: the one it had, or the one it had and another from here on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.base import Base
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.optimizer import NamedOptimizer, Optimizer
from roxxel_dist.train.origin import RunStep
from roxxel_dist.train.schedule import schedule_change
from roxxel_dist.train.standing import Standing
from roxxel_dist.train.state import Leaves


@dataclass(frozen=True)
class Start:
    """Where a process takes a run up."""

    step: int
    """Steps done."""
    plan: Plan
    identity: dict[str, Any]
    """Of the corpus and the curriculum, and of what adapters stand on, for the next checkpoints."""
    standing: Standing
    notes: tuple[str, ...] = ()
    """What people should know; where there is anything, the plan is among it."""
    source: RunStep | None = None
    """The checkpoint of another run to restore; its own where None."""
    load: Callable[[Leaves], Leaves] | None = None
    """Gives a new run the parameters of another one; a run of adapters, new or not, those that they stand on."""
    base: Base | None = None
    """Where those come from."""
    rewritten: dict[str, Any] | None = None
    """What the checkpoint of `step` shall say from now on, as the newest: the run goes back to it."""
    record: dict[str, Any] = field(default_factory=dict)
    """Where it comes from, to be kept with the run's config."""

    @property
    def whence(self) -> str:
        """Whose checkpoint is restored, in words."""
        return "its checkpoint" if self.source is None else f"the checkpoint {self.source}"


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
    if not amend and (step >= end_of(before, options) or standing.gave_up(options.patience)):
        _check_finished(store, curriculum, optimizer, options, saved, before)
        return Start(step, before, {}, standing)
    plan = plan_to_follow(curriculum, options.seed, saved, step, amend=amend, where=str(store.folder.parent))
    notes: tuple[str, ...] = ()
    if len(plan.amendments) > len(before.amendments):
        notes = changes(saved, before, plan, optimizer, step)
        standing.waited = 0  # else a run that ended by `patience` would end again at once
    return Start(step, plan, identity(curriculum, options.seed), standing, notes)


def _check_finished(
    store: CheckpointStore, curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions,
    saved: Mapping[str, Any], plan: Plan,
) -> None:  # fmt: skip
    """Raises ValueError where a run that is finished is made with other parts, for which nothing would be done."""
    was = {**{name: saved.get(name) for name in ("corpus", "curriculum", "schedule")}, "seed": plan.seed}
    now = {**identity(curriculum, options.seed), "seed": options.seed}
    now["schedule"] = schedule_of(optimizer, plan.total_steps)
    for name in ("corpus", "seed", "curriculum", "schedule"):
        if was[name] and now[name] and was[name] != now[name]:
            raise ValueError(
                f"the run in {store.folder.parent} is finished, and was made with another {name} ({was[name]}, now "
                f"{now[name]}), so nothing would be done with it: put it back; or go on with more steps in its phases "
                f"and amend=True, or a larger max_steps; or begin a new run"
            )


def end_of(plan: Plan, options: LoopOptions) -> int:
    """The step after which a run ends."""
    return min(plan.total_steps, options.max_steps or plan.total_steps)


def longer_than_its_phases(plan: Plan, options: LoopOptions) -> str:
    """What is said where `max_steps` asks for more steps than there are: it ends a run early, and makes none longer."""
    wanted, steps = options.max_steps or 0, plan.total_steps
    if wanted <= steps:
        return ""
    return f"max_steps is {wanted:,}, and the phases end after {steps:,}: give them more epochs, or steps, for more"


def changes(saved: Mapping[str, Any], before: Plan, plan: Plan, optimizer: Optimizer, step: int) -> tuple[str, ...]:
    """The plan that is followed after `step` steps, and the learning rate; both, where a checkpoint has others."""
    other, told = plan.fingerprint != before.fingerprint, plan.describe()
    if other:
        told = f"the plan until now:\n{before.describe()}\nthe plan from step {step + 1} on:\n{told}"
    old, new = saved.get("schedule"), schedule_of(optimizer, plan.total_steps)
    if old and new and old != new:
        return told, schedule_change(step, old["settings"], new["settings"], new["kind"], old["kind"])
    return (told,)


def to_keep(
    step: int, plan: Plan, identity: Mapping[str, Any], standing: Standing, optimizer: Optimizer
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
            f"change it from step {step + 1} on with amend=True, or start in a new run directory"
        )
    if before.seed != seed:
        raise ValueError(f"seed is {seed}, and the run in {where} has {before.seed}: an amendment cannot change it")
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
                f"the data {name!r} differs from what the run read, from shard {shard} on: amending and forking take "
                f"shards that are added at the end or taken away from it, with the same val_fraction"
            )
