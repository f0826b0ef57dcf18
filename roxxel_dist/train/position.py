"""Where a run is: the steps done, the plan that it follows, and its state on the devices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax

from roxxel_dist.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.checkpoint.reader import DamagedCheckpoint
from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.model.split import ModuleSplit
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.exact.layout import DeviceStates, can_cut_rows, check_shapes
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.resources import Resources
from roxxel_dist.train.resume import (
    ResumePoint,
    add_adapter_metadata,
    add_validation_rows,
    begin,
    last_step,
    restore,
    restore_start,
    rewind,
)
from roxxel_dist.train.step.bad_steps import BadStep
from roxxel_dist.train.step.digest_chain import hex_digest
from roxxel_dist.train.step.state import TrainState, TrainView
from roxxel_dist.train.step.step import Metrics, loop_numbers
from roxxel_dist.train.steps import StepOptions, Steps, make_steps


@dataclass(eq=False, repr=False)
class Position:
    """The position of a run. A step moves it on, and a rewind moves it back."""

    parts: Parts
    start: ResumePoint
    """Where this process took the run up."""
    steps: Steps
    """The programs of the run, and the shapes of its state."""
    arrays: TrainState | DeviceStates
    """The state, as the steps pass it on; of a run that is not restored yet, shapes alone."""
    hparams: dict[str, jax.Array]
    """The numbers that a step takes and does not change, such as the learning rate."""
    plan: Plan
    metadata: CheckpointMetadata
    """Common to the next checkpoints."""
    step: int
    """Steps done."""
    last_step: int
    """The step after which the run ends."""

    @classmethod
    def begin(cls, parts: Parts, held: Resources, check: Callable[[ResumePoint], None]) -> "Position":
        """Find where the run begins, and make the first state; of a run that goes on it has shapes alone.

        `check` may raise before anything is made.
        """
        options, optimizer, store = parts.options, parts.update_rule, held.store
        copy = held.memory and held.memory.newest(store.latest_step() or 0)
        more = {"amend": parts.amend, "origin": parts.origin, "copy": copy, "grad_accum": parts.grad_accum}
        start = begin(store, parts.training, optimizer, options, **more)
        if copy is None and store.latest_step() is None:
            held.check_nothing_saved_after(start.step)
        start = add_validation_rows(start, parts.validation_sets, options, partial(_can_validate, parts))
        check(start)
        numbers = start.metadata.schedule.get("settings", {}) | loop_numbers(options)
        how = StepOptions.of_run(options, parts.grad_accum)
        steps = make_steps(parts.model, parts.loss_fn, optimizer, parts.sharding, how, numbers)
        arrays, hparams = steps.init(restored=start.step > 0, load=start.load)
        start = add_adapter_metadata(start, steps.split)
        last = last_step(start.plan, options)
        return cls(parts, start, steps, arrays, hparams, start.plan, start.metadata, start.step, last)

    @property
    def split(self) -> ModuleSplit:
        """The module without its arrays."""
        return self.steps.split

    @property
    def state(self) -> TrainState:
        """The state as global arrays; with virtual shards the steps pass on what lies on each device."""
        return self.arrays.whole if isinstance(self.arrays, DeviceStates) else self.arrays

    @property
    def view(self) -> TrainView:
        """The model, the optimizer's state and the step, as they are now."""
        return TrainView(self.split, self.state, self.hparams)

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.step >= self.last_step or self.metadata.early_stopping.should_stop(self.parts.options.patience)

    def checkpoint_metadata(self, done: int) -> CheckpointMetadata:
        """The metadata of a checkpoint after `done` steps."""
        return replace(self.metadata, plan=self.plan.state(done))

    def restore(self, held: Resources) -> None:
        """Load the state of a run that goes on. Raises DamagedCheckpoint."""
        with held.progress.doing("restore"):
            self.arrays = restore_start(held.store, self.start, self.state)
            if not self.metadata.digest:
                held.log.text(f"the checkpoint of step {self.step} has no running digest: a new one begins")

    def take_digest(self, metrics: Metrics) -> None:
        """Keep the running digest of (fetched) metrics for a checkpoint."""
        assert metrics.digest is not None
        self.metadata = replace(self.metadata, digest=hex_digest(metrics.digest))

    def note_validation(self, val_loss: float | None, rows: str) -> tuple[bool, bool]:
        """(whether this is the lowest val_loss on these rows, if there is one; whether the run ends, out of patience).

        `rows` says which they are; it is empty for a loss of the user's own.
        """
        before = self.metadata.early_stopping
        after = before if val_loss is None else before.on_rows(rows).observe(val_loss)
        self.metadata = replace(self.metadata, early_stopping=after)
        better = val_loss is not None and after.best_loss == val_loss and not after.evals_since_best
        return better, after.should_stop(self.parts.options.patience)

    def rewind(self, bad: BadStep, held: Resources) -> None:
        """Restore the newest checkpoint that is known to be good, and leave the rows of the bad step out.

        Raises `bad` where the run shall not go back, or cannot.
        """
        store, like = held.store, self.steps.state
        while True:
            step, plan, metadata = rewind(store, bad, self.plan, self.metadata, self.parts.options)
            try:
                store.check(step)
                break
            except DamagedCheckpoint as damage:
                held.set_aside(damage)
        self.plan, self.metadata = plan, metadata
        if held.memory is not None:
            held.memory.drop(step)
        # In the checkpoint at once: a job that is started again leaves the same rows out, and counts this rewind.
        store.delete_later(step, self.checkpoint_metadata(step).to_dict())
        # Of shapes alone: there may be no room for two states.
        like = self.state._replace(params=like.params, opt_state=like.opt_state)
        del self.arrays
        self.arrays, self.step = restore(store, step, like), step


def _can_validate(parts: Parts, shape: Shape) -> bool:
    """Whether the validation data, the devices and virtual shards allow batches of this shape."""
    options = parts.options
    try:
        cuts_rows = can_cut_rows(parts.model, parts.loss_fn)
        check_shapes([shape], 1, options.virtual_shards, parts.mesh, cuts_rows=cuts_rows)
        for data in (*parts.validation_sets.values(), parts.training.primary_streamer):
            if data.num_tokens:
                EvenRows(data.ranges, shape, options.eval_iters)
    except UserError:
        return False
    return True
