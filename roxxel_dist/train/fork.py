"""How a run begins: anew, at its newest checkpoint, at an older one of its own, or at one of another run."""

import os
from dataclasses import replace
from typing import Any

from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.badstep import BadStep
from roxxel_dist.train.base import BASE, SCALES, Base, based_on, checkpoint_named, fingerprint, loader, opened
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.cursor import write_cursor
from roxxel_dist.train.follow import Start, changes, end_of, identity, plan_to_follow, take_up, to_keep
from roxxel_dist.train.keeper import restore
from roxxel_dist.train.optimizer import Optimizer
from roxxel_dist.train.origin import Origin, RunStep
from roxxel_dist.train.parts import ModelParts
from roxxel_dist.train.standing import Standing
from roxxel_dist.train.state import TrainState

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
    origin: Origin,
) -> Start:
    """Where a process takes a run up. Nothing on the disk changes.

    A run that has checkpoints goes on from its own, wherever it came from.

    Raises:
        ValueError: there is no such checkpoint, or it is of another run.
    """
    if origin.from_step is not None:
        start = _back(store, curriculum, optimizer, options, origin, amend=amend)
    elif store.latest_step() is None and origin.fork is not None:
        start = _fork(curriculum, optimizer, options, origin.fork)
    else:
        start = take_up(store, curriculum, optimizer, options, amend=amend)
    if start.step:
        return _on_base(store, start, options.init_from)
    return start if options.init_from is None else _with_weights(options.init_from, start)


def _fork(curriculum: Curriculum, optimizer: Optimizer, options: LoopOptions, wanted: RunStep) -> Start:
    with opened("fork", wanted) as (store, step):
        saved = store.meta(step)
    before = Plan.from_state(saved["plan"])
    if before.seed != options.seed:
        raise ValueError(f"seed is {options.seed}, and {wanted} has {before.seed}: a fork keeps it, or reads twice")
    plan = plan_to_follow(curriculum, options.seed, saved, step, amend=True, where=str(wanted.run))
    last = end_of(plan, options)
    if step >= last:
        raise ValueError(
            f"fork is {wanted}, and the new run ends at step {last}: give it longer phases, or a larger max_steps"
        )
    notes = changes(saved, before, plan, optimizer, step)
    told = f"forked from {wanted}, with its parameters, moments, random streams and position in the data"
    return Start(
        step,
        plan,
        identity(curriculum, options.seed),
        Standing(),
        (told, *notes),
        source=wanted,
        record={"forked_from": {"run": str(wanted.run.absolute()), "step": step}},
    )


def _back(
    store: CheckpointStore,
    curriculum: Curriculum,
    optimizer: Optimizer,
    options: LoopOptions,
    origin: Origin,
    *,
    amend: bool,
) -> Start:
    """Back to an older checkpoint, on the plan of the newest: what was amended since holds, at the step it was."""
    kept, folder = store.steps(), store.folder
    if not kept:
        raise ValueError(f"from_step is {origin.from_step}: {folder} has no checkpoint; leave it out to begin")
    newest, job = store.meta(kept[-1]), os.environ.get(JOB_ENV, "")
    if job and Standing.of(newest).went_back == job:  # started again by its launcher, with the same words
        return take_up(store, curriculum, optimizer, options, amend=False)
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
    if step >= (last := end_of(plan, options)):
        raise ValueError(f"from_step is {step}, and the run ends at step {last}: go back further, or let it run longer")
    standing = replace(Standing.of(store.meta(step)), went_back=job)
    if amend:
        standing.waited = 0
    left_out = ", and leaving out what steps {} to {} read".format(*origin.skip_steps) if origin.skip_steps else ""
    told = f"going back from step {kept[-1]} to step {step}{left_out}"
    notes = changes(newest, before, plan, optimizer, step)
    named = identity(curriculum, options.seed)
    meta = to_keep(step, plan, named, standing, optimizer)
    record = {"back_from": kept[-1]} | ({"skipped": list(origin.skip_steps)} if origin.skip_steps else {})
    return Start(step, plan, named, standing, (told, *notes), rewritten=meta, record=record)


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


def go_back(store: CheckpointStore, start: Start, last_step: int) -> None:
    """Do on the disk what `begin` has found: the checkpoint that the run goes back to is the newest, with its new plan.

    Raises:
        ValueError: the folder cannot be written.
    """
    if start.rewritten is None:
        return
    if is_primary():  # before checkpoints go: a run that is cut off here must not be taken for a finished one
        write_cursor(store.folder.parent, start.step, last_step, finished=False)
    store.go_back(start.step, start.rewritten)


def rewound(
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


def restore_start(store: CheckpointStore, start: Start, like: TrainState) -> TrainState:
    """The state that a run begins with, from its own checkpoint or the one that it is forked from."""
    if start.source is None:
        return restore(store, start.step, like)
    with opened("fork", start.source) as (theirs, step):
        return restore(theirs, step, like)


def _with_weights(init_from: str, start: Start) -> Start:
    wanted = checkpoint_named(init_from)
    base = Base(wanted.run, wanted.step or 0, init_from)
    told = f"the weights are those of {wanted}; moments, random streams and the position in the data are new"
    record = {FROM: {"run": str(wanted.run.absolute()), "step": wanted.step}}
    return replace(start, load=loader(wanted), base=base, notes=(told, start.plan.describe()), record=record)


def _on_base(store: CheckpointStore, start: Start, init_from: str | None) -> Start:
    """The start of a run whose checkpoint may hold adapters alone: with the weights that they stand on."""
    if start.source is None:
        saved = store.meta(start.step)
    else:
        with opened("fork", start.source) as (theirs, step):
            saved = theirs.meta(step)
    if BASE not in saved:
        return start
    base = Base.of(saved[BASE], init_from)
    return replace(start, load=based_on(base), base=base)


def with_adapters(start: Start, parts: ModelParts) -> Start:
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
