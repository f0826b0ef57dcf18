"""The training loop. One step, in order, is `Loop._train`; `train/README.md` has the files that it crosses.

Decision 6.
"""

import contextlib
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from flax import nnx

from roxxel_dist.checkpoint.reader import DamagedCheckpoint
from roxxel_dist.cluster.determinism import enable_compilation_cache, pin_for_shards
from roxxel_dist.cluster.distributed import is_primary, process_count
from roxxel_dist.cluster.jax_private import note_unkept_programs
from roxxel_dist.cluster.preemption import watching_for_stop
from roxxel_dist.input.verify_ahead import Verification
from roxxel_dist.train.log.choose import trackers_for
from roxxel_dist.train.metrics import DeferredMetrics, MetricsLogger
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.position import Position
from roxxel_dist.train.programs import Programs
from roxxel_dist.train.resources import Resources
from roxxel_dist.train.resume import ResumePoint
from roxxel_dist.train.saves import Saves
from roxxel_dist.train.step.bad_steps import UNKNOWN, BadStep, BadStepMonitor, known_good
from roxxel_dist.train.step.batch_layout import batch_layout
from roxxel_dist.train.step.digest_chain import DigestChain
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import Metrics
from roxxel_dist.train.step.throughput import InflightThrottler, Profiler, StepTimer
from roxxel_dist.train.validation.evaluator import run_eval_fn, summarize


class Loop:
    """A run that is ready to train, or has trained. `open` makes it of its `parts`; `close` gives back what it `held`:
    folder, checkpoints, compiler and log.

    `position` has its plan, its state and the steps done, `programs` the compiled steps, `saves.stopped` is true after
    a request to stop, and `deferred` has the metrics that are still on the devices.
    """

    def __init__(
        self, parts: Parts, held: Resources, position: Position, programs: Programs, chain: DigestChain | None
    ) -> None:
        self.parts: Parts = parts
        self.held: Resources = held
        self.position: Position = position
        self.programs: Programs = programs
        self.saves: Saves = Saves(held, position)
        self.throttler: InflightThrottler = InflightThrottler(parts.mesh)
        self._chain, self._timer = chain, StepTimer()
        self._verification = Verification(programs.blocks, every_step=process_count() > 1)
        flops, devices = position.view.flops_per_token(), parts.mesh.devices.flat
        self._keys: dict[int, Hashable] = {}  # by phase
        computed = self._computed_flops
        self._metrics = MetricsLogger(
            held.log, self._timer, position.last_step, position.step, flops, devices, computed
        )
        monitor = BadStepMonitor(held.log.text, skip=parts.options.on_bad_step == "skip")
        self.deferred: DeferredMetrics = DeferredMetrics(
            position, self._verification, monitor, self.saves.steps, self._metrics
        )
        steps = parts.options.profile_steps
        self._profiler = None if steps is None else Profiler(held.folder / "profile", *steps, log=held.log.text)
        self._failed = False
        self._work_is_known = False

    @classmethod
    def open(cls, parts: Parts, check: Callable[[ResumePoint], None] = lambda start: None) -> "Loop":
        """Take up the run of these parts, or begin it: hold its folder, compile its first phase, restore its state.

        Writes nothing, but renames a damaged checkpoint. All ranks call it together. `check` is called with the point
        where it is taken up, and may raise, before anything is made or compiled.

        Raises:
            ValueError: the run directory is of another run or held by another process, or the data does not fit.
        """
        pin_for_shards(parts.options.virtual_shards)
        enable_compilation_cache()
        note_unkept_programs()
        held = Resources.open(parts)
        try:
            while True:
                try:
                    return cls._take_up(parts, held, check)
                except DamagedCheckpoint as damage:  # all ranks are here: it is again as if that step were never saved
                    held.set_aside(damage)
        except BaseException:
            held.discard()
            raise

    @classmethod
    def _take_up(cls, parts: Parts, held: Resources, check: Callable[[ResumePoint], None]) -> "Loop":
        """Begin to compile the first phase, and load the checkpoint meanwhile."""
        position = Position.begin(parts, held, check)
        programs, chain = Programs(parts, position, held.compiler), None
        if not position.finished:
            chain = DigestChain(held.compiler, position.metadata.digest, position.step)
            programs.check_data()
            programs.compile_phase(position.step)
        if position.step:
            position.restore(held)
        elif (optimizer := parts.nnx_optimizer) is not None and (done := int(optimizer.step[...])):
            held.log.text(
                f"the nnx.Optimizer has done {done:,} steps: its moments and counts are not used, they start at zero"
            )
        return cls(parts, held, position, programs, chain)

    @property
    def state(self) -> TrainView:
        """The model, the optimizer's state and the step, as they are now."""
        return self.position.view

    def run(self, at_the_end: Callable[[], None] | None = None) -> TrainView:
        """Train to the last step, or until asked to stop, as `Trainer.run` explains; everything stays open."""
        parts, held, position, memory = self.parts, self.held, self.position, self.held.memory
        try:
            if memory is not None and position.start.copy is None:
                memory.discard()  # before later rows are dropped: no copy is ahead of its log
            in_bucket = parts.bucket is not None
            own = trackers_for(held.folder, position.last_step, position.step, parts.logger, own_log=in_bucket)
            held.log.open([*own, held.timeline, *parts.trackers])
            with held.log, watching_for_stop(), self.saves, self._verification:
                held.timeline.open()
                held.progress.say("start")
                self._metrics.log_startup(parts.sharding, position.start, finished=position.finished)
                if memory is not None and not position.finished:
                    memory.begin(position.state, position.step, position.start.copy)
                if position.start.source is not None:  # from here on the run needs no other one
                    self.saves.save(position.step)
                while not (position.finished or self.saves.stopped):
                    try:
                        self._train()
                    except BadStep as bad:
                        self._rewind(bad)
                self._end(at_the_end)
        except BaseException:
            self._failed = True
            raise
        if isinstance(parts.model, nnx.Module):
            self.state.copy_to(parts.model, parts.nnx_optimizer)
        return self.state

    def _train(self) -> None:
        """Steps, until the end, a request to stop, or a bad one.

        DO NOT CHANGE THE ORDER. The metrics of a step are fetched after the next one is dispatched, so that the devices
        never wait for the host. After a step that is due: evaluate, log, save. The row is on disk before the save
        begins, so no checkpoint is ahead of its log; and the loss is looked at before, so no bad state is ever saved.
        """
        position, plan, chain = self.position, self.position.plan, self._chain
        progress, saves, options = self.held.progress, self.saves, self.parts.options
        assert chain is not None
        due = partial(options.is_due, last_step=position.last_step)
        phase, out_of_patience = -1, False
        train_step: Any = None  # of the phase
        stream = self.programs.stream_from(position.step)
        self._verification.follow(stream, position.last_step)
        self._timer.restart()
        for step in range(position.step, position.last_step):
            # The numbers are those of README.md. 1: the launcher sees which step a rank waits in, so before any wait.
            done = step + 1  # the plan counts steps from 0; logs, checkpoints and people count those that are done
            progress.enter(done, plan.phase(step) + 1)
            self._verification.enter(step)
            if self._profiler is not None:
                self._profiler.begin_step(done, position.state.step)
            if begins := plan.phase(step) != phase:
                self.deferred.flush()  # before the line that announces the phase
                phase, train_step = plan.phase(step), self.enter_phase(step)
                saves.agreement.begin(step)
            # 2 to 4: read, wait for room on the devices, dispatch.
            batch = next(stream)  # read while the devices work on the steps before
            if self.throttler.wait_for_next():
                self._timer.mark_done()
            position.arrays, metrics = train_step(position.arrays, position.hparams, batch)  # donates the state
            metrics = metrics._replace(digest=chain.add(stream.rows, metrics.scalars["loss"]))
            self.deferred.flush()  # 5: of the step before: they are there, and the devices are busy with this one

            # 6: count the step, and note its metrics where they are due.
            self.throttler.add(metrics.scalars["loss"])
            self._timer.step(plan.shape_at(step).predicted_tokens)
            progress.finish(done)
            saves.poll()
            if due("log", done) or due("eval", done):
                self.deferred.defer(done, metrics)
            if begins:
                self.programs.compile_next_phase(phase, metrics)
            self._metrics.update_progress(plan, done)
            if self._profiler is not None:
                self._profiler.end_step(done, metrics.scalars["loss"])

            # 7: on every rank, each step, at this place: the announcements are counted.
            save, copy = saves.due(done)
            if save or copy or due("eval", done):
                out_of_patience = self._evaluate_and_save(step, metrics, save=save, copy=copy)  # 8
            position.step = done
            if out_of_patience:
                self.held.log.text(f"no lower val_loss in {options.patience} validations: the run ends here")
            if saves.stopped or out_of_patience:
                return

    def enter_phase(self, step: int) -> Any:
        """The compiled step of the phase that begins with `step`, once every rank has it."""
        held, plan, grad_accum = self.held, self.position.plan, self.parts.grad_accum
        shards = self.parts.options.virtual_shards
        layout = batch_layout(self.parts.sharding, *plan.shape(step), grad_accum, shards)
        held.timeline.layout = "" if layout.is_plain else str(layout)
        self._metrics.log_phase(plan, step, layout, grad_accum, shards)
        key, begun = self.programs.compile_phase(step), time.perf_counter()
        self._keys[plan.phase(step)] = key
        if waits := not held.compiler.is_ready(key):  # it was not compiled ahead
            self._wait_for_devices()
        with contextlib.nullcontext() if held.compiler.is_shared(key) else held.progress.doing("compile"):
            program = held.compiler.get_together(key)
        if waits:
            held.log.text(f"waited {time.perf_counter() - begun:.1f} s for this phase's program to be compiled")
            self._timer.restart()
        if layout.token_pieces > 1 and not self._work_is_known and is_primary():
            self._work_is_known = True
            if warning := self.programs.repeated_work(step, program):
                held.log.text(warning)
        return program

    def _computed_flops(self, phase: int) -> float | None:
        """What the devices compute together in a step of a phase; None where it is not known."""
        flops = self.held.compiler.flops(self._keys.get(phase))
        return None if flops is None else flops * self.parts.mesh.size

    def _evaluate_and_save(self, step: int, metrics: Metrics, *, save: bool, copy: bool) -> bool:
        """Evaluate; then write the row, which has the losses; then save, never ahead of the row.

        Returns whether the run ends, out of patience.
        """
        done, saves, options = step + 1, self.saves, self.parts.options
        self._wait_for_devices()
        self._verification.wait(done)
        self._timer.pause()
        losses, rows = self._evaluate(step) if options.is_due("eval", done, self.position.last_step) else ({}, "")
        idle_since = saves.idle_since()
        if not self.deferred.flush(losses):
            self.deferred.check(metrics)
        better, out_of_patience = self.position.note_validation(losses.get("val_loss"), rows)
        save = save or out_of_patience or (better and options.keep_best)
        saves.keep(done, losses.get("val_loss"), idle_since, save=save, copy=copy)
        self._timer.resume()
        return out_of_patience

    def _evaluate(self, step: int) -> tuple[dict[str, float], str]:
        """(the losses of a validation after `step`, the scores of the tasks, and the numbers that `eval_fn` gives; the
        rows of its val_loss in words, none for one of `eval_fn`).
        """
        held, position, validation = self.held, self.position, self.programs.validation
        keys = self.programs.prepare_validation(step)
        if not all(map(held.compiler.is_shared, keys)):
            held.progress.say("compile")  # not back to "step" afterwards: this step is done
        for key in keys:
            held.compiler.get_together(key)
        held.progress.say("eval")
        shape, before = position.plan.segment(step).shape, position.metadata.early_stopping.rows
        losses = validation.run(position.state, position.hparams, shape)
        means = summarize(self.deferred.fetch(losses)) if losses else {}
        if of_tasks := self.programs.tasks.run(position.state, position.hparams):
            means |= self.programs.tasks.summarize(self.deferred.fetch(of_tasks))
        own = run_eval_fn(self.parts.eval_fn, self.state, held.log.text)
        rows = "" if "val_loss" in own else validation.text(shape)
        if rows and before and rows != before:
            held.log.text(
                f"validation of step {step + 1:,}: {rows}; until now: {before}. These are other rows: do not compare "
                f"val_loss before and after. patience counts from here; the best checkpoint stays the lowest of all"
            )
        return means | own, rows

    def _wait_for_devices(self) -> None:
        self.throttler.wait_for_all()
        self._timer.mark_done()

    def _rewind(self, bad: BadStep) -> None:
        """Go back to the newest checkpoint that is known to be good, and leave the rows of the bad step out."""
        held, position = self.held, self.position
        self._wait_for_devices()
        held.progress.say("restore")
        position.rewind(bad, held)
        self._chain = DigestChain(held.compiler, position.metadata.digest, position.step)
        self.deferred.drop()
        step = position.step
        doubt = "" if known_good(bad.step, (step,)) else UNKNOWN
        held.log.text(f"{bad}\ngoing back to step {step}{doubt}; the rows of step {bad.step} are left out")
        held.log.rewind(position.step)

    def _end(self, at_the_end: Callable[[], None] | None) -> None:
        """Wait for the last save, and mark a run that has no step left as finished."""
        held, position, saves = self.held, self.position, self.saves
        if self._profiler is not None:
            self._profiler.close(position.state.step)
        saves.finish()
        held.progress.say("")  # what comes now is not training: no limit of the launcher is meant for it
        if saves.stopped:
            held.log.text(f"asked to stop: step {position.step} is saved")
            return
        saves.mark_finished()
        held.timeline.mark_finished()
        if at_the_end is not None:
            try:
                at_the_end()
            except Exception as error:
                held.log.text(f"the run is finished; a task after its last step failed: {error!r}")

    def try_loss(self) -> None:
        """Trace the loss once, without computing it. What the model or the loss function raises passes."""
        if not self.position.finished:
            self.programs.try_loss()

    def close(self) -> None:
        """Give back threads, files and the lock of the folder.

        After a failure it waits for a save under way for 5 s at most: the other ranks learn of the failure afterwards.
        """
        self.held.close(failed=self._failed)
