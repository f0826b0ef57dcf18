"""How a run begins: anew, at its newest checkpoint, at an older one of its own, or at one of another run.

Which plan a resumed run follows: the one it had, or the one it had and another from here on.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.bad_steps import BadStep
from roxxel_dist.train.checkpoint.manager import restore
from roxxel_dist.train.checkpoint.metadata import CheckpointRef, ResumeSpec, Standing, write_cursor
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.init_from import (
    BASE,
    SCALES,
    Base,
    base_params_loader,
    find_checkpoint,
    fingerprint,
    open_checkpoint,
    params_loader,
)
from roxxel_dist.train.optimizer import NamedOptimizer, Optimizer, schedule_change
from roxxel_dist.train.train_state import Leaves, ModelParts, TrainState


@dataclass(frozen=True)
class ResumePoint:
    """Where a process takes a run up."""

    step: int
    """Steps done."""
    plan: Plan
    identity: dict[str, Any]
    """Of the corpus and the curriculum, and of what adapters stand on, for the next checkpoints."""
    standing: Standing
    notes: tuple[str, ...] = ()
    """What people should know; where there is anything, the plan is among it."""
    source: CheckpointRef | None = None
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


def resume_latest(
    store: CheckpointStore, curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions, *, amend: bool
) -> ResumePoint:
    """The newest checkpoint of a run, or its beginning.

    Raises:
        ValueError: the checkpoint is of another run.
    """
    step = store.latest_step()
    if step is None:
        plan = curriculum.plan(options.seed)
        return ResumePoint(0, plan, run_fingerprint(curriculum, options.seed), Standing())
    saved = store.meta(step)
    before, standing = Plan.from_state(saved["plan"]), Standing.of(saved)
    if not amend and (step >= last_step(before, options) or standing.gave_up(options.patience)):
        _check_finished(store, curriculum, optimizer, options, saved, before)
        return ResumePoint(step, before, {}, standing)
    plan = plan_to_follow(curriculum, options.seed, saved, step, amend=amend, where=str(store.folder.parent))
    notes: tuple[str, ...] = ()
    if len(plan.amendments) > len(before.amendments):
        notes = changes(saved, before, plan, optimizer, step)
        standing.waited = 0  # else a run that ended by `patience` would end again at once
    return ResumePoint(step, plan, run_fingerprint(curriculum, options.seed), standing, notes)


def _check_finished(
    store: CheckpointStore, curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions,
    saved: Mapping[str, Any], plan: Plan,
) -> None:  # fmt: skip
    """Raises ValueError where a run that is finished is made with other parts, for which nothing would be done."""
    was = {**{name: saved.get(name) for name in ("corpus", "curriculum", "schedule")}, "seed": plan.seed}
    now = {**run_fingerprint(curriculum, options.seed), "seed": options.seed}
    now["schedule"] = schedule_of(optimizer, plan.total_steps)
    for name in ("corpus", "seed", "curriculum", "schedule"):
        if was[name] and now[name] and was[name] != now[name]:
            raise ValueError(
                f"the run in {store.folder.parent} is finished, and was made with another {name} ({was[name]}, now "
                f"{now[name]}), so nothing would be done with it: put it back; or go on with more steps in its phases "
                f"and amend=True, or a larger max_steps; or begin a new run"
            )


def last_step(plan: Plan, options: LoopOptions) -> int:
    """The step after which a run ends."""
    return min(plan.total_steps, options.max_steps or plan.total_steps)


def max_steps_note(plan: Plan, options: LoopOptions) -> str:
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


def checkpoint_metadata(
    step: int, plan: Plan, identity: Mapping[str, Any], standing: Standing, optimizer: Optimizer
) -> dict[str, Any]:
    """What a checkpoint after `step` steps says beside its arrays, for `resume_latest`."""
    schedule = schedule_of(optimizer, plan.total_steps)
    return {**identity, **asdict(standing), "plan": plan.state(step), "schedule": schedule}


def schedule_of(optimizer: Optimizer, total_steps: int) -> dict[str, Any]:
    """{"kind", "settings"} of the learning rate of a run, for its checkpoints; empty where nobody knows it."""
    if not isinstance(optimizer, NamedOptimizer):
        return {}
    return {"kind": optimizer.config.lr_schedule, "settings": optimizer.settings(total_steps)}


def run_fingerprint(curriculum: Curriculum, seed: int) -> dict[str, str]:
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
        saved: `run_fingerprint` and the plan's state as the checkpoint has them.
        step: steps done.
        amend: whether the curriculum may be another one from here on.
        where: the run, for messages.

    Raises:
        ValueError: the curriculum or its data is another one, and `amend` was not asked for, or it cannot be so.
    """
    before = Plan.from_state(saved["plan"])
    now = run_fingerprint(curriculum, seed)
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


JOB_ENV = "ROXXEL_RUN_ID"
FROM = "initialized_from"
"""What a run's record calls the checkpoint that its weights come from."""


def begin(
    store: CheckpointStore,
    curriculum: Curriculum,
    optimizer: Optimizer,
    options: LoopOptions,
    *,
    amend: bool,
    origin: ResumeSpec,
) -> ResumePoint:
    """Where a process takes a run up. Nothing on the disk changes.

    A run that has checkpoints goes on from its own, wherever it came from.

    Raises:
        ValueError: there is no such checkpoint, or it is of another run.
    """
    if origin.from_step is not None:
        start = _restart_from(store, curriculum, optimizer, options, origin, amend=amend)
    elif store.latest_step() is None and origin.fork is not None:
        start = _fork(curriculum, optimizer, options, origin.fork)
    else:
        start = resume_latest(store, curriculum, optimizer, options, amend=amend)
    if start.step:
        return _on_base(store, start, options.init_from)
    return start if options.init_from is None else _with_weights(options.init_from, start)


def _fork(curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions, wanted: CheckpointRef) -> ResumePoint:
    with open_checkpoint("fork", wanted) as (store, step):
        saved = store.meta(step)
    before = Plan.from_state(saved["plan"])
    if before.seed != options.seed:
        raise ValueError(f"seed is {options.seed}, and {wanted} has {before.seed}: a fork keeps it, or reads twice")
    plan = plan_to_follow(curriculum, options.seed, saved, step, amend=True, where=str(wanted.run))
    last = last_step(plan, options)
    if step >= last:
        raise ValueError(
            f"fork is {wanted}, and the new run ends at step {last}: give it longer phases, or a larger max_steps"
        )
    notes = changes(saved, before, plan, optimizer, step)
    told = f"forked from {wanted}, with its parameters, moments, random streams and position in the data"
    return ResumePoint(
        step,
        plan,
        run_fingerprint(curriculum, options.seed),
        Standing(),
        (told, *notes),
        source=wanted,
        record={"forked_from": {"run": str(wanted.run.absolute()), "step": step}},
    )


def _restart_from(
    store: CheckpointStore,
    curriculum: Curriculum,
    optimizer: Optimizer,
    options: LoopOptions,
    origin: ResumeSpec,
    *,
    amend: bool,
) -> ResumePoint:
    """Back to an older checkpoint, on the plan of the newest: what was amended since holds, at the step it was."""
    kept, folder = store.steps(), store.folder
    if not kept:
        raise ValueError(f"from_step is {origin.from_step}: {folder} has no checkpoint; leave it out to begin")
    newest, job = store.meta(kept[-1]), os.environ.get(JOB_ENV, "")
    if job and Standing.of(newest).went_back == job:  # started again by its launcher, with the same words
        return resume_latest(store, curriculum, optimizer, options, amend=False)
    step: Any = origin.from_step
    if step not in kept:
        raise ValueError(f"from_step is {step}: {folder} has no checkpoint of that step; kept are {_list(kept)}")
    if amend and origin.skip_steps:
        raise ValueError(
            "skip_steps counts the steps of the plan as it is, and amend changes it: do one, then the other"
        )
    before = Plan.from_state(newest["plan"])
    plan = plan_to_follow(curriculum, options.seed, newest, step, amend=amend, where=str(folder.parent))
    if origin.skip_steps:
        plan = _without(plan, *origin.skip_steps)
    if step >= (last := last_step(plan, options)):
        raise ValueError(f"from_step is {step}, and the run ends at step {last}: go back further, or let it run longer")
    standing = replace(Standing.of(store.meta(step)), went_back=job)
    if amend:
        standing.waited = 0
    left_out = ", and leaving out what steps {} to {} read".format(*origin.skip_steps) if origin.skip_steps else ""
    told = f"going back from step {kept[-1]} to step {step}{left_out}"
    notes = changes(newest, before, plan, optimizer, step)
    named = run_fingerprint(curriculum, options.seed)
    meta = checkpoint_metadata(step, plan, named, standing, optimizer)
    record = {"back_from": kept[-1]} | ({"skipped": list(origin.skip_steps)} if origin.skip_steps else {})
    return ResumePoint(step, plan, named, standing, (told, *notes), rewritten=meta, record=record)


def _without(plan: Plan, first: int, last: int) -> Plan:
    """The plan without what the steps from `first` to `last`, counted from 1, read."""
    if last > plan.total_steps:
        raise ValueError(f"skip_steps is {first}:{last}, and the plan has {plan.total_steps} steps: use steps of it")
    changed = plan.amendments[-1].from_step
    if first <= changed:
        raise ValueError(
            f"skip_steps is {first}:{last}, and the plan was changed from step {changed + 1} on already: leave out "
            f"steps behind that, or start a new run"
        )
    return plan.amend(first - 1, skip=last - first + 1)


def delete_later_checkpoints(store: CheckpointStore, start: ResumePoint, last_step: int) -> None:
    """Do on the disk what `begin` has found: the checkpoint that the run goes back to is the newest, with its new plan.

    Raises:
        ValueError: the folder cannot be written.
    """
    if start.rewritten is None:
        return
    if is_primary():  # before checkpoints go: a run that is cut off here must not be taken for a finished one
        write_cursor(store.folder.parent, start.step, last_step, finished=False)
    store.go_back(start.step, start.rewritten)


def rewind(
    store: CheckpointStore, bad: BadStep, plan: Plan, standing: Standing, options: LoopOptions
) -> tuple[int, Plan, Standing]:
    """(step of the last checkpoint, the plan without the rows of a bad step, how the run stands there).

    Raises:
        BadStep: this one; the run shall not go back, or cannot.
    """
    good = store.latest_of_all()
    if options.on_bad_step != "rewind" or good is None or standing.rewinds >= options.max_rewinds:
        raise bad
    try:
        plan = plan.amend(bad.step - 1, skip=1)
    except ValueError as error:  # steps that went well before: nothing is the same twice here
        raise bad from error
    return good, plan, replace(Standing.of(store.meta(good)), rewinds=standing.rewinds + 1)


def restore_start(store: CheckpointStore, start: ResumePoint, like: TrainState) -> TrainState:
    """The state that a run begins with, from its own checkpoint or the one that it is forked from."""
    if start.source is None:
        return restore(store, start.step, like)
    with open_checkpoint("fork", start.source) as (theirs, step):
        return restore(theirs, step, like)


def _with_weights(init_from: str, start: ResumePoint) -> ResumePoint:
    wanted = find_checkpoint(init_from)
    base = Base(wanted.run, wanted.step or 0, init_from)
    told = f"the weights are those of {wanted}; moments, random streams and the position in the data are new"
    record = {FROM: {"run": str(wanted.run.absolute()), "step": wanted.step}}
    return replace(start, load=params_loader(wanted), base=base, notes=(told, start.plan.describe()), record=record)


def _on_base(store: CheckpointStore, start: ResumePoint, init_from: str | None) -> ResumePoint:
    """The start of a run whose checkpoint may hold adapters alone: with the weights that they stand on."""
    if start.source is None:
        saved = store.meta(start.step)
    else:
        with open_checkpoint("fork", start.source) as (theirs, step):
            saved = theirs.meta(step)
    if BASE not in saved:
        return start
    base = Base.of(saved[BASE], init_from)
    return replace(start, load=base_params_loader(base), base=base)


def with_adapters(start: ResumePoint, parts: ModelParts) -> ResumePoint:
    """The start of a run, with what checkpoints and config of one that trains adapters shall know of their base."""
    if not parts.frozen.names:
        return start
    base, more = start.base, {SCALES: dict(parts.scales)}
    if base is not None:
        base = base if base.fingerprint else base._replace(fingerprint=fingerprint(base.place))
        more[BASE] = base.state()
    start = replace(
        start,
        base=base,
        identity={**start.identity, **more},
        rewritten=None if start.rewritten is None else {**start.rewritten, **more},
    )
    if base is None:
        return start
    told = f"adapters are trained for the weights of {base.place}, which stay as they are"
    known = {"run": str(base.run.absolute()), "step": base.step, "fingerprint": base.fingerprint}
    return replace(
        start,
        notes=(told, *start.notes) if start.notes else (),
        record={**start.record, FROM: known},
    )


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
