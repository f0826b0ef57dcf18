"""How a run begins: from the start, at its newest checkpoint, or at a checkpoint of another run.

A resumed run follows the plan that it had or, amended, another one from here on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from roxxel_dist.checkpoint.generations import Generation
from roxxel_dist.checkpoint.metadata import BaseModelRef, CheckpointMetadata, CheckpointRef, EarlyStopping, ResumeSpec
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster import determinism
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.step.average import Averaged, begin_average
from roxxel_dist.train.step.bad_steps import BadStep, known_good
from roxxel_dist.train.step.optimizer import Optimizer, for_run, schedule_of
from roxxel_dist.train.step.schedule import LrSchedule, schedule_change
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.validation.evaluator import ValidationRows
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.base import (
    INITIALIZED_FROM,
    find_checkpoint,
    fingerprint,
    load_base_params,
    load_params,
    open_checkpoint,
)

MOST_STEPS = (1 << 31) - 1


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a process begins to train."""

    step: int
    """Steps done."""
    plan: Plan
    metadata: CheckpointMetadata
    """Of the checkpoint that the run resumes from, with the schedule from now on; the next ones have this, and their
    plan."""
    notes: tuple[str, ...] = ()
    """Lines for the user; if there are any, the plan is among them."""
    source: CheckpointRef | None = None
    """The checkpoint of another run to restore; None: the run's own."""
    load: Callable[[Leaves, Leaves], Leaves] | None = None
    """Gives a new run the parameters and the state of another one; a run of adapters, new or not, those of its base."""
    copy: Generation | None = None
    """The copy in memory to restore, where it is newer than the run's checkpoints."""
    record: dict[str, Any] = field(default_factory=dict)
    """Where it comes from, to be kept with the run's config."""
    bits: Mapping[str, Any] = field(default_factory=dict)
    """What decided the bits of its last steps, as its checkpoint says; empty where that says nothing."""

    def is_finished(self, options: LoopOptions) -> bool:
        """Whether no step is left to do."""
        early = self.metadata.early_stopping
        return self.step >= last_step(self.plan, options) or early.should_stop(options.patience)

    @property
    def source_text(self) -> str:
        """The source of the state, for the log."""
        if self.copy is not None:
            return self.copy.source_text
        return "its checkpoint" if self.source is None else f"the checkpoint {self.source}"


def begin(
    store: CheckpointStore,
    curriculum: Curriculum,
    optimizer: Optimizer,
    options: LoopOptions,
    *,
    grad_accum: int = 1,
    amend: bool,
    origin: ResumeSpec,
    copy: Generation | None = None,
) -> ResumePoint:
    """Find where a process begins to train. Changes nothing on the disk.

    A run that has checkpoints resumes from its own, even if it is a fork, or from a `copy` in memory that is newer.
    Raises ValueError if there is no such checkpoint, if it is of another run, or if all those of the run are damaged.
    """
    if copy is None:
        store.check_not_all_damaged()
    run = _RequestedRun(store, curriculum, optimizer, options, copy, amend=amend)
    if options.virtual_shards:
        run.exact = {"virtual_shards": options.virtual_shards, "grad_accum": grad_accum}
        run.exact["bits"] = determinism.numerics_fingerprint()
    if store.latest_step() is None and copy is None and origin.fork is not None:
        start = run.fork(origin.fork, origin.skip_steps)
    else:
        start = run.resume_latest()
    if start.step and start.metadata.base is not None:
        base = start.metadata.base.resolve(options.init_from)
        return replace(start, metadata=replace(start.metadata, base=base), load=partial(load_base_params, base))
    if start.step or options.init_from is None:
        return start
    source = find_checkpoint(options.init_from)
    note = f"the weights are those of {source}; moments, random streams and the position in the data are new"
    return replace(
        start,
        metadata=replace(start.metadata, base=BaseModelRef(source.run, source.step or 0, options.init_from)),
        load=partial(load_params, source),
        notes=(note, start.plan.describe()),
        record={INITIALIZED_FROM: {"run": absolute(source.run), "step": source.step}},
    )


class _RequestedRun:
    """The requested settings of a run, and the checkpoints that it has."""

    def __init__(
        self,
        store: CheckpointStore,
        curriculum: Curriculum,
        optimizer: Optimizer,
        options: LoopOptions,
        copy: Generation | None,
        *,
        amend: bool,
    ) -> None:
        self.store, self.folder, self.copy = store, store.folder.parent, copy
        self.curriculum, self.optimizer, self.options, self.amend = curriculum, optimizer, options, amend
        self.fingerprint = run_fingerprint(curriculum, options.seed)
        self.exact: dict[str, Any] = {"virtual_shards": None, "grad_accum": None, "bits": {}}
        """What a checkpoint of a run with virtual shards says of its bits."""
        self.shapes = curriculum.shapes

    def resume_latest(self) -> ResumePoint:
        """The newest checkpoint of the run, or copy in memory, or its beginning."""
        copy, options = self.copy, self.options
        step = self.store.latest_step() if copy is None else copy.step
        if step is None:
            plan = self.curriculum.plan(options.seed)
            metadata = CheckpointMetadata(schedule=self._schedule({}, plan), **self.exact, **self.fingerprint)
            return ResumePoint(0, plan, metadata)
        saved = self.store.metadata(step) if copy is None else copy.metadata
        before = Plan.from_state(saved.plan)
        point = ResumePoint(step, before, saved, copy=copy, bits=saved.bits)
        if point.is_finished(options) and not self.amend:
            self._check_unchanged(saved, before)
            return point
        self._check_shards(saved, step)
        plan = self._plan_to_follow(saved, step, self.folder, amend=self.amend)
        schedule = self._schedule(saved.schedule, plan)
        change = self._schedule_change(saved.schedule, before, plan, step)
        notes: tuple[str, ...] = (plan.describe(), change) if change else ()
        if len(plan.amendments) > len(before.amendments):
            notes = (*_plan_notes(before, plan, step), *filter(None, [change]))
            # Else a run that ended by `patience` would end again at once.
            saved = replace(saved, early_stopping=saved.early_stopping.patient())
        saved = replace(saved, schedule=schedule, **self.exact, **self.fingerprint)
        return replace(point, plan=plan, metadata=saved, notes=notes)

    def _check_shards(self, saved: CheckpointMetadata, step: int) -> None:
        """Raises UserError where the next steps would not have the bits that virtual shards give."""
        for name in () if self.amend else ("virtual_shards", "grad_accum"):
            was, now = getattr(saved, name), self.exact[name]
            if was not in (None, now):
                raise UserError(
                    f"{name} is {now or 0}, and the run in {self.folder} has {was}: from step {step + 1} on its bits "
                    f"would be others. Leave it as it was, or accept that with {argument('amend')}"
                )

    def _check_unchanged(self, saved: CheckpointMetadata, plan: Plan) -> None:
        """Raises ValueError where a run that is finished is made with other parts, for which nothing would be done."""
        was = {"corpus": saved.corpus, "seed": plan.seed, "curriculum": saved.curriculum}
        was["schedule"] = LrSchedule.from_dict(saved.schedule)
        schedule = schedule_of(for_run(self.optimizer, plan.shapes, saved.schedule), plan.total_steps)
        now = {**self.fingerprint, "seed": self.options.seed, "schedule": schedule}
        for name, old in was.items():
            if old and now[name] and old != now[name]:
                change = now[name].changes_from(old) if name == "schedule" else f"{old}, now {now[name]}"
                raise UserError(
                    f"the run in {self.folder} is finished, and was made with another {name} ({change}), "
                    f"which would change nothing: put it back. To continue, give its phases more steps and "
                    f"{argument('amend')}, or a larger max_steps. Or start a new run"
                )

    def fork(self, source: CheckpointRef, skip_steps: tuple[int, int] | None) -> ResumePoint:
        """A checkpoint of another run, without the rows of `skip_steps`."""
        with open_checkpoint("fork", source) as (store, step):
            saved = store.metadata(step)
        before, seed = Plan.from_state(saved.plan), self.options.seed
        if before.seed != seed:
            raise UserError(f"seed is {seed}, and {source} has {before.seed}: a fork keeps it, or reads twice")
        plan = self._plan_to_follow(saved, step, source.run, amend=True, is_fork=True)
        origin: dict[str, Any] = {"run": absolute(source.run), "step": step}
        note = f"forked from {source}, with its parameters, moments, random streams and position in the data"
        if skip_steps is not None:
            plan, origin["skipped"] = _without(plan, *skip_steps), list(skip_steps)
            note += ", without what steps {} to {} read".format(*skip_steps)
        change = self._schedule_change(saved.schedule, before, plan, step)
        if step >= (last := last_step(plan, self.options)):
            raise UserError(
                f"fork is {source}, and the new run ends at step {last}: give it longer phases, or a larger max_steps"
            )
        return ResumePoint(
            step,
            plan,
            CheckpointMetadata(
                base=saved.base,
                digest=saved.digest,
                schedule=self._schedule(saved.schedule, plan),
                validation=saved.validation,
                early_stopping=EarlyStopping(rows=saved.early_stopping.rows),
                **self.exact,
                **self.fingerprint,
            ),
            notes=(note, *_plan_notes(before, plan, step), *filter(None, [change])),
            source=source,
            record={"forked_from": origin},
        )

    def _plan_to_follow(
        self, saved: CheckpointMetadata, step: int, folder: Path, *, amend: bool, is_fork: bool = False
    ) -> Plan:
        """The plan after a checkpoint of the run in `folder`: its own, or that and the curriculum from there on."""
        before = Plan.from_state(saved.plan)
        fields = [name for name, now in self.fingerprint.items() if getattr(saved, name) != now]
        if not fields:
            return before
        if not amend:
            name = fields[0]
            change = f"{getattr(saved, name)}, now {self.fingerprint[name]}"
            if name == "corpus":
                change += ", that of " + ", ".join(str(data.filepath) for data in self.curriculum.datasets.values())
            raise UserError(
                f"the run in {folder} was made with another {name} ({change}): put it back to resume, change it from "
                f"step {step + 1} on with {argument('amend')}, or start in a new run directory"
            )
        seed = self.options.seed
        if before.seed != seed:
            raise UserError(f"seed is {seed}, and the run in {folder} has {before.seed}: an amendment cannot change it")
        ranges = {name: data.ranges for name, data in self.curriculum.datasets.items()}
        # Amendments of a rewind after this step are dropped: that data was not read yet, and is checked again.
        known = [amendment for amendment in saved.plan["amendments"] if amendment["from_step"] <= step]
        before = Plan.from_state({**saved.plan, "amendments": known})
        if not is_fork:
            return before.amend(step, self.shapes, datasets=ranges)
        for name, mine in ranges.items():
            _check_ranges(name, before.amendments[-1].sources, mine)
        return before.amend(step, self.shapes, datasets=ranges, is_fork=True)

    def _schedule(self, saved: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
        """The learning rate of the run from now on, for its checkpoints; `saved` is what they say so far."""
        schedule = schedule_of(for_run(self.optimizer, plan.shapes, saved), plan.total_steps)
        return {} if schedule is None else schedule.to_dict()

    def _schedule_change(self, saved: Mapping[str, Any], before: Plan, plan: Plan, step: int) -> str:
        """The lines about a learning rate that is another after `step` steps than it was; empty where it is not."""
        old = LrSchedule.from_dict(saved)
        new = LrSchedule.from_dict(self._schedule(saved, plan))
        if old is None or new is None or old.rates == new.rates:
            return ""
        return schedule_change(step, old, new, before, plan)


def _plan_notes(before: Plan, plan: Plan, step: int) -> tuple[str, ...]:
    """The plan that is followed after `step` steps; both, where a checkpoint has another."""
    note = plan.describe()
    if plan.fingerprint != before.fingerprint:
        note = f"the plan until now:\n{before.describe()}\nthe plan from step {step + 1} on:\n{note}"
    return (note,)


def _check_ranges(name: str, sources: Mapping[str, Any], now: Sequence[tuple[int, int]]) -> None:
    """Raises UserError if a fork has other shards than its source, or cuts them otherwise: those that were held out
    would be trained on, or the reverse."""
    before = sources[name].units.ranges if name in sources else []
    for shard, (old, new) in enumerate(zip(before, now, strict=False)):
        if tuple(old) != tuple(new):
            raise UserError(
                f"the data {name!r} differs from what the run read, from shard {shard} on: in a fork, shards "
                f"may be added or removed at the end, with the same val_fraction"
            )


def check_same_bits(was: Mapping[str, Any], now: Mapping[str, Any], virtual_shards: int) -> None:
    """Raises UserError if steps with virtual shards would have other bits with `now` than with `was`; both are
    fingerprints, see `determinism.numerics_fingerprint`, of which the numbers of devices and processes do not count.

    A resume that is amended does not call this: to go on without exactness is the user's choice. The next resume is
    compared with that one.
    """
    if other := determinism.changed(*map(determinism.without_topology, (was, now))):
        raise UserError(
            f"virtual_shards is {virtual_shards}, and here the bits of the run would be others: "
            f"{'; '.join(other)}. Resume it where these are as they were, or accept that with {argument('amend')}"
        )


def last_step(plan: Plan, options: LoopOptions) -> int:
    """The step after which a run ends. Raises UserError for one that the counter of steps (int32) cannot hold."""
    last = min(plan.total_steps, options.max_steps or plan.total_steps)
    if last > MOST_STEPS:
        raise UserError(
            f"phases: the run has {last:,} steps, and may have at most {MOST_STEPS:,} (the counter is an int32): use "
            f"fewer steps or epochs, a larger batch_size, or max_steps"
        )
    return last


def max_steps_note(plan: Plan, options: LoopOptions) -> str:
    """The note that `max_steps` ends a run before its phases do, or cannot make it longer; empty for neither."""
    wanted, steps = options.max_steps or 0, plan.total_steps
    if 0 < wanted < steps:
        return f"max_steps ends the run after step {wanted:,} of {steps:,}; the learning rate follows all {steps:,}"
    if wanted <= steps:
        return ""
    return f"max_steps is {wanted:,}, and the phases end after {steps:,}: give them more epochs, or steps, for more"


def run_fingerprint(curriculum: Curriculum, seed: int) -> dict[str, Any]:
    """The fields of a checkpoint's metadata that say what its run was made with: with others it is another run."""
    corpus = "+".join(data.fingerprint for data in curriculum.datasets.values())
    return {"corpus": corpus, "curriculum": curriculum.plan(seed).fingerprint}


def _without(plan: Plan, first: int, last: int) -> Plan:
    """The plan without what the steps from `first` to `last`, counted from 1, read."""
    if last > plan.total_steps:
        raise UserError(f"skip_steps is {first}:{last}, and the plan has {plan.total_steps} steps: use steps of it")
    changed = plan.amendments[-1].from_step
    if first <= changed:
        raise UserError(
            f"skip_steps is {first}:{last}, and the plan was changed from step {changed + 1} on already: leave out "
            f"steps after that, or fork at an earlier checkpoint"
        )
    return plan.amend(first - 1, skip=last - first + 1)


def rewind(
    store: CheckpointStore, bad: BadStep, plan: Plan, metadata: CheckpointMetadata, options: LoopOptions
) -> tuple[int, Plan, CheckpointMetadata]:
    """(step of a checkpoint, the plan without the rows of a bad step, the metadata of later checkpoints).

    The checkpoint is the newest that is known to be good, or else the newest. Raises `bad` where the run shall not go
    back, or cannot.
    """
    newest = store.latest_of_all()
    good = known_good(bad.step, store.steps()) or newest
    if options.on_bad_step != "rewind" or good is None or metadata.rewinds >= options.max_rewinds:
        raise bad
    try:
        plan = plan.amend(bad.step - 1, skip=1)
    except ValueError as error:  # steps that went well before: nothing is the same twice here
        raise bad from error
    saved = store.metadata(good)
    rewinds = metadata.rewinds + 1
    return good, plan, replace(metadata, early_stopping=saved.early_stopping, digest=saved.digest, rewinds=rewinds)


def restore(store: CheckpointReader, step: int, like: TrainState) -> TrainState:
    """The state of a checkpoint, on the devices of `like`. Bad steps before it are dropped: they were reported.

    The number of bad steps in a row is kept: a run that was killed must end where an uninterrupted one would have.
    """
    return _with_bad_steps_forgotten(store.restore(step, like), like)


def _with_bad_steps_forgotten(state: TrainState, like: TrainState) -> TrainState:
    none, also = (jax.make_array_from_callback((), like.step.sharding, lambda _: np.int32(0)) for _ in range(2))
    return state._replace(health=state.health._replace(bad_step=none, skipped=also))


def restore_start(store: CheckpointStore, start: ResumePoint, like: TrainState) -> TrainState:
    """The state that a run begins with, from its own checkpoint or copy, or the one that it is forked from."""
    if start.copy is not None:
        return _with_bad_steps_forgotten(start.copy.restore(like), like)
    if start.source is None:
        return restore(store, start.step, like)
    with open_checkpoint("fork", start.source) as (theirs, step):
        if not isinstance(like.opt_state, Averaged) or theirs.has_average(step):
            return restore(theirs, step, like)
        state = restore(theirs, step, like._replace(opt_state=like.opt_state.inner))  # the fork begins an average
        places = {name: leaf.sharding for name, leaf in like.opt_state.average.items()}
        average = jax.jit(begin_average, out_shardings=places)(state.params)
        return state._replace(opt_state=Averaged(state.opt_state, average))


def add_validation_rows(
    start: ResumePoint, sets: Mapping[str, Roxxel], options: LoopOptions, fits: Callable[[Shape], bool]
) -> ResumePoint:
    """The start of a run with the rows of its validations: those that it had, or was forked with, where they fit."""
    metadata, tokens = start.metadata, {name: data.num_tokens for name, data in sets.items() if data.num_tokens}
    saved = metadata.validation or {"batches": ()}
    rows = ValidationRows.from_dict({**saved, "eval_iters": options.eval_iters, "tokens": tokens})
    rows = rows.with_phases(start.plan.shapes, fits)
    return replace(start, metadata=replace(metadata, validation=rows.to_dict() if tokens else {}))


def add_adapter_metadata(start: ResumePoint, parts: ModuleSplit) -> ResumePoint:
    """The start of a run, with what its checkpoints and its config say of the base, if it trains adapters."""
    base = start.metadata.base
    if not parts.frozen.names:
        return replace(start, metadata=replace(start.metadata, base=None))
    if base is not None:
        base = replace(base, fingerprint=fingerprint(base.checkpoint))
    start = replace(start, metadata=replace(start.metadata, adapter_scales=dict(parts.scales), base=base))
    if base is None:
        return start
    note = f"adapters are trained for the weights of {base.checkpoint}, which stay as they are"
    known = {"run": absolute(base.run), "step": base.step, "fingerprint": base.fingerprint}
    return replace(
        start, notes=(note, *start.notes) if start.notes else (), record={**start.record, INITIALIZED_FROM: known}
    )
