"""The training loop.

After a step that is due, in this order: validate, log, save. The first and the last step are always due. The row is on
disk before the save begins, so no checkpoint is ahead of its log, and a step whose loss is no number is never saved.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary, process_count, process_index
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, scalars_on
from roxxel_dist.cluster.preemption import stop_requested, watching_for_stop
from roxxel_dist.cluster.progress import Progress
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verified import VerifiedBlocks
from roxxel_dist.stream import Stream
from roxxel_dist.train.bad_steps import BadStep, Watch
from roxxel_dist.train.checkpoint.checkpointer import Checkpointer
from roxxel_dist.train.checkpoint.manager import CheckpointManager, restore
from roxxel_dist.train.checkpoint.metadata import RESUME_LATEST, CheckpointMetadata, ResumeSpec
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.compile import Programs, abstract
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.evaluator import HELD_OUT, ask
from roxxel_dist.train.loggers.base import CRASH_LIMIT_S, LogQueue, Tracker
from roxxel_dist.train.loggers.choose import trackers_for
from roxxel_dist.train.loggers.logger import Logger
from roxxel_dist.train.loggers.metrics import Reporter
from roxxel_dist.train.optimizer import as_optimizer, first_state
from roxxel_dist.train.phase_programs import PhasePrograms, check_batches
from roxxel_dist.train.profiler import Profiler
from roxxel_dist.train.resume import (
    ResumePoint,
    begin,
    checkpoint_metadata,
    delete_later_checkpoints,
    last_step,
    restore_start,
    rewind,
    with_adapters,
)
from roxxel_dist.train.run_lock import hold
from roxxel_dist.train.throughput import InFlight
from roxxel_dist.train.timeline import Timeline
from roxxel_dist.train.train_state import ModelState, init_state
from roxxel_dist.train.train_step import SPIKE_FACTOR, LossFn, Metrics
from roxxel_dist.train.verification import Verification


class Trainer:
    """Trains an NNX module through a curriculum on a mesh; continues where `save_path` left off.

    Args:
        model: an `nnx.Module`, the same on every process, trained when `run` returns; or a function that builds one,
            straight into its shards.
        optimizer: an optax transformation, an `nnx.Optimizer`, or one of `train.optimizer`.
        curriculum: phases over a `Roxxel`.
        loss_fn: (model, int32[B, L]) to a scalar, (scalar, aux) or a dict with "loss"; every scalar in it is logged,
            "balance_loss" minimised too. "row_loss", float32[B], gives each data set's loss where a blend is by row.
        save_path: the run directory.
        eval_fn: called with `state` on every rank after each validation; rank 0 prints its text, or logs its numbers.
        validation: data sets by name to validate on, instead of what `val_fraction` holds out.
        mesh: devices of all processes, from `make_mesh` or with axes of your own; by default all of them along "data".
        data_sharding: of a (rows, tokens) batch; by default rows over "data" and "fsdp", or the mesh's first axis.
        grad_accum_steps: micro-batches a step; divides every batch that has more rows, of a smaller one each is a row.
        amend: the curriculum may be another one than the run's, from here on.
        origin: another run's checkpoint to begin with, or an older one of its own to go back to.
        trackers: where rows go besides the console, `training_log.csv` and `metrics.jsonl`.
        logger: speaks and writes its own files too, instead of the console; close it after the trainer.
        checkpointer: whose folder and `max_to_keep` the run's checkpoints have, instead of `save_path`/checkpoints;
            commands such as `generate` look there.
        options: the fields of `train.config.LoopOptions`, such as `log_every`.

    Attributes:
        stopped: whether the last `run` was asked to stop before its end; what it had is saved.
        start: where the run was taken up, and what `run` says of that.
        checkpointer: the one that was given; else the run's `CheckpointStore`.

    Raises:
        ValueError: a batch that does not divide, too little data for a phase, or the run directory of another run.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: Any,
        curriculum: Curriculum,
        loss_fn: LossFn,
        save_path: str | Path,
        *,
        eval_fn: Callable[[ModelState], Any] | None = None,
        validation: Mapping[str, Roxxel] | None = None,
        mesh: Mesh | None = None,
        data_sharding: NamedSharding | None = None,
        grad_accum_steps: int = 1,
        amend: bool = False,
        origin: ResumeSpec = RESUME_LATEST,
        trackers: Sequence[Tracker] = (),
        logger: Logger | None = None,
        checkpointer: Checkpointer | None = None,
        **options: Any,
    ) -> None:
        self.options: LoopOptions = LoopOptions(**options)
        enable_compilation_cache()
        mesh = mesh or make_mesh()
        self.mesh: Mesh = mesh
        self._sharding = data_sharding or batch_sharding(mesh)
        curriculum, held_out = curriculum.hold_out(0 if validation else self.options.val_fraction)
        check_batches(curriculum.shapes, grad_accum_steps)
        self._folder, self._curriculum, self._eval_fn = Path(save_path), curriculum, eval_fn
        self._model = model if isinstance(model, nnx.Module) else None
        self._nnx_optimizer = optimizer if isinstance(optimizer, nnx.Optimizer) else None
        self._optimizer, self._grad_accum = as_optimizer(optimizer), grad_accum_steps
        self._progress = Progress.from_env(process_index())
        self._timeline = Timeline(None if process_index() else self._folder, self._progress)
        self._let_go = hold_together(self._folder)
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go)
            self.store: CheckpointStore = _store(self._folder, checkpointer, self.options)
            if checkpointer is None:
                undo.callback(self.store.close)
            self.checkpointer: Checkpointer | CheckpointStore = checkpointer or self.store
            self._programs, self._in_flight = Programs(mesh), InFlight(mesh)
            undo.callback(self._programs.close)
            start = begin(self.store, curriculum, self._optimizer, self.options, amend=amend, origin=origin)
            self._parts, self._state, model_settings = init_state(
                model, first_state(self._optimizer), mesh, fsdp=self.options.fsdp,
                dtype=jnp.bfloat16 if self.options.use_bf16 else None, restored=start.step > 0, load=start.load,
            )  # fmt: skip
            self.start: ResumePoint = with_adapters(start, self._parts)
            self.plan: Plan = start.plan
            self._metadata = self.start.metadata
            self.start_step: int = start.step
            self.step: int = start.step
            self.stopped: bool = False
            self._failed = self._gone_back = False
            self.last_step: int = last_step(self.plan, self.options)
            numbers = self._optimizer.settings(self.plan.total_steps) | {SPIKE_FACTOR: self.options.spike_factor}
            self._settings = {**model_settings, **scalars_on(mesh, numbers)}
            size = getattr(getattr(self.state.model, "config", None), "vocab_size", None)
            blocks = VerifiedBlocks(size) if self.options.verify_data == "on" else None
            self._verification = Verification(blocks, every_step=process_count() > 1)
            self._prepare(loss_fn, validation or {HELD_OUT: held_out}, grad_accum_steps)
            self.logger: LogQueue = LogQueue()
            self._trackers, self._logger = trackers, logger
            self._prepare_log()
            undo.pop_all()

    def _prepare_log(self) -> None:
        """What tells of the run, and keeps it; nothing is written yet."""
        flops = self.state.flops_per_token()
        self._reporter = Reporter(self.logger, self.plan, self.last_step, self.step, flops, self.mesh.devices.flat)
        self._reporter.before_row = self._verification.wait
        say = self.logger.text
        watch = Watch(say, skip=self.options.on_bad_step == "skip")
        self._check = lambda health: watch.check(health, self.plan, self._keeper.latest_good)
        logged = partial(self.options.is_due, "log", last_step=self.last_step)
        export = self.options.export_weights
        self._keeper = CheckpointManager(self._folder, self.store, self.last_step, say, logged, export=export)
        self._profiler = Profiler(self._folder / "profile", *(self.options.profile_steps or (0, 0)), say=say)

    def _prepare(self, loss_fn: LossFn, sets: Mapping[str, Roxxel], grad_accum: int) -> None:
        """Begin to compile the first phase, and load the checkpoint meanwhile."""
        self._phases = PhasePrograms(
            self._programs, self._parts, self._state, self._settings, loss_fn=loss_fn, optimizer=self._optimizer,
            train=self._curriculum.primary_streamer, sets=sets, sharding=self._sharding, grad_accum=grad_accum,
            options=self.options, blocks=self._verification.blocks,
        )  # fmt: skip
        if not self.finished:
            self._phases.check(self.plan.shapes)
            self._phases.check_vocabulary(self.plan.shapes[0], {**self._curriculum.datasets, **sets})
            self._phases.prepare(self._stream_from(self.step))
        if self.step:
            with self._progress.doing("restore"):
                self._state = restore_start(self.store, self.start, self._state)

    def _stream_from(self, step: int) -> Stream:
        return Stream(self.plan, self._curriculum.datasets, self._sharding, step)

    @property
    def state(self) -> ModelState:
        """The model, the optimizer's state and the step, as they are now."""
        return ModelState(self._parts, self._state, self._settings)

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.step >= self.last_step or self._metadata.early_stopping.should_stop(self.options.patience)

    def run(self, at_the_end: Callable[[], None] | None = None) -> ModelState:
        """Train to the last step, or until asked to stop (then `stopped` is true), and return the state reached.

        The module, and the `nnx.Optimizer`, that the trainer was given have the arrays of that state then.

        Args:
            at_the_end: called on every rank when the run is finished and marked so, the log still open; for a run that
                was finished before too. What it raises is logged, and harms nothing.

        Raises:
            BadStep: a loss is no number, and `on_bad_step` does not help.
            SaveError: the last save failed.
            DamagedData: what a step reads does not agree with its checksums.
        """
        try:
            self.go_back()
            own = trackers_for(self._folder, self.last_step, self.step, self._logger)
            self.logger.open([*own, self._timeline, *self._trackers])
            state = self._run(at_the_end)
        except BaseException:
            self._failed = True
            raise
        if self._model is not None:
            state.copy_to(self._model, self._nnx_optimizer)
        return state

    def go_back(self) -> None:
        """Delete the checkpoints behind that of `from_step`, for a run that goes back; once, and `run` does it too.

        The loss is traced before: a mistake in it costs no checkpoint.

        Raises:
            ValueError: the folder cannot be written.
        """
        if not self.start.goes_back or self._gone_back:
            return
        self.try_loss()
        delete_later_checkpoints(self.store, self.start, self.last_step)
        self._gone_back = True

    def _run(self, at_the_end: Callable[[], None] | None) -> ModelState:
        with self.logger, watching_for_stop(), self._keeper, self._verification:
            self._timeline.open()
            self._progress.say("start")
            self._reporter.introduce(self._sharding, self.start, finished=self.finished)
            if self.start.source is not None:  # from here on the run needs no other one
                self._save(self.step)
            while not (self.finished or self.stopped):
                try:
                    self._train()
                except BadStep as bad:
                    self._rewind(bad)
            self._profiler.close(self._state.step)
            self._keeper.finish(self.step)
            self._progress.say("")  # what comes now is not training: no limit of the launcher is meant for it
            if self.stopped:
                self.logger.text(f"asked to stop: step {self.step} is saved")
                return self.state
            self._keeper.mark_finished(self.step)
            self._timeline.finished()
            if at_the_end is not None:
                try:
                    at_the_end()
                except Exception as error:
                    self.logger.text(f"the run is finished; what comes after its last step failed: {error!r}")
        return self.state

    def _train(self) -> None:
        """Steps, until the end, a request to stop, or a bad one."""
        self._phase, stream = -1, self._stream_from(self.step)  # whichever comes first begins
        self._verification.follow(stream, self.last_step)
        for step in range(self.step, self.last_step):
            begins, batch = self._enter(step), next(stream)  # read while the device works on the steps before
            if self._in_flight.make_room():
                self._reporter.meter.finished()
            self._state, metrics = self._program(self._state, self._settings, batch)
            self._reporter.log(self._check)  # the step before: its numbers are there, the device is busy with this one
            self._account(step, metrics, begins)
            self.stopped = stop_requested(step + 1) and step + 1 < self.last_step
            self._validate_log_save(step, metrics)
            self.step = step + 1
            if self._metadata.early_stopping.should_stop(self.options.patience):
                self.logger.text(f"no lower val_loss in {self.options.patience} validations: the run ends here")
            if self.stopped or self.finished:
                return

    def _rewind(self, bad: BadStep) -> None:
        """Take up the last checkpoint, and leave the rows of the bad step out."""
        self._settle()
        self._progress.say("restore")
        good, self.plan, self._metadata = rewind(self.store, bad, self.plan, self._metadata, self.options)
        # In the checkpoint at once: a job that is started again leaves the same rows out, and counts this rewind.
        self.store.go_back(good, self._checkpoint_metadata(good).to_dict())
        # Of shapes alone: there may be no room for two states.
        like = self._state._replace(params=abstract(self._state.params), opt_state=abstract(self._state.opt_state))
        del self._state
        self._state, self.step = restore(self.store, good, like), good
        self.logger.text(f"{bad}\ngoing back to step {good}; the rows of step {bad.step} are left out")
        self._reporter.rewind(good, self.plan)

    def try_loss(self) -> None:
        """Trace the loss once, without computing it. What the model or the loss function raises passes."""
        if not self.finished:
            self._phases.try_loss(self._stream_from(self.step))

    def close(self) -> None:
        """Let go of threads and files; for a trainer that was made and not run too.

        After a failure it waits for a save under way for 5 s at most: the other ranks learn of the failure afterwards.
        """
        self.logger.close()
        self.store.close(CRASH_LIMIT_S if self._failed else None)
        self._programs.close()
        self._let_go()

    def _enter(self, step: int) -> bool:
        """Say which step this rank is about to do and, where one begins, which phase; returns whether one begins."""
        phase = self.plan.phase(step)
        self._progress.enter(step + 1, phase + 1)
        self._verification.enter(step)
        self._profiler.before(step + 1, self._state.step)
        if begins := phase != self._phase:
            self._reporter.log(self._check)  # before the line that announces the next phase
            self._reporter.phase(step, self._sharding, self._grad_accum)
            self._program = self._program_of(step)
            self._phase, self._tokens = phase, self.plan.tokens(step + 1) - self.plan.tokens(step)
        return begins

    def _program_of(self, step: int) -> Any:
        """The compiled step of the phase of `step`, once every rank has it; waits where it was not made ahead."""
        key, begun = self._phases.prepare(self._stream_from(step)), time.perf_counter()
        if waits := not self._programs.ready(key):
            self._settle()
        program = self._get_together(key)
        if waits:
            self.logger.text(f"waited {time.perf_counter() - begun:.1f} s for this phase's program to be compiled")
            self._reporter.meter.forget()
        return program

    def _get_together(self, key: Any) -> Any:
        """The compiled program, once every rank has it."""
        if self._programs.shared(key):
            return self._programs.get(key)
        with self._progress.doing("compile"):
            return self._programs.get_together(key)

    def _settle(self) -> None:
        """Until the devices have done all that they were given."""
        self._in_flight.settle()
        self._reporter.meter.finished()

    def _account(self, step: int, metrics: Metrics, begins: bool) -> None:
        """Count the step, remember its numbers if they are due, and compile ahead when a phase has begun."""
        done = step + 1
        self._in_flight.add(metrics.scalars["loss"])
        self._reporter.meter.step(self._tokens)
        self._progress.finish(done)
        self._keeper.poll()
        if self.options.is_due("log", done, self.last_step) or self.options.is_due("eval", done, self.last_step):
            self._reporter.put_aside(done, metrics)
        if begins and (end := sum(shape.steps for shape in self.plan.shapes[: self._phase + 1])) < self.last_step:
            self._phases.prepare(self._stream_from(end))
        self._reporter.show(done)
        self._profiler.after(done, metrics.scalars["loss"])

    def _validate_log_save(self, step: int, metrics: Metrics) -> None:
        done = step + 1
        evaluate = self.options.is_due("eval", done, self.last_step)
        due = self.options.is_due("checkpoint", done, self.last_step) or self.store.keeps_forever(done)
        save = self._keeper.save_requested(done) or self.stopped or due
        if not (evaluate or save or done == self.last_step):
            return
        self._settle()
        self._verification.wait(done)
        self._reporter.meter.pause()
        keys = self._phases.prepare_validation(self.plan, step) if evaluate else []
        if not all(map(self._programs.shared, keys)):
            self._progress.say("compile")  # not back to "step" afterwards: this step is done
        for key in keys:
            self._get_together(key)
        self._progress.say("eval" if evaluate else "save")
        extra: dict[str, float] = {}
        if evaluate:
            one = self._in_flight.limit == 1
            extra = self._phases.validate(self._state, self.plan, step, self._reporter.fetch, one_in_flight=one)
            extra |= ask(self._eval_fn, self.state, self.logger.text)
        if not self._reporter.log(self._check, extra) and save:
            self._check(self._reporter.fetch(metrics.health))
        best = "val_loss" in extra and self._metadata.early_stopping.update(extra["val_loss"])
        if save or best or self._metadata.early_stopping.should_stop(self.options.patience):
            self._progress.say("save")
            self._save(done, extra.get("val_loss"))
        self._reporter.meter.resume()

    def _save(self, done: int, val_loss: float | None = None) -> None:
        self._keeper.save(done, self._state, self._checkpoint_metadata(done), val_loss)

    def _checkpoint_metadata(self, done: int) -> CheckpointMetadata:
        return checkpoint_metadata(done, self.plan, self._metadata, self._optimizer)


def hold_together(run: Path) -> Callable[[], None]:
    """Hold a run directory on rank 0 for all ranks; returns what lets it go.

    Raises:
        ValueError: on every rank, where another process trains in it, or it cannot be written.
    """
    let_go, problem = lambda: None, ""
    if is_primary():
        try:
            let_go = hold(run)
        except ValueError as error:
            problem = str(error)
    if problem := broadcast_from_primary("run directory is free", problem):
        raise ValueError(problem)
    return let_go


def _store(run: Path, checkpointer: Checkpointer | None, options: LoopOptions) -> CheckpointStore:
    """The checkpoints of a run, in its folder or where a checkpointer of the user's own keeps them."""
    if checkpointer is None:
        return CheckpointStore(run / "checkpoints", **options.kept())
    if options.keep_every or options.keep_steps:
        raise ValueError("keep_every and keep_steps are of the run's own checkpoints: leave them out, or checkpointer")
    return checkpointer.store
