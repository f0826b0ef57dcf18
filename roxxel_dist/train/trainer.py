"""The training loop.

After a step that is due, in this order: validate, log, save. The first and the last step are always due. The row is on
disk before the save begins, so no checkpoint is ahead of its log.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.cluster.process import process_count, process_index, stop_requested, watching_for_stop
from roxxel_dist.cluster.progress import Progress
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.stream import Stream
from roxxel_dist.train.checkpoint import Checkpointer
from roxxel_dist.train.evaluate import Validation
from roxxel_dist.train.logger import Logger
from roxxel_dist.train.meter import Meter
from roxxel_dist.train.step import LossFn, TrainState, fetch, init_state, make_eval_step, make_step, take_apart
from roxxel_dist.train.trackers.choose import trackers_for


class Trainer:
    """Trains an NNX module through a curriculum on a mesh; continues where `save_path` left off.

    Args:
        model: an `nnx.Module`, the same on every process.
        optimizer: an optax transformation.
        curriculum: phases over a `Roxxel`.
        loss_fn: (model, int32[B, L]) to a scalar, (scalar, aux) or a dict with "loss".
        save_path: the run directory.
        validation: text that is held out; None for no validation.
        eval_every, checkpoint_every, log_every: steps between validations, checkpoints, rows of the log.
        eval_iters: held-out batches a validation reads.
        seed: of the data order.
        mesh: devices of all processes; by default all of them on one axis "data".
        data_sharding: of a (rows, tokens) batch; by default rows over the mesh's first axis.
        grad_accum_steps: micro-batches a step; divides the batch of every phase.
        max_to_keep: checkpoints to keep.
        max_steps: end after this many steps.
        schedule: step to learning rate, if it shall be logged.

    Raises:
        ValueError: a batch that does not divide, data that a phase does not fit in, or a run directory that holds
            another run.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        curriculum: Curriculum,
        loss_fn: LossFn,
        save_path: str | Path,
        *,
        validation: Roxxel | None = None,
        eval_every: int = 500,
        checkpoint_every: int = 100,
        log_every: int = 100,
        eval_iters: int = 10,
        seed: int = 42,
        mesh: Mesh | None = None,
        data_sharding: NamedSharding | None = None,
        grad_accum_steps: int = 1,
        max_to_keep: int | None = 3,
        max_steps: int | None = None,
        schedule: optax.Schedule | None = None,
    ) -> None:
        mesh = mesh or make_mesh()
        sharding = data_sharding or NamedSharding(mesh, P(mesh.axis_names[0], None))
        self.plan = curriculum.plan(seed)
        check_batches(self.plan.shapes, grad_accum_steps)
        self.last_step = min(max_steps or self.plan.total_steps, self.plan.total_steps)
        self._every = {"log": log_every, "eval": eval_every, "save": checkpoint_every}
        self._datasets = curriculum.datasets
        self._sharding = sharding

        self._parts, params, rest = take_apart(model)
        self._validation = None
        if validation is not None and validation.num_tokens:
            self._validation = Validation(validation, make_eval_step(self._parts, loss_fn), sharding, eval_iters)
            for shape in self.plan.shapes:
                self._validation.prepare(shape.batch_size, shape.seq_len)
        self._step = make_step(
            self._parts, loss_fn, optimizer, grad_accum=grad_accum_steps, sharding=sharding, schedule=schedule
        )
        self._one_in_flight = mesh.devices.flat[0].platform == "cpu"  # XLA's in-process collectives starve otherwise
        self.state = init_state(params, rest, optimizer, mesh)
        self.checkpointer = Checkpointer(Path(save_path) / "checkpoints", max_to_keep)
        try:
            self.start_step = self._restore()
        except BaseException:
            self.checkpointer.close()
            raise
        self.stopped = False
        self._unlogged: tuple[int, dict[str, jax.Array]] | None = None
        self._loss: float | None = None
        self._new_shape, self._entered = True, 0.0
        self._meter, self._progress = Meter(), Progress.from_env(process_index())
        self.logger = Logger(trackers_for(Path(save_path), self.last_step, self.start_step))

    def local_model(self) -> Any:
        """The module with the current parameters on this process's first device, dropout off.

        What is computed with it concerns this process alone.
        """
        params, rest = jax.tree.map(lambda leaf: leaf.addressable_data(0), (self.state.params, self.state.rest))
        return self._parts.merge(params, rest, training=False)

    @property
    def finished(self) -> bool:
        """Whether all steps were done before this process began."""
        return self.start_step >= self.last_step

    def _restore(self) -> int:
        """Load the newest complete checkpoint, if any, and return the steps that it has done."""
        step = self.checkpointer.latest_step()
        if step is None:
            return 0
        meta = self.checkpointer.meta(step)
        for what, now in self._identity().items():
            if meta[what] != now:
                raise ValueError(
                    f"the run in {self.checkpointer.folder} was made with another {what} ({meta[what]}, now {now}): "
                    f"put it back to resume, or start in a new run directory"
                )
        self.state = self.checkpointer.restore(step, self.state)
        return step

    def _identity(self) -> dict[str, str]:
        corpus = "+".join(data.fingerprint for data in self._datasets.values())
        return {"corpus": corpus, "curriculum": self.plan.fingerprint}

    def run(self, at_the_end: Callable[[], None] | None = None) -> TrainState:
        """Train to the last step, or until asked to stop (then `stopped` is true), and return the state reached.

        Args:
            at_the_end: called on every rank after the last step, when it is saved and while the log is still open;
                for a run that was finished before, too.
        """
        with self.logger, watching_for_stop():
            self._introduce()
            stream = Stream(self.plan, self._datasets, self._sharding, self.start_step)
            for step in range(self.start_step, self.last_step):
                self._enter(step)
                batch = next(stream)  # read while the device works on the step before
                self._keep_one_in_flight()
                self.state, metrics = self._step(self.state, batch)
                self._log_late()  # the step before: its numbers are there, and the device is busy with this one
                self._account(step, metrics)
                self.stopped = stop_requested(step + 1) and step + 1 < self.last_step
                self._validate_log_save(step)
                if self.stopped:
                    self.logger.text(f"asked to stop: step {step + 1} is saved")
                    break
            self.checkpointer.wait()
            if at_the_end is not None and not self.stopped:
                at_the_end()
        return self.state

    def close(self) -> None:
        """Let go of threads and files; for a trainer that was made and not run too."""
        self.logger.close()
        self.checkpointer.close()

    def _introduce(self) -> None:
        mesh = self._sharding.mesh
        held = f"{len(mesh.local_devices or [])} of {mesh.size} {jax.devices()[0].platform} devices"
        self.logger.text(f"rank {process_index()} of {process_count()}: {held}")
        if self.finished:
            self.logger.text(
                f"this run is finished: step {self.start_step} of {self.last_step} is restored, nothing to do"
            )
        elif self.start_step:
            self.logger.text(f"resuming after step {self.start_step} of {self.last_step}, from its checkpoint")

    def _enter(self, step: int) -> None:
        """Say which step this rank is about to do and, where the shape of batches changes, which phase."""
        phase, shape = self.plan.phase(step), self.plan.shape(step)
        self._progress.enter(step + 1, phase)
        self._new_shape = step == self.start_step or shape != self.plan.shape(step - 1)
        if step == self.start_step or phase != self.plan.phase(step - 1):
            self._log_late()  # before the line that announces the next phase
            lies = fit_sharding(self._sharding, shape).spec
            asked = lies == self._sharding.spec
            how = "" if asked else f", laid out as {lies} because its rows do not divide by the devices"
            self.logger.text(
                f"phase {phase + 1}/{len(self.plan.shapes)} from step {step + 1}: "
                f"{shape[0]} rows x {shape[1]} tokens a step{how}"
            )
        self._entered = time.perf_counter()

    def _keep_one_in_flight(self) -> None:
        if self._one_in_flight or self._new_shape:
            jax.block_until_ready(self.state.step)
            self._meter.finished()

    def _account(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Count the step; remember its numbers if they are due."""
        done, (rows, length) = step + 1, self.plan.shape(step)
        if self._new_shape:  # it compiled: not the speed of training
            jax.block_until_ready(metrics)
            self.logger.text(f"first step of this shape: {time.perf_counter() - self._entered:.1f} s with compilation")
            self._meter.forget()
        else:
            self._meter.step(rows * length)
        self._progress.finish(done)
        self.checkpointer.check()
        if self._is_due("log", done) or self._is_due("eval", done):
            self._unlogged = (done, metrics)
        self._show(done)

    def _validate_log_save(self, step: int) -> None:
        done = step + 1
        validate = self._validation is not None and self._is_due("eval", done)
        save = self.stopped or self._is_due("save", done)
        if not (validate or save or done == self.last_step):
            return
        jax.block_until_ready(self.state.step)
        self._meter.finished()
        self._meter.pause()
        extra: dict[str, float] = {}
        if self._validation is not None and validate:
            extra["val_loss"] = self._validation.run(self.state, *self.plan.shape(step), self._one_in_flight)
        self._log_late(extra)
        if save:
            self.checkpointer.save(done, self.state, {**self._identity(), "plan": self.plan.state(done)})
        self._meter.resume()

    def _is_due(self, what: str, done: int) -> bool:
        return done in (1, self.last_step) or done % self._every[what] == 0

    def _log_late(self, extra: Mapping[str, float] = MappingProxyType({})) -> None:
        """Log the step whose numbers were put aside, if any."""
        if self._unlogged is None:
            return
        (done, metrics), self._unlogged = self._unlogged, None
        values = fetch(metrics)
        self._loss = loss = values.pop("loss")
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} in step {done} (gradient norm {values['grad_norm']}): use a smaller lr, and "
                f"--resume from the last checkpoint, step {self.checkpointer.latest_step()}"
            )
        row = {"step": done, "train_loss": self._loss, "train_bal": 0.0, **extra}
        if "val_loss" in extra:
            row["val_bal"] = 0.0
        row |= (
            self._meter.report() | {"phase": self.plan.phase(done - 1) + 1, "tokens": self.plan.tokens(done)} | values
        )
        self.logger.row(row)

    def _show(self, done: int) -> None:
        """Where the run is, for the bar."""
        speed = self._meter.tokens_per_s
        left = self.plan.tokens(self.last_step) - self.plan.tokens(done)
        self.logger.status(
            {
                "step": done,
                "total": self.last_step,
                "start": self.start_step,
                "loss": self._loss,
                "tokens_per_s": speed,
                "eta_s": left / speed if speed else None,
                "phase": f"phase {self.plan.phase(done - 1) + 1}/{len(self.plan.shapes)}",
            }
        )


def check_batches(shapes: Sequence[Shape], grad_accum_steps: int) -> None:
    """Raises ValueError for a phase whose batch gradient accumulation does not divide."""
    for i, shape in enumerate(shapes):
        if shape.batch_size % grad_accum_steps:
            raise ValueError(
                f"phase {i + 1}: batch_size is {shape.batch_size}, which does not divide by grad_accum "
                f"({grad_accum_steps}): use a multiple of {grad_accum_steps}"
            )
