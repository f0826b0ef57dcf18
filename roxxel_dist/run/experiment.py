"""Experiment: a Config becomes corpus, components, loop and run directory. `fit` trains, `find_lr` tests rates."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.metadata import ResumeSpec, read_cursor
from roxxel_dist.cluster.determinism import make_deterministic, pin_for_run, pin_threads
from roxxel_dist.cluster.distributed import barrier, broadcast_from_primary, is_primary, make_devices
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute, check_local, is_tokens
from roxxel_dist.data.tasks import Task
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.launcher.output import printable
from roxxel_dist.model.generate import generate, known_ids
from roxxel_dist.place.bucket_folder import TRAINED
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.place.directory import CONFIG, CURVE, DATA, RunDirectory, RunResult, default_run_dir
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError, attempt_number, pip_install
from roxxel_dist.run.components import (
    RunComponents,
    build_components,
    check_installed,
    open_corpus,
    open_tasks,
    run_on_primary,
    temporary_folder,
    trackers_of,
)
from roxxel_dist.run.metadata import RunMetadata
from roxxel_dist.run.past import Past, check_nothing_new
from roxxel_dist.run.record import changed_from, check_resumable, check_same_run, kernel_begun_with, write_run_metadata
from roxxel_dist.run.report import draw_losses, read_runs
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.training import TRIAL
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.log.base import CRASH_LIMIT_S
from roxxel_dist.train.loop import Loop
from roxxel_dist.train.lr_finder import suggest, sweep, sweep_rates, sweep_stream
from roxxel_dist.train.parts import Parts, unchecked_code_note
from roxxel_dist.train.resume import ResumePoint
from roxxel_dist.train.step.optimizer import for_run
from roxxel_dist.train.validation.evaluator import unknown_bits_notes
from roxxel_dist.utils.display import ProgressBars
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.base import add_base, find_checkpoint, load_params, take_hf_shape
from roxxel_dist.weights.generator import pieces

LAST_WORDS_LIMIT_S = 1800.0
SAMPLE_AFTER_S = 30.0
"""Shorter runs write no sample: they have not learned text yet, and a sample would take a large part of their time."""


class Experiment:
    """A run of a `Config`, on however many processes this one belongs to.

    Args:
        config: a `Config`; later changes to it have no effect.

    Attributes:
        config: as it will be used, with absolute paths.
        stopped: whether the last `fit` was asked to stop before its end; its last step is saved.

    Raises:
        UserError: a value breaks its rule, or the base of the adapters does not exist.
    """

    def __init__(self, config: Config) -> None:
        with usage_errors():
            based, self._base_message = add_base(config)
            self.config: Config = based.with_absolute_paths()
        self.stopped: bool = False

    def fit(
        self,
        data_path: str | Path | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        amend: bool = False,
        fork: str | None = None,
        skip_steps: tuple[int, int] | None = None,
        local_dir: str | Path | None = None,
    ) -> RunResult:
        """Train and return the run directory; of a run in a bucket the local folder that has what this host wrote.

        Ctrl-C and SIGTERM stop it after the current step: that step is saved, and the result has `stopped` set.

        A resumed run, and a fork, keeps each field of its config that this config does not give, except `max_steps`.

        Args:
            data_path: a text file, a folder of text, or shards; a resumed run remembers its own.
            run_dir: the place of the run: a folder that all hosts see, or an address in a bucket (s3://…, gs://…,
                az://…); by default a new `runs/run_YYYYMMDD_HHMMSS`.
            resume: continue the run in `run_dir` from its newest checkpoint, or start it if there is none.
            amend: change the phases or the files of data of the resumed run from this step on; with virtual shards also
                what decides bits.
            fork: RUN@STEP, a kept checkpoint of another run whose whole state the new run starts with; that run is only
                read. The phases may differ after that step.
            skip_steps: with `fork`, leave out the rows of these steps (the first and the last, from 1).
            local_dir: of a run in a bucket, the folder on each host below which it is written before it is sent; by
                default in the user's cache.

        Raises:
            UserError: a mistake in the config, the data or the run directory. Then no files are left behind.
            StoreTimeoutError: the bucket of the run was away for longer than its time limit.
            LeaseLostError: another job has taken over the run in the bucket.
            FileSystemError: in a later attempt of a job, files of earlier attempts cannot be reached.
        """
        resume = resume or attempt_number() > 0
        with usage_errors():
            bucket = self._bucket(run_dir, local_dir)
            # A launched run without a name has the launcher's run id, so a restart continues the same run.
            place = bucket.pull() if bucket else Path(run_dir or default_run_dir())
            past = self._past(place, resume, fork, skip_steps, in_bucket=bucket is not None)
            origin = ResumeSpec(fork=past.fork, skip_steps=past.skip_steps)
            self._name_data_sets(past, data_path)
            is_other_data = past.is_other_data(self.config, data_path)
            if self.config.deterministic:
                make_deterministic()

        # The size of XLA's thread pool decides bits, and must be known before jax makes its first device.
        with usage_errors():
            pin_for_run(self.config.virtual_shards, RunMetadata.from_config(past.config).pjrt_nproc)
        make_devices()
        named = broadcast_from_primary("run directory", str(run_dir or default_run_dir()))
        run = Path(named) if bucket is None else bucket.folder  # may differ between hosts
        if resume and not amend and self._was_finished(run, past, is_other_data):
            return RunResult.of_step(run, int(read_cursor(run).get("step", 0)), stopped=False)

        with contextlib.ExitStack() as held:
            directory = RunDirectory(run, str(bucket or run))
            held.callback(self._release, directory, bucket)
            with _nothing_left_behind(directory), usage_errors(), contextlib.ExitStack() as undo:
                run_on_primary("run directory is free", lambda: self._claim(directory, resume, bucket))
                is_trial = os.environ.get(TRIAL) == "1"
                if is_trial and past.saved:  # as it was shortened when the trial began
                    self.config = dataclasses.replace(self.config, warmup_steps=past.saved["warmup_steps"])
                fork_name = str(past.new_fork or "")
                changed = check_resumable(past.config, self.config, amend=amend or bool(fork_name), fork=fork_name)
                path = past.data_path(run, self.config, data_path, resume, is_other_data)
                data, kernel = self._open(path, run, resume, past, bucket), kernel_begun_with(past.config)
                components = build_components(self.config, data, trial=is_trial, begun_with=kernel)
                warmup, steps = components.config.warmup_steps, components.curriculum.total_steps
                if warmup != self.config.warmup_steps and is_primary():
                    cut = f"warmup_steps {self.config.warmup_steps} -> {warmup}: half of the trial's {steps:,} steps"
                    print(f"roxxel-dist: {cut}", flush=True)
                self.config = components.config
                tokenizer = components.data.tokenizer  # encode the prompt of the sample before hours of training
                ids = [] if tokenizer is None else tokenizer.encode(self.config.sample_prompt) or [tokenizer.eos_id]
                tasks = open_tasks(self.config, tokenizer)
                # A trial goes on where there is room; what is other there is a line of its log.
                free = amend or bool(fork_name) or is_trial
                parts = Parts(
                    components.build, components.optimizer, components.curriculum, components.loss, run,
                    validation=components.validation, tasks=tasks, mesh=components.mesh(),
                    grad_accum=components.grad_accum, amend=amend, origin=origin,
                    trackers=trackers_of(self.config, run), bucket=bucket, options=components.options,
                )  # fmt: skip
                loop = Loop.open(parts, partial(self._check_continuation, run, past, components, free))
                undo.callback(loop.close)
                if self.config.model or self.config.loss:
                    loop.try_loss()  # find mistakes in a model or a loss before files are written
                held.enter_context(undo.pop_all())
            message = "" if past.config else self._base_message  # a run that continues has its base already
            # All ranks get the error if the disk is full.
            arguments = (loop, run, path, components, past.saved, changed, message)
            run_on_primary("record", lambda: write_run_metadata(*arguments, name=str(bucket or run)))
            for line in filter(None, self._first_lines(run, past, components, path, tasks)):
                loop.held.log.text(line)
            self._run(loop, run, tokenizer, ids, bucket)
        return RunResult.of_step(run, loop.position.step, stopped=self.stopped)

    def find_lr(
        self, data_path: str | Path | None, *, min_lr: float = 1e-6, max_lr: float = 0.1, num_steps: int = 100
    ) -> tuple[float, list[float], list[float]]:
        """Find a learning rate to train with.

        A short training from the beginning, whose rate grows by the same factor at each step (Smith 2017, arXiv
        1506.01186); it ends early if the loss diverges. The result is the rate at which the smoothed loss falls
        fastest; with sgd and muon the one where nine tenths of its fall are done. It makes or reads no run
        directory, and does not change the `lr` of this experiment.

        Args:
            data_path: a text file, a folder of text, or shards.
            min_lr: rate of the first step.
            max_lr: rate of the last step.
            num_steps: at least 10, at most 10,000.

        Returns:
            The rate; the rates that were tried; the loss at each of them.

        Raises:
            UserError: a mistake in the config, the data or the rates, or the loss did not fall.
        """
        with usage_errors(), contextlib.ExitStack() as held:
            self.config.validate()
            rates = sweep_rates(min_lr, max_lr, num_steps)
            data_path = self.config.primary_path(data_path)
            if self.config.deterministic:
                make_deterministic()
            pin_threads()
            make_devices()
            folder = held.enter_context(temporary_folder(data_path, "find-lr"))
            components = build_components(self.config, held.enter_context(open_corpus(self.config, data_path, folder)))
            options, grad_accum = components.options, components.grad_accum
            stream = sweep_stream(components.curriculum, num_steps, options.seed, components.mesh(), grad_accum)
            load = None if options.init_from is None else partial(load_params, find_checkpoint(options.init_from))
            progress = ProgressBars(is_primary())
            progress.line(f"compiling; then {num_steps} steps with learning rates from {min_lr:.2g} to {max_lr:.2g}")
            with progress.bar("steps", num_steps) as done:
                optimizer = for_run(components.optimizer, components.curriculum.shapes, {})
                more: dict[str, Any] = {"grad_accum": grad_accum, "options": options, "load": load, "done": done}
                losses = sweep(components.build, optimizer, stream, components.loss, rates, **more)
            rates = rates[: len(losses)]
            return suggest(rates, losses, num_steps, self.config.optimizer), rates, losses

    def _bucket(self, run_dir: str | Path | None, local_dir: str | Path | None) -> BucketRun | None:
        """The run in a bucket, if `run_dir` is an address; None for a folder."""
        if (url := bucket_url(run_dir)) is not None:
            cache = self.config.cache_dir
            local_dir = local_dir or (Path(cache, TRAINED) if cache else None)
            return BucketRun(str(url), local_dir, timeout_s=self.config.store_timeout)
        if local_dir is not None:
            raise UserError(f"local_dir is {local_dir}, and run_dir is no address in a bucket: leave it out")
        check_local("run_dir", run_dir)
        return None

    def _past(
        self, run: Path, resume: bool, fork: str | None, skip_steps: tuple[int, int] | None, *, in_bucket: bool
    ) -> Past:
        """The run to continue from. The config takes the fields that it does not give from there."""
        past = Past.read(run, resume, fork, skip_steps, in_bucket=in_bucket)
        # An old max_steps is not inherited: a config without max_steps trains to the end of its phases.
        values = {name: value for name, value in past.config.items() if name != "max_steps"}
        self.config = self.config.with_defaults(values)
        self.config.validate()
        self.config = take_hf_shape(self.config)
        return past

    def _claim(self, directory: RunDirectory, resume: bool, bucket: BucketRun | None) -> None:
        """On rank 0: hold the run directory, and the run in its bucket."""
        check_installed(self.config)
        directory.claim(resume)
        if bucket is not None:
            bucket.take()
            directory.check_new(resume)  # checks again, now that the folder has the files of the bucket

    def _first_lines(
        self, run: Path, past: Past, components: RunComponents, path: str | Path | None, tasks: Sequence[Task]
    ) -> Iterator[str]:
        """What people should know of the numbers of a validation, and of a new run's code; some are empty."""
        yield from (task.truncation for task in tasks)
        yield from unknown_bits_notes(components.validation, components.curriculum.primary_streamer, components.loss)
        command = f"`roxxel-dist check-layouts --config {run / CONFIG} --data_path {path}`"
        yield "" if past.config else unchecked_code_note(self.config, components.mesh().size, command)
        yield components.slower_attention

    @staticmethod
    def _release(directory: RunDirectory, bucket: BucketRun | None) -> None:
        """Release the run to others; its finished work is in its bucket by now."""
        if bucket is not None:
            bucket.abandon(CRASH_LIMIT_S)
        directory.release()

    def _name_data_sets(self, past: Past, data_path: str | Path | None) -> None:
        """Take the data sets of the earlier run if none are given; `data_path` replaces "self"."""
        if self.config.datasets is None:
            self.config.datasets = past.config.get("datasets")
        if data_path and "self" in (self.config.datasets or {}):
            self.config.datasets = {**(self.config.datasets or {}), "self": absolute(data_path)}

    def _was_finished(self, run: Path, past: Past, is_other_data: bool) -> bool:
        """Whether the run was finished and has nothing new to do, and print that. Its data may be gone by now. Raises
        UserError if the run is finished and the requested changes would have no effect."""
        cursor, changed = read_cursor(run), changed_from(past.saved, self.config)
        step, end = int(cursor.get("step", 0)), self.config.max_steps
        is_longer = "max_steps" in changed and (end is None or end > step)
        # The new place of a moved base is checked and recorded, even if there is nothing left to train.
        goes_on = is_longer or "patience" in changed or past.saved.get("init_from") != self.config.init_from
        finished = cursor.get("finished") and not goes_on
        if not broadcast_from_primary("the run was finished", "yes" if finished else ""):
            return False
        other_data = {"data_path": RunMetadata.from_config(past.saved).data_path} if is_other_data else {}
        check_nothing_new(run, self.config, step, changed | other_data)
        if is_primary():
            longer = (
                f"to train longer, give a larger {argument('max_steps', 'N')} while its phases have steps left, or "
                f"longer phases and {argument('amend')}"
            )
            anew = f"to train again from step 1, name another {argument('run_dir', 'PATH')}"
            line = f"this run is finished: its last step, {step}, is saved in {run}; {longer}; {anew}"
            print(line, flush=True)
        return True

    def _check_continuation(
        self, run: Path, past: Past, components: RunComponents, is_free: bool, start: ResumePoint
    ) -> None:
        """Raises UserError for changes to a finished run, and unless it `is_free` to, for other bits of later steps."""
        if start.is_finished(components.options):
            check_nothing_new(run, self.config, start.step, changed_from(past.saved, self.config))
        elif start.step and not is_free:
            run_on_primary("same bits", lambda: check_same_run(past.saved, self.config, components.kernel, start.step))

    def _open(self, path: str | Path | None, run: Path, resume: bool, past: Past, bucket: BucketRun | None) -> Roxxel:
        """The corpus; rank 0 makes it from text if necessary."""
        # Only rank 0 looks: it may already be writing the corpus when another rank gets here.
        is_made = resume and is_tokens(run / DATA) and not (path and is_tokens(path))
        if broadcast_from_primary("corpus is made", "yes" if is_made else ""):
            return Roxxel(run / DATA)  # made from the text at the start of the run, even if the text has changed

        def share() -> None:
            if bucket is not None:
                run_on_primary("corpus in the bucket", bucket.send_data)
                bucket.fetch_data()

        return open_corpus(self.config, path, run / DATA, begins=not past.config, share=share)

    def _run(
        self, loop: Loop, run: Path, tokenizer: Tokenizer | None, prompt: list[int], bucket: BucketRun | None
    ) -> None:
        begun = time.monotonic()
        if bucket is not None:
            bucket.begin()

        def at_the_end() -> None:
            """Show a sample and draw the curve. The run is done and saved, so an error here does no harm."""
            is_shown = loop.position.step == loop.position.start.step and (run / CURVE).exists()
            is_long = time.monotonic() - begun >= SAMPLE_AFTER_S
            wants_sample = self.config.sample == "on" or (self.config.sample == "auto" and is_long)
            sample = ""
            if broadcast_from_primary("a sample at the end", "yes" if wants_sample and not is_shown else ""):
                try:
                    sample = sample_text(self.config, loop, tokenizer, prompt)
                except Exception as error:
                    sample = f"no sample: {(str(error) or repr(error)).splitlines()[0]}"
            if is_primary() and not is_shown:
                curve = "" if os.environ.get(TRIAL) == "1" else draw_curve(run)  # matplotlib takes a second
                if sample:
                    loop.held.log.sample(sample)
                for text in filter(None, (curve, f"run directory: {bucket or run}")):
                    loop.held.log.text(text)

        loop.run(at_the_end)
        self.stopped = loop.saves.stopped
        if bucket is not None:
            bucket.close()  # with the last lines of the log
        barrier("end of the run", LAST_WORDS_LIMIT_S)  # a rank that ends starts the launcher's time limit for rank 0


@contextlib.contextmanager
def _nothing_left_behind(directory: RunDirectory) -> Iterator[None]:
    """Remove the files of a run that cannot begin."""

    def discard() -> None:
        if is_primary():
            directory.discard()

    try:
        with interrupt.cleanup(discard):
            yield
    except BaseException:
        discard()
        raise


SAMPLE_TOKENS, SAMPLE_LINES = 160, 8


def sample_text(config: Config, loop: Loop, tokenizer: Tokenizer | None, prompt: list[int]) -> str:
    """A sample of text from the model, on rank 0; every rank takes part, because each has a part of the model."""
    if tokenizer is None:
        return "no tokenizer: no sample"
    model, context = loop.state.local_model(), config.max_context
    if not is_primary():
        return ""
    ends: Any = {"stop_ids": [tokenizer.eos_id], "known_V": known_ids(tokenizer.ids, config.vocab_size or 0)}
    new = generate(model, prompt, min(SAMPLE_TOKENS, context // 2), max_context=context, seed=config.seed, **ends)
    before, cut = config.sample_prompt, len(prompt) - (context - 1)
    text = printable(before + "".join(pieces(tokenizer, new, before, prompt)))
    what = (
        f", which has not read the first {cut:,} tokens of sample_prompt (max_context is {context})" if cut > 0 else ""
    )
    return "\n".join([f"a sample of the text that the model generates{what}:", *text.split("\n")[:SAMPLE_LINES]])


def draw_curve(run: Path) -> str:
    """Draw the loss curve of a run; the line that says where it is, or why there is none."""
    try:
        draw_losses(read_runs([run]), run / CURVE)
    except ImportError:
        return f"no loss curve: it needs matplotlib: {pip_install('plot')}"
    except Exception as error:
        return f"no loss curve: {error!r}"
    return f"loss curve: {run / CURVE}"
