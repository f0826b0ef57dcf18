"""The training loop. One step, in order, is `Trainer._train`; `train/README.md` has the files that it crosses.

Decision 6.
"""

import contextlib
import difflib
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.generations import run_identity
from roxxel_dist.checkpoint.memory import MemoryTier, open_memory
from roxxel_dist.checkpoint.metadata import RESUME_LATEST, CheckpointMetadata, ResumeSpec, read_cursor, write_cursor
from roxxel_dist.checkpoint.store import CheckpointStore, DamagedCheckpoint
from roxxel_dist.cluster.determinism import enable_compilation_cache, pin_for_shards
from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary, process_count, process_index
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.folder_lock import hold_folder
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, scalars_on
from roxxel_dist.cluster.preemption import watching_for_stop
from roxxel_dist.cluster.progress import Progress
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verify import VerifiedBlocks
from roxxel_dist.input.stream import Stream
from roxxel_dist.input.verify_ahead import Verification
from roxxel_dist.model.split import has_random_streams_alone
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.place.files import check_run_folder
from roxxel_dist.settings.training import LoopKeywords, LoopOptions
from roxxel_dist.train.agreement import StepAgreement
from roxxel_dist.train.checkpointer import Checkpointer
from roxxel_dist.train.evaluator import HELD_OUT, Validation, run_eval_fn, summarize
from roxxel_dist.train.exact.layout import DeviceStates, can_cut_rows, check_shapes
from roxxel_dist.train.exact.step import init_state_of_copies, make_sharded_steps
from roxxel_dist.train.log.base import CRASH_LIMIT_S, LogQueue, Tracker, TrackerSource
from roxxel_dist.train.log.choose import trackers_for
from roxxel_dist.train.log.profiler import Profiler
from roxxel_dist.train.log.timeline import Timeline
from roxxel_dist.train.metrics import MetricsLogger
from roxxel_dist.train.resume import (
    ResumePoint,
    begin,
    checkpoint_metadata,
    last_step,
    restore,
    restore_start,
    rewind,
    run_fingerprint,
    with_adapters,
)
from roxxel_dist.train.step.bad_steps import BadStep, BadStepMonitor
from roxxel_dist.train.step.batch_layout import batch_layout
from roxxel_dist.train.step.compile import AotCompiler, abstract, batch_key, mesh_of
from roxxel_dist.train.step.digest_chain import DigestChain, in_hex
from roxxel_dist.train.step.optimizer import InitialState, as_optimizer, check_update
from roxxel_dist.train.step.repeated_work import MOST, work_ratio
from roxxel_dist.train.step.state import TrainState, TrainView, init_state
from roxxel_dist.train.step.step import (
    SPIKE_FACTOR,
    LossFn,
    Metrics,
    check_vocabulary,
    fetch,
    make_eval_step,
    make_step,
)
from roxxel_dist.train.step.throughput import InflightThrottler, StepTimer
from roxxel_dist.train.writer import CheckpointManager


class Trainer:
    """Trains an NNX module through a curriculum on a mesh; continues where `save_path` left off.

    Args:
        model: an `nnx.Module`, the same on every process, trained when `run` returns; or a function that builds one,
            straight into its shards.
        optimizer: an optax transformation, which may ask for the loss as `value`; an `nnx.Optimizer`, whose moments are
            not taken, they start new; or one of `train.step.optimizer`.
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
        origin: another run's checkpoint to begin with.
        trackers: where rows go besides the console, `training_log.csv` and `metrics.jsonl`.
        logger: speaks and writes its own files too, instead of the console; close it after the trainer.
        checkpointer: whose folder and `max_to_keep` the run's checkpoints have, instead of `save_path`/checkpoints;
            commands such as `generate` look there.
        bucket: the run is kept there too, and its checkpoints count there alone; `save_path` is its local folder.
        options: the fields of `settings.training.LoopOptions`, such as `log_every`.

    Attributes:
        stopped: whether the last `run` was asked to stop before its end; what it had is saved.
        start: where the run was taken up, and what `run` logs of that.
        fetches: how often numbers were fetched from the devices.
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
        eval_fn: Callable[[TrainView], Any] | None = None,
        validation: Mapping[str, Roxxel] | None = None,
        mesh: Mesh | None = None,
        data_sharding: NamedSharding | None = None,
        grad_accum_steps: int = 1,
        amend: bool = False,
        origin: ResumeSpec = RESUME_LATEST,
        trackers: Sequence[Tracker] = (),
        logger: TrackerSource | None = None,
        checkpointer: Checkpointer | None = None,
        bucket: BucketRun | None = None,
        **options: Unpack[LoopKeywords],
    ) -> None:
        if not isinstance(curriculum, Curriculum):
            raise TypeError(
                f"Trainer: curriculum is a {type(curriculum).__name__}, and must be a Curriculum. The order is "
                f"Trainer(model, optimizer, curriculum, loss_fn, save_path)"
            )
        self.options: LoopOptions = loop_options(options)
        pin_for_shards(self.options.virtual_shards)
        enable_compilation_cache()
        self.mesh: Mesh = mesh or make_mesh()
        self._sharding = data_sharding or batch_sharding(self.mesh)
        self._curriculum, held_out = curriculum.hold_out(0 if validation else self.options.val_fraction)
        check_shapes(
            self._curriculum.shapes,
            grad_accum_steps,
            self.options.virtual_shards,
            self.mesh,
            cuts_rows=can_cut_rows(model, loss_fn),
        )
        self._folder, self._loss_fn, self._eval_fn = Path(save_path), loss_fn, eval_fn
        self._trackers, self._user_logger, self._bucket = trackers, logger, bucket
        self._given_validation = validation
        self._model = model if isinstance(model, nnx.Module) else None
        self._nnx_optimizer = optimizer if isinstance(optimizer, nnx.Optimizer) else None
        self._optimizer, self._grad_accum = as_optimizer(optimizer), grad_accum_steps
        self._progress = Progress.from_env(process_index())
        self._timeline = Timeline(None if process_index() else self._folder, self._progress)
        self.logger: LogQueue = LogQueue()
        self.stopped: bool = False
        self.fetches: int = 0
        self._failed = False
        self._work_is_known = False
        self._needed = False  # whether the last save must be on disk, whatever copies there are in memory
        self._deferred: tuple[int, Metrics] | None = None
        self._release_folder = hold_together(self._folder)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release_folder)
            self.store: CheckpointStore = self._open_store(checkpointer)
            if checkpointer is None:
                undo.callback(self.store.close)
            self.checkpointer: Checkpointer | CheckpointStore = checkpointer or self.store
            self._compiler = AotCompiler(self.mesh)
            undo.callback(self._compiler.close)
            self._memory = self._open_memory()
            if self._memory is not None:
                undo.callback(self._memory.close)
            while True:
                try:
                    self._init_state(model, amend=amend, origin=origin)
                    self._init_programs(model, validation or {HELD_OUT: held_out})
                    break
                except DamagedCheckpoint as damage:  # all ranks are here: it is again as if that step were never saved
                    self._set_aside(damage)
            self._init_reporting()
            undo.pop_all()

    def _open_store(self, checkpointer: Checkpointer | None) -> CheckpointStore:
        """The run's checkpoints, or those of a given checkpointer, of which this process becomes the writer."""
        options = self.options
        if checkpointer is not None:
            if options.keep_every or options.keep_steps:
                raise UserError(
                    "keep_every and keep_steps are of the run's own checkpoints: leave them out, or checkpointer"
                )
            checkpointer.store.begin_writing()
            return checkpointer.store
        return CheckpointStore(
            self._folder / files.CHECKPOINTS,
            options.max_to_keep,
            keep_every=options.keep_every,
            keep_steps=options.keep_steps,
            remote=None if self._bucket is None else self._bucket.checkpoints,
        )

    def _open_memory(self) -> MemoryTier | None:
        """The copies in memory, where the job has a place for them."""
        options = self.options
        made_with = run_fingerprint(self._curriculum, options.seed), options.seed, options.fsdp, options.use_bf16
        return open_memory(
            run_identity(self._folder.absolute() if self._bucket is None else self._bucket, self.mesh, made_with),
            every=options.memory_checkpoint_every,
            replicas=options.memory_replicas,
            log=self.logger.text,
            rows=[self._folder / name for name in ("training_log.csv", "metrics.jsonl")],
        )

    def _init_state(self, model: nnx.Module | Callable[[], nnx.Module], *, amend: bool, origin: ResumeSpec) -> None:
        """Find where the run begins, and make the first state; of a run that goes on it has shapes alone."""
        options = self.options
        copy = self._memory and self._memory.newest(self.store.latest_step() or 0)
        start = begin(self.store, self._curriculum, self._optimizer, options, amend=amend, origin=origin, copy=copy)
        init = init_state_of_copies if options.virtual_shards else init_state
        self._split, self._parts, hparams = init(
            model,
            InitialState(self._optimizer),
            self.mesh,
            fsdp=options.fsdp,
            dtype=jnp.bfloat16 if options.use_bf16 else None,
            restored=start.step > 0,
            load=start.load,
        )
        self.start: ResumePoint = with_adapters(start, self._split)
        self.plan: Plan = start.plan
        self._metadata = self.start.metadata
        self.start_step: int = start.step
        self.step: int = start.step
        self.last_step: int = last_step(self.plan, options)
        numbers = self._optimizer.settings(self.plan.total_steps) | {SPIKE_FACTOR: options.spike_factor}
        self._hparams = {**hparams, **scalars_on(self.mesh, numbers)}

    def _init_programs(self, model: Any, validation: Mapping[str, Roxxel]) -> None:
        """Begin to compile the first phase, and load the checkpoint meanwhile."""
        options = self.options
        # Not the arrays: a run that goes on would hold those that it began with beside those of its checkpoint.
        self._like: TrainState = abstract(self._state)
        if not self.finished:
            check_update(self._optimizer, self._like.params, self._like.opt_state)
        dtype = jnp.bfloat16 if options.bf16_compute else None
        self._train_step: Any = make_step(
            self._split,
            self._loss_fn,
            self._optimizer,
            self._like,
            self._sharding,
            grad_accum=self._grad_accum,
            compute_dtype=dtype,
            skip_bad=options.on_bad_step == "skip",
        )
        self._eval_step = make_eval_step(self._split, self._loss_fn, dtype)
        evaluate: Any = self._eval_step
        if options.virtual_shards:
            self._train_step, evaluate = make_sharded_steps(
                self._split,
                self._loss_fn,
                self._optimizer,
                self._sharding,
                shards=options.virtual_shards,
                grad_accum=self._grad_accum,
                compute_dtype=dtype,
                skip_bad=options.on_bad_step == "skip",
            )
        size = getattr(getattr(self.state.model, "config", None), "vocab_size", None)
        blocks = VerifiedBlocks(size) if options.verify_data == "on" else None
        self._verification = Verification(blocks, every_step=process_count() > 1)
        primary = self._curriculum.primary_streamer
        self._validation = Validation(
            validation, primary, evaluate, self._compiler, self._sharding, options.eval_iters, blocks
        )
        if not self.finished:
            self._chain = DigestChain(self._compiler, self._metadata.digest, self.step)
            self._validation.check(*self.plan.shapes)
            datasets = {**self._curriculum.datasets, **validation}
            # What the built-in model gives is known without a trace of it.
            known = size if type(model) is TransformerBuilder else None
            if known is None or known < max(data.vocab_size or 0 for data in datasets.values()):
                check_vocabulary(
                    self._split, self._loss_fn, self._like, self._hparams, self.mesh, self.plan.shapes[0], datasets
                )
            self._compile_phase(self.step)
        if self.step:
            with self._progress.doing("restore"):
                self._parts = restore_start(self.store, self.start, self._state)
                if not self._metadata.digest:
                    self.logger.text(f"the checkpoint of step {self.step} has no running digest: a new one begins")

    def _set_aside(self, damage: DamagedCheckpoint) -> None:
        """Take a damaged checkpoint of the run, not of another one, out of the way of the next older complete one."""
        if damage.folder != self.store.folder:
            raise damage
        self.logger.text(self.store.set_aside(damage))
        if is_primary() and (cursor := read_cursor(self._folder)):  # a run that was finished is so no longer
            write_cursor(self._folder, self.store.latest_step() or 0, cursor.get("last_step", 0), finished=False)

    def _init_reporting(self) -> None:
        """What logs and keeps the run; nothing is written yet."""
        options, log = self.options, self.logger.text
        done = 0 if self._nnx_optimizer is None or self.start_step else int(self._nnx_optimizer.step[...])
        if done:
            log(f"the nnx.Optimizer has done {done:,} steps: its moments and counts are not taken, they start new")
        self._throttler, self._timer = InflightThrottler(self.mesh), StepTimer()
        self._metrics = MetricsLogger(
            self.logger, self._timer, self.last_step, self.step, self.state.flops_per_token(), self.mesh.devices.flat
        )
        self._monitor = BadStepMonitor(log, skip=options.on_bad_step == "skip")
        self._checkpoints = CheckpointManager(
            self._folder,
            self.store,
            self.last_step,
            log,
            export=options.export_weights,
            with_state=not has_random_streams_alone(self._split),
        )
        self._agreement = StepAgreement(self._checkpoints.requests, self._memory)
        steps = options.profile_steps
        self._profiler = None if steps is None else Profiler(self._folder / "profile", *steps, log=log)

    @property
    def _state(self) -> TrainState:
        """The state as global arrays; with virtual shards the steps pass on what lies on each device."""
        return self._parts.whole if isinstance(self._parts, DeviceStates) else self._parts

    @property
    def state(self) -> TrainView:
        """The model, the optimizer's state and the step, as they are now."""
        return TrainView(self._split, self._state, self._hparams)

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.step >= self.last_step or self._metadata.early_stopping.should_stop(self.options.patience)

    def run(self, at_the_end: Callable[[], None] | None = None) -> TrainView:
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
            if self._memory is not None and self.start.copy is None:
                self._memory.discard()  # before later rows are dropped: no copy is ahead of its log
            in_bucket = self._bucket is not None
            own = trackers_for(self._folder, self.last_step, self.step, self._user_logger, own_log=in_bucket)
            self.logger.open([*own, self._timeline, *self._trackers])
            with self.logger, watching_for_stop(), self._checkpoints, self._verification:
                self._timeline.open()
                self._progress.say("start")
                self._metrics.log_startup(self._sharding, self.start, finished=self.finished)
                if self._memory is not None and not self.finished:
                    self._memory.begin(self._state, self.step, self.start.copy)
                if self.start.source is not None:  # from here on the run needs no other one
                    self._save(self.step)
                while not (self.finished or self.stopped):
                    try:
                        self._train()
                    except BadStep as bad:
                        self._rewind(bad)
                self._end(at_the_end)
        except BaseException:
            self._failed = True
            raise
        if self._model is not None:
            self.state.copy_to(self._model, self._nnx_optimizer)
        return self.state

    def _train(self) -> None:
        """Steps, until the end, a request to stop, or a bad one.

        DO NOT CHANGE THE ORDER. The metrics of a step are fetched after the next one is dispatched, so that the devices
        never wait for the host. After a step that is due: evaluate, log, save. The row is on disk before the save
        begins, so no checkpoint is ahead of its log; and the loss is looked at before, so no bad state is ever saved.
        """
        due = partial(self.options.is_due, last_step=self.last_step)
        phase, out_of_patience = -1, False
        train_step: Any = None  # of the phase
        stream = self._stream_from(self.step)
        self._verification.follow(stream, self.last_step)
        self._timer.restart()
        for step in range(self.step, self.last_step):
            # The numbers are those of README.md. 1: the launcher sees which step a rank waits in, so before any wait.
            done = step + 1  # the plan counts steps from 0; logs, checkpoints and people count those that are done
            self._progress.enter(done, self.plan.phase(step) + 1)
            self._verification.enter(step)
            if self._profiler is not None:
                self._profiler.before(done, self._state.step)
            if begins := self.plan.phase(step) != phase:
                self._flush_metrics()  # before the line that announces the phase
                phase, train_step = self.plan.phase(step), self._enter_phase(step)
                self._agreement.begin(step)
            # 2 to 4: read, wait for room on the devices, dispatch.
            batch = next(stream)  # read while the devices work on the steps before
            if self._throttler.wait_for_next():
                self._timer.finished()
            self._parts, metrics = train_step(self._parts, self._hparams, batch)  # donates the state
            metrics = metrics._replace(digest=self._chain.add(stream.rows, metrics.scalars["loss"]))
            self._flush_metrics()  # 5: of the step before: they are there, and the devices are busy with this one

            # 6: count the step, and note its metrics where they are due.
            self._throttler.add(metrics.scalars["loss"])
            self._timer.step(math.prod(self.plan.shape(step)))
            self._progress.finish(done)
            self._checkpoints.poll()
            if due("log", done) or due("eval", done):
                self._deferred = done, metrics
            if begins:
                self._compile_next_phase(phase, metrics)
            self._metrics.update_progress(self.plan, done)
            if self._profiler is not None:
                self._profiler.after(done, metrics.scalars["loss"])

            # 7: on every rank, each step, at this place: the announcements are counted.
            save, copy = self._save_and_copy_due(done)
            if save or copy or due("eval", done):
                # 8: evaluate; then the row, which has its losses; then the save, which is never ahead of its row.
                self._wait_for_devices()
                self._verification.wait(done)
                self._timer.pause()
                losses = self._evaluate(step) if due("eval", done) else {}
                idle_since = self._memory.clock() if self._memory is not None else 0.0
                if not self._flush_metrics(losses):
                    self._take(self._fetch(metrics._replace(scalars={}, row_loss=None, row_weight=None)))
                better, out_of_patience = self._note_validation(losses.get("val_loss"))
                save = save or (better and self.options.keep_best)
                self._keep(done, losses.get("val_loss"), idle_since, save=save or out_of_patience, copy=copy)
                self._timer.resume()
            self.step = done
            if out_of_patience:
                self.logger.text(f"no lower val_loss in {self.options.patience} validations: the run ends here")
            if self.stopped or out_of_patience:
                return

    def _flush_metrics(self, losses: Mapping[str, float] = MappingProxyType({})) -> bool:
        """Fetch, check and log the deferred step, with the `losses` of a validation; returns whether there was one.

        Raises BadStep where it, or one before it, was bad.
        """
        if self._deferred is None:
            return False
        (done, metrics), self._deferred = self._deferred, None
        self._verification.wait(done)
        blended = len(self.plan.datasets) > 1 and self.plan.segment(done - 1).shape.blend == "row"
        metrics = metrics if blended else metrics._replace(row_loss=None, row_weight=None)
        metrics = self._fetch(metrics)
        self._take(metrics)
        self._metrics.log_row(self.plan, done, metrics, losses)
        return True

    def _note_validation(self, val_loss: float | None) -> tuple[bool, bool]:
        """(whether this is the lowest val_loss, if there is one; whether the run ends, out of patience)."""
        before = self._metadata.early_stopping
        after = before if val_loss is None else before.after(val_loss)
        self._metadata = replace(self._metadata, early_stopping=after)
        return after.best_loss != before.best_loss, after.should_stop(self.options.patience)

    def _take(self, metrics: Metrics) -> None:
        """Keep the digest of (fetched) metrics for a checkpoint; raises BadStep."""
        assert metrics.digest is not None
        self._metadata = replace(self._metadata, digest=in_hex(metrics.digest))
        self._monitor.check(metrics.health, self.plan, self._checkpoints.steps)

    def _fetch(self, values: Any) -> Any:
        self.fetches += 1
        return fetch(values)

    def _wait_for_devices(self) -> None:
        self._throttler.wait_for_all()
        self._timer.finished()

    def _evaluate(self, step: int) -> dict[str, float]:
        """The losses of a validation after `step`, and the numbers that `eval_fn` gives."""
        shape = self.plan.segment(step).shape
        keys = self._validation.prepare(self._like, self._hparams, shape)
        if not all(map(self._compiler.shared, keys)):
            self._progress.say("compile")  # not back to "step" afterwards: this step is done
        for key in keys:
            self._compiler.get_together(key)
        self._progress.say("eval")
        losses = self._validation.run(self._state, self._hparams, shape)
        means = summarize(self._fetch(losses)) if losses else {}
        return means | run_eval_fn(self._eval_fn, self.state, self.logger.text)

    def _save_and_copy_due(self, done: int) -> tuple[bool, bool]:
        """Whether to save a checkpoint after a step, as it is due or asked for; whether to copy the state in memory."""
        announced = self._agreement.after(done)
        self.stopped = announced.stop and done < self.last_step
        save = announced.save or self.stopped or self.options.is_due("checkpoint", done, self.last_step)
        copy = self._memory is not None and self._memory.accept(announced.copy)
        return save, copy and done < self.last_step

    def _keep(self, done: int, val_loss: float | None, idle_since: float, *, save: bool, copy: bool) -> None:
        if save:
            self._progress.say("save")
            self._save(done, val_loss)
        if self._memory is not None and copy:  # behind the save: the copy says what is on its way to the disk
            pending = self.store.pending_step if self._needed else None
            self._memory.save(done, self._state, self._checkpoint_metadata(done).to_dict(), pending, idle_since)

    def _save(self, done: int, val_loss: float | None = None) -> None:
        options = self.options
        forever = done in (options.keep_steps or ()) or (options.keep_every and done % options.keep_every == 0)
        self._needed = bool(forever or val_loss is not None or options.on_bad_step == "rewind")
        self._checkpoints.save(done, self._state, self._checkpoint_metadata(done), val_loss)

    def _checkpoint_metadata(self, done: int) -> CheckpointMetadata:
        return checkpoint_metadata(done, self.plan, self._metadata, self._optimizer)

    def _stream_from(self, step: int) -> Stream:
        return Stream(self.plan, self._curriculum.datasets, self._sharding, step, self._grad_accum)

    def _compile_phase(self, step: int) -> Hashable:
        """Begin to compile what the phase of `step` needs, and return the key of its training step."""
        batch = self._stream_from(step).abstract()
        key = batch_key(batch)
        self._compiler.prepare(key, self._train_step, self._like, self._hparams, batch)
        self._validation.prepare(self._like, self._hparams, self.plan.segment(step).shape)
        return key

    def _compile_next_phase(self, phase: int, first: Metrics) -> None:
        """Begin to compile what the phase after this one needs, when the first step of this one is done."""
        end = sum(shape.steps for shape in self.plan.shapes[: phase + 1])
        if end < self.last_step:
            self._compiler.rest_until(first.scalars["loss"])
            self._compile_phase(end)

    def _enter_phase(self, step: int) -> Any:
        """The compiled step of the phase that begins with `step`, once every rank has it."""
        layout = batch_layout(self._sharding, *self.plan.shape(step), self._grad_accum)
        self._timeline.layout = "" if layout.is_plain else str(layout)
        self._metrics.log_phase(self.plan, step, layout, self._grad_accum, self.options.virtual_shards)
        key, begun = self._compile_phase(step), time.perf_counter()
        if waits := not self._compiler.ready(key):  # it was not compiled ahead
            self._wait_for_devices()
        with contextlib.nullcontext() if self._compiler.shared(key) else self._progress.doing("compile"):
            program = self._compiler.get_together(key)
        if waits:
            self.logger.text(f"waited {time.perf_counter() - begun:.1f} s for this phase's program to be compiled")
            self._timer.restart()
        if layout.token_pieces > 1 and not self._work_is_known and is_primary():
            self._note_repeated_work(step, program)
        return program

    def _note_repeated_work(self, step: int, program: Any) -> None:
        """Log, once, how much of a model of the user's own XLA could not cut along the tokens."""
        self._work_is_known = True
        if self.options.virtual_shards or isinstance(self.state.model, Transformer):
            return
        batch = self._stream_from(step).abstract()
        mesh = mesh_of(batch, self.mesh) or self.mesh
        ratio = work_ratio(program, self._train_step, (self._like, self._hparams, batch), mesh)
        if ratio is not None and ratio > MOST:
            self.logger.text(
                f"warning: in phase {self.plan.phase(step) + 1} {mesh.size} devices do {ratio:.1f} times the work of "
                f"one: XLA cannot divide all that mixes the tokens of a row; roxxel_dist.attention is divided"
            )

    def _rewind(self, bad: BadStep) -> None:
        """Restore the newest checkpoint that is known to be good, and leave the rows of the bad step out."""
        self._wait_for_devices()
        self._progress.say("restore")
        while True:
            step, plan, metadata = rewind(self.store, bad, self.plan, self._metadata, self.options)
            try:
                self.store.check(step)
                break
            except DamagedCheckpoint as damage:
                self._set_aside(damage)
        self.plan, self._metadata = plan, metadata
        self._chain = DigestChain(self._compiler, metadata.digest, step)
        if self._memory is not None:
            self._memory.drop(step)
        # In the checkpoint at once: a job that is started again leaves the same rows out, and counts this rewind.
        self.store.delete_later(step, self._checkpoint_metadata(step).to_dict())
        # Of shapes alone: there may be no room for two states.
        like = self._state._replace(params=self._like.params, opt_state=self._like.opt_state)
        del self._parts
        self._parts, self.step = restore(self.store, step, like), step
        self._deferred = None
        self.logger.text(f"{bad}\ngoing back to step {step}; the rows of step {bad.step} are left out")
        self.logger.rewind(step)

    def _end(self, at_the_end: Callable[[], None] | None) -> None:
        """Wait for the last save, and mark a run that has no step left as finished."""
        if self._profiler is not None:
            self._profiler.close(self._state.step)
        self._checkpoints.finish(self.step)
        self._progress.say("")  # what comes now is not training: no limit of the launcher is meant for it
        if self.stopped:
            self.logger.text(f"asked to stop: step {self.step} is saved")
            return
        self._checkpoints.mark_finished(self.step)
        self._timeline.finished()
        if at_the_end is not None:
            try:
                at_the_end()
            except Exception as error:
                self.logger.text(f"the run is finished; what comes after its last step failed: {error!r}")

    def try_loss(self) -> None:
        """Trace the loss once, without computing it. What the model or the loss function raises passes."""
        if not self.finished:
            batch = self._stream_from(self.step).abstract()
            with jax.set_mesh(self.mesh):
                jax.eval_shape(self._eval_step, self._like.params, self._like.rest, self._hparams, batch)

    def close(self) -> None:
        """Let go of threads and files; for a trainer that was made and not run too.

        After a failure it waits for a save under way for 5 s at most: the other ranks learn of the failure afterwards.
        """
        self.logger.close()
        self.store.close(CRASH_LIMIT_S if self._failed else None)
        if self._memory is not None:
            self._memory.close(CRASH_LIMIT_S if self._failed else None)
        self._compiler.close()
        self._release_folder()


def loop_options(options: LoopKeywords) -> LoopOptions:
    """The options of a trainer. Raises TypeError for a keyword that is none, and names the nearest one that is."""
    names = [field.name for field in fields(LoopOptions)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(names)}"
            raise TypeError(f"Trainer: there is no option {name!r}: {hint}")
    return LoopOptions(**options)


def hold_together(run: Path) -> Callable[[], None]:
    """Hold a run directory on rank 0 for all ranks; returns what releases it.

    Raises ValueError, on every rank, where another process trains in it, it cannot be written, or it has files that no
    run made and a run would replace.
    """
    release, problem = lambda: None, ""
    if is_primary():
        try:
            check_run_folder(run)
            release = hold_folder(run, "training in")
        except UserError as error:
            problem = str(error)
    if problem := broadcast_from_primary("run directory is free", problem):
        raise UserError(problem)
    return release
