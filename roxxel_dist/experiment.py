"""From a Config and a path to a trained run: corpus, model, optimizer, Trainer and run directory.

A learning rate for a Config and its data, found by a sweep that leaves nothing behind.

What a run writes down, and tells people, before its first step.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.builders import RunComponents, build_components, folder_for_now, on_primary, open_corpus
from roxxel_dist.cluster import determinism, interrupt
from roxxel_dist.cluster.determinism import make_deterministic, pin_threads
from roxxel_dist.cluster.distributed import barrier, broadcast_from_primary, initialize, is_primary
from roxxel_dist.cluster.exit_codes import attempt_number
from roxxel_dist.cluster.mesh import num_devices
from roxxel_dist.config import RECORD, UsageError, usage_errors
from roxxel_dist.data.commit import write_file
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import check_local, is_tokens
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.model.generate import generate
from roxxel_dist.report import draw_losses, read_runs
from roxxel_dist.run_directory import (
    CONFIG,
    CURVE,
    DATA,
    SUMMARY,
    TOKENIZER,
    RunDirectory,
    check_still_there,
    default_run_dir,
)
from roxxel_dist.run_metadata import (
    changed_from,
    check_resumable,
    data_of,
    describe_environment,
    forked_from,
    saved_config,
    summarize,
)
from roxxel_dist.train.checkpoint.metadata import CheckpointRef, ResumeSpec, read_cursor, write_cursor
from roxxel_dist.train.config import TRIAL
from roxxel_dist.train.init_from import INITIALIZED_FROM, find_checkpoint, params_loader, with_base, with_shape_of
from roxxel_dist.train.loggers.wandb import WandbTracker
from roxxel_dist.train.lr_finder import suggest, sweep, sweep_rates, sweep_stream
from roxxel_dist.train.resume import max_steps_note
from roxxel_dist.train.train_state import Leaves
from roxxel_dist.train.trainer import Trainer


def find_lr(
    config: Any, data_path: str | Path | None, *, min_lr: float, max_lr: float, num_steps: int
) -> tuple[float, list[float], list[float]]:
    """See `Experiment.find_lr`."""
    with usage_errors():
        config, _ = with_base(config)
        config.validate()
        rates = sweep_rates(min_lr, max_lr, num_steps)
        data_path = config.primary_path(data_path)
        if config.deterministic:
            make_deterministic()
    pin_threads()
    initialize()
    with contextlib.ExitStack() as held:
        with usage_errors():
            folder = held.enter_context(folder_for_now(data_path, "find-lr"))
            made = build_components(config, held.enter_context(open_corpus(config, data_path, folder)))
            options = made.options
            stream = sweep_stream(made.curriculum, num_steps, options.seed, made.mesh(), made.grad_accum)
            weights = None if options.init_from is None else _loader(options.init_from)
        # Not within: what fails while a step is traced is the model's or the loss function's, and needs its traceback.
        losses = sweep(
            made.build, made.optimizer, stream, made.loss, rates, grad_accum=made.grad_accum, options=options,
            load=weights,
        )  # fmt: skip
    rates = rates[: len(losses)]
    with usage_errors():
        return suggest(rates, losses, num_steps), rates, losses


def _loader(init_from: str) -> Callable[[Leaves], Leaves]:
    """What gives the weights that training would begin with; those of another model are the user's to mend."""
    load = params_loader(find_checkpoint(init_from))

    def told(like: Leaves) -> Leaves:
        with usage_errors():
            return load(like)

    return told


def write_down(
    trainer: Trainer,
    run: Path,
    data_path: Any,
    made: RunComponents,
    saved: dict[str, Any],
    changed: list[str],
    told: str,
) -> None:
    """What a person or a later command needs to know about a run.

    Args:
        trainer: the run, ready to begin.
        run: its directory.
        data_path: the primary data set; None where it is in the run directory.
        made: what the run is made of.
        saved: the config that the run directory holds; empty for a new run.
        changed: what the config says otherwise than that one, a line each.
        told: a line about how the config came about; may be empty.
    """
    say, data = trainer.logger.text, made.data
    summary = summarize(trainer.state.params, trainer.state.optimizer, trainer.state.frozen)
    moved = saved.get("init_from") != made.config.init_from
    if moved or not trainer.finished:
        record = _record(trainer, made, saved, str(Path(data_path or run / DATA).absolute()))
        if before := saved.get(RECORD):
            changed = [*changed, *determinism.changed(before.get("bits", {}), determinism.numerics_fingerprint())]
        # Before the config: cut off between the two, a finished run that goes on must not be taken for finished.
        write_cursor(run, trainer.start_step, trainer.last_step, finished=trainer.finished)
        made.config.save_yaml(run / CONFIG, record)
        if data.tokenizer is not None:
            data.tokenizer.save(run / TOKENIZER)
        write_file(run / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    trained, of_all = summary["trainable_parameters"], summary["parameters"]
    some = "" if trained == of_all else f" ({trained:,} of them trained, {trained / of_all:.2%})"
    say(f"model: {of_all:,} parameters{some}, {num_devices(trainer.mesh)} device(s), run directory {run}")
    if told:
        say(told)
    train = trainer.plan.amendments[-1].sources["self"].units.tokens
    parts = f"{train:,} tokens to train on, {data.num_tokens - train:,} held out, in {len(data.shards)} shard(s)"
    say(f"data: {parts}, vocabulary {made.config.vocab_size:,}")
    for name, one in made.curriculum.mix_streamers.items():
        say(f"data {name}: {one.num_tokens:,} tokens, in {len(one.shards)} shard(s)")
    if not trainer.start.notes:  # else they have it
        say(trainer.plan.describe())
    if note := max_steps_note(trainer.plan, trainer.options):
        say(note)
    if saved and not trainer.step:
        say(f"{run} has no checkpoint yet: it begins again, at step 1")
    for line in changed:
        say(f"changed since {'the run began' if saved else trainer.start.source}: {line}")


def _record(trainer: Trainer, made: RunComponents, saved: dict[str, Any], place: str) -> dict[str, Any]:
    """What a config keeps beside its fields: where and with what the run was made, and each time it was resumed."""
    now = {"data_path": place, "corpus": made.data.fingerprint}
    record = describe_environment() | now | trainer.start.record | {"bits": determinism.numerics_fingerprint()}
    if not (before := saved.get(RECORD)):
        return record
    this = {"step": trainer.start_step, "commit": record["git_commit"]} | trainer.start.record
    this |= {"bits": record["bits"], "changed_from": changed_from(saved, made.config)}
    found = before | now | {"resumes": [*before.get("resumes", []), this]}
    if INITIALIZED_FROM in this:
        found[INITIALIZED_FROM] = dict(this[INITIALIZED_FROM])  # where the base is now
    return found


LAST_WORDS_LIMIT_S = 1800.0
SAMPLE_TOKENS, SAMPLE_LINES = 160, 8
SAMPLE_AFTER_S = 30.0
"""What a run of less has learned is no text yet, and to write it would take a large part of its time."""


class Experiment:
    """One run of a `Config`, on however many processes this one belongs to.

    Args:
        config: a `Config`; changes of it from here on do not count.

    Attributes:
        config: as it will be used, with absolute paths.
        stopped: whether the last `fit` was asked to stop before its end; what it had is saved.

    Raises:
        UsageError: a value breaks its rule, or the base of adapters is not there.
    """

    def __init__(self, config: Any) -> None:
        with usage_errors():
            based, self._told = with_base(config)
            self.config: Any = based.with_absolute_paths()
        # What was set by whoever made the config, or with the base of the adapters: the rest is a resumed run's own.
        self.config.given = config.given | ({"init_from"} if based.init_from != config.init_from else frozenset())
        self.stopped: bool = False

    def fit(
        self,
        data_path: str | Path | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        amend: bool = False,
        fork: str | None = None,
        from_step: int | None = None,
        skip_steps: tuple[int, int] | None = None,
    ) -> Path:
        """Train and return the run directory.

        A resumed run, and a fork, keeps each field of its config that the one here does not give, but for `max_steps`.

        Args:
            data_path: a text file, a folder of text, or shards; a resumed run remembers its own.
            run_dir: where the run is kept; by default a new `runs/run_YYYYMMDD_HHMMSS`.
            resume: continue the run in `run_dir` from its newest checkpoint, or begin where there is none.
            amend: the phases or the shards of the resumed run are other ones from here on.
            fork: RUN@STEP, a kept checkpoint of another run whose whole state the new one begins with; that run is only
                read. The phases may be other ones behind that step.
            from_step: go back to this kept checkpoint of the resumed run; later ones are deleted.
            skip_steps: with `from_step`, leave out what these steps (the first and the last, from 1) would have read.

        Raises:
            UsageError: the config, the data or the run directory do not allow it. Nothing is left behind then.
            FileSystemError: in a later attempt of a job, files of the attempts before cannot be reached.
        """
        resume = resume or attempt_number() > 0
        with usage_errors():
            for name, named in (("run_dir", run_dir), ("data_path", data_path), ("fork", fork)):
                check_local(name, named)
            saved, parent, before = self._past(Path(run_dir or default_run_dir()), resume, fork)
            begun_by = parent if fork or from_step is None else None
            origin = ResumeSpec(fork=begun_by, from_step=from_step, skip_steps=skip_steps)
            self._name_sets(before, data_path)
            other_data = self._is_other_data(data_path, saved)
            if self.config.deterministic:
                make_deterministic()
        # The size of XLA's thread pool decides bits, and must be known before jax makes its first device.
        pin_threads(before.get(RECORD, {}).get("pjrt_nproc"))
        initialize()
        run = Path(broadcast_from_primary("run directory", str(run_dir or default_run_dir())))
        if resume and not amend and from_step is None and self._was_finished(run, saved, other_data):
            return run
        with _held(run, resume) as directory:
            with _nothing_left_behind(directory), usage_errors():
                whose = str(parent) if parent and not saved else ""
                trial = _is_trial()
                if trial and saved:  # as it was cut when the trial began
                    self.config = dataclasses.replace(self.config, warmup_steps=saved["warmup_steps"])
                changed = check_resumable(before, self.config, amend=amend or bool(whose), whose=whose)
                path = self.config.primary_path(data_path) or data_of(
                    before, parent.run if parent and not saved else None
                )
                if resume and not before and path is None:
                    near = difflib.get_close_matches(
                        run.name, [one.parent.name for one in run.parent.glob(f"*/{CONFIG}")]
                    )
                    hint = f"did you mean {run.parent / near[0]}?" if near else "check run_dir"
                    raise FileNotFoundError(f"there is no run {run}: {hint}; a new one needs data_path=PATH")
                if other_data and not is_tokens(path or ""):
                    raise ValueError(
                        f"data_path is {path}, and {run} was begun with {saved[RECORD]['data_path']}: leave it out, or "
                        f"make shards of the text with the run's {TOKENIZER} and `roxxel-dist data build`, and amend "
                        f"the run with them (amend=True)"
                    )
                made = build_components(self.config, self._open(path, run, resume, begins=not before), trial=trial)
                self._say_cut(made)
                self.config = made.config
                prompt = self._prompt(made.data.tokenizer)
                trainer = self._trainer(run, made, amend, origin)
                try:
                    if trainer.finished:
                        self._check_nothing_new(run, trainer.step, changed_from(saved, self.config))
                    if self.config.model or self.config.loss:
                        trainer.try_loss()  # mistakes of a model or a loss, before anything is written down
                    trainer.go_back()
                except BaseException:
                    trainer.close()
                    raise
            try:
                # All ranks learn it, if the disk is full already.
                told = "" if before else self._told  # a run that goes on has its base already
                on_primary("record", lambda: write_down(trainer, run, path, made, saved, changed, told))
                self._run(trainer, run, made.data.tokenizer, prompt)
            finally:
                trainer.close()
        return run

    def _say_cut(self, made: RunComponents) -> None:
        """Say that the warm-up of a trial was cut, where it was."""
        if made.config.warmup_steps != self.config.warmup_steps and is_primary():
            cut = f"warmup_steps {self.config.warmup_steps} -> {made.config.warmup_steps}"
            print(f"roxxel-dist: {cut}: half of the trial's {made.curriculum.total_steps:,} steps", flush=True)

    def _past(
        self, folder: Path, resume: bool, fork: str | None
    ) -> tuple[dict[str, Any], CheckpointRef | None, dict[str, Any]]:
        """(what this run was so far, the run that it is forked from, which of them it goes on from).

        Args:
            folder: of this run; a launched run without a name has the launcher's: started again, it is the same.
            resume: see `fit`.
            fork: see `fit`.
        """
        check_still_there(folder)
        saved = saved_config(folder) if resume else {}
        parent = forked_from(fork, saved, folder)
        before = saved_config(parent.run) if parent and not saved else saved
        # Where a run was to end once is no property of it: a config without max_steps trains to the end of its phases.
        self.config = self.config.with_defaults({name: value for name, value in before.items() if name != "max_steps"})
        self.config.validate()
        self.config = with_shape_of(self.config)
        return saved, parent, before

    def find_lr(
        self, data_path: str | Path | None, *, min_lr: float = 1e-6, max_lr: float = 0.1, num_steps: int = 100
    ) -> tuple[float, list[float], list[float]]:
        """A learning rate to train with.

        A short training from the beginning, whose rate grows by the same factor at each step (Smith 2017, arXiv
        1506.01186); it ends early where the loss diverges. The rate is that at which the smoothed loss falls most
        steeply. Nothing is kept: no run directory is made or read, and this experiment's `lr` stays what it is.

        Args:
            data_path: a text file, a folder of text, or shards.
            min_lr: rate of the first step.
            max_lr: rate of the last step.
            num_steps: at least 10.

        Returns:
            The rate; the rates that were tried; the loss at each of them.

        Raises:
            UsageError: the config, the data or the rates do not allow it, or the loss did not fall.
        """
        return find_lr(self.config, data_path, min_lr=min_lr, max_lr=max_lr, num_steps=num_steps)

    def _name_sets(self, before: dict[str, Any], data_path: str | Path | None) -> None:
        """The data sets of the run that this one goes on with where none are named; "self" is what `data_path` says."""
        if self.config.datasets is None:
            self.config.datasets = before.get("datasets")
        named = self.config.datasets or {}
        if data_path and "self" in named:
            self.config.datasets = {**named, "self": os.path.abspath(data_path)}

    def _is_other_data(self, data_path: str | Path | None, saved: dict[str, Any]) -> bool:
        """Whether a resumed run is given other data than it has read so far."""
        before = saved.get(RECORD, {})
        path = self.config.primary_path(data_path)
        if path is None or "data_path" not in before or os.path.realpath(path) == os.path.realpath(before["data_path"]):
            return False
        if not is_tokens(path):
            return True
        with Roxxel(path) as data:
            return data.fingerprint != before.get("corpus")

    def _was_finished(self, run: Path, saved: dict[str, Any], other_data: bool) -> bool:
        """Say so, if it was, and nothing new is asked of it: its data may be gone by now.

        Raises:
            UsageError: the run is finished, and what is asked of it would not be done.
        """
        cursor, changed = read_cursor(run), changed_from(saved, self.config)
        step = int(cursor.get("step", 0))
        longer = "max_steps" in changed and (self.config.max_steps is None or self.config.max_steps > step)
        # A base that was moved is looked for, and written down, though nothing is trained any more.
        goes_on = longer or "patience" in changed or saved.get("init_from") != self.config.init_from
        finished = broadcast_from_primary(
            "the run was finished", "yes" if cursor.get("finished") and not goes_on else ""
        )
        if not finished:
            return False
        self._check_nothing_new(run, step, changed | ({"data_path": saved[RECORD]["data_path"]} if other_data else {}))
        if is_primary():
            print(f"this run is finished: its last step, {step}, is saved in {run}", flush=True)
        return True

    def _check_nothing_new(self, run: Path, step: int, before: Mapping[str, Any]) -> None:
        """Raises UsageError where a finished run shall be another one; `before` has the values of what changed."""
        if not before:
            return
        changes = [f"{name} {old} -> {getattr(self.config, name, 'other data')}" for name, old in before.items()]
        raise UsageError(
            f"{run} is finished after step {step}, and a change would do nothing ({', '.join(changes)}): leave it out; "
            f"or go on, with a larger max_steps while its phases have steps left, or with longer phases and "
            f"amend=True; or begin a new run at a kept checkpoint with fork=RUN@STEP"
        )

    def _open(self, data_path: str | Path | None, run: Path, resume: bool, *, begins: bool) -> Roxxel:
        """The corpus, made from text by rank 0 if need be."""
        # Rank 0 looks for all: it may be making it already when another rank comes here.
        made = resume and is_tokens(run / DATA) and not (data_path and is_tokens(data_path))
        if broadcast_from_primary("corpus is made", "yes" if made else ""):
            return Roxxel(run / DATA)  # made from text when the run began, whatever the text is now
        return open_corpus(self.config, data_path, run / DATA, begins=begins)

    def _prompt(self, tokenizer: Tokenizer | None) -> list[int]:
        """The ids that the sample at the end continues; found out now, before hours of training."""
        if tokenizer is None:
            return []
        return tokenizer.encode(self.config.sample_prompt) or [tokenizer.eos_id]

    def _trainer(self, run: Path, made: RunComponents, amend: bool, origin: ResumeSpec) -> Trainer:
        config = self.config
        wandb = config.wandb if is_primary() and config.wandb != "off" else None
        return Trainer(
            made.build,
            made.optimizer,
            made.curriculum,
            made.loss,
            run,
            validation=made.validation,
            mesh=made.mesh(),
            grad_accum_steps=made.grad_accum,
            amend=amend,
            origin=origin,
            trackers=[WandbTracker(run, wandb, config.wandb_project, config=config.to_dict())] if wandb else [],
            **dataclasses.asdict(made.options),
        )

    def _run(self, trainer: Trainer, run: Path, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
        begun, wish = time.monotonic(), self.config.sample

        def at_the_end() -> None:
            """The run is done and saved: what fails here is told, and harms nothing."""
            model, no_sample = None, ""
            long = broadcast_from_primary(
                "long enough for a sample", "yes" if time.monotonic() - begun >= SAMPLE_AFTER_S else ""
            )
            if wish == "off" or (wish == "auto" and not long):
                pass
            elif tokenizer is None:
                no_sample = "no tokenizer: no sample"
            else:
                try:
                    model = trainer.state.local_model()  # every rank has a part of it
                except Exception as error:
                    no_sample = f"no sample: {(str(error) or repr(error)).splitlines()[0]}"
            if not is_primary() or (trainer.step == trainer.start_step and (run / CURVE).exists()):
                return
            say = trainer.logger.text
            for what, act in (
                ("sample", lambda: no_sample if model is None else self._sample(model, tokenizer, prompt)),
                ("loss curve", lambda: "" if _is_trial() else _draw(run)),
            ):
                try:
                    if text := act():
                        say(text)
                except Exception as error:
                    say(f"no {what}: {error!r}")
            say(f"run directory: {run}")

        trainer.run(at_the_end)
        self.stopped = trainer.stopped
        barrier("end of the run", LAST_WORDS_LIMIT_S)  # a rank that left would set the launcher's clock for rank 0

    def _sample(self, model: Any, tokenizer: Any, prompt: list[int]) -> str:
        context, seed = self.config.max_context, self.config.seed
        new = generate(
            model, prompt, min(SAMPLE_TOKENS, context // 2), max_context=context, seed=seed, eos_id=tokenizer.eos_id
        )
        text = printable(self.config.sample_prompt + tokenizer.decode(new))
        return "\n".join(["a sample of what it writes now:", *text.split("\n")[:SAMPLE_LINES]])


def printable(text: str) -> str:
    """The text with all that could command a terminal as Python writes it, but for line ends and tabs."""
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


@contextlib.contextmanager
def _held(run: Path, resume: bool) -> Iterator[RunDirectory]:
    """The run directory, held by rank 0 for all."""
    directory = RunDirectory(run)
    try:
        with _nothing_left_behind(directory):
            on_primary("run directory is free", lambda: directory.claim(resume))
        yield directory
    finally:
        directory.release()


@contextlib.contextmanager
def _nothing_left_behind(directory: RunDirectory) -> Iterator[None]:
    """If the run cannot begin, take away what was made for it."""

    def take_away() -> None:
        if is_primary():
            directory.discard()

    try:
        with interrupt.cleanup(take_away):
            yield
    except BaseException:
        take_away()
        raise


def _is_trial() -> bool:
    """Whether this is a trial of a sweep. It draws no curve: matplotlib alone takes a second to import."""
    return os.environ.get(TRIAL) == "1"


def _draw(run: Path) -> str:
    try:
        draw_losses(read_runs([run]), run / CURVE)
    except ImportError:
        return "no loss curve: pip install 'roxxel-dist[plot]' draws one"
    return f"loss curve: {run / CURVE}"
