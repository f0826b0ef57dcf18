"""From a Config and a path to a trained run: corpus, model, optimizer, Trainer and run directory."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from roxxel_dist.cluster.mesh import make_mesh, num_devices
from roxxel_dist.cluster.process import agree, barrier, enable_compilation_cache, initialize, is_primary, pin_threads
from roxxel_dist.config import RECORD, UsageError, load_yaml, usage_errors
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.data.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import generate
from roxxel_dist.model.transformer import Transformer, next_token_loss
from roxxel_dist.reading import curriculum_of
from roxxel_dist.record import describe_environment, summarize
from roxxel_dist.run_directory import CONFIG, CURVE, DATA, LOG, SUMMARY, TOKENIZER, RunDirectory, default_run_dir
from roxxel_dist.train.config import LoopConfig, OptimizerConfig
from roxxel_dist.train.curve import plot_losses
from roxxel_dist.train.optimizer import NamedOptimizer
from roxxel_dist.train.trainer import Trainer

BUILD_LIMIT_S = 6 * 3600.0
LAST_WORDS_LIMIT_S = 1800.0
SAMPLE_TOKENS = 160
FREE_MODEL_FIELDS = ("dropout_rate", "gradient_checkpointing")
"""Of the model, what a resumed run may change."""
DATA_FIELDS = ("seed", "phases", "epochs", "batch_size", "val_fraction", "tokenizer_type")
"""What decides which tokens a step reads."""


class Experiment:
    """One run of a `Config`, on however many processes this one belongs to.

    Attributes:
        stopped: whether the last `fit` was asked to stop before its end; what it had is saved.
    """

    def __init__(self, config: Any) -> None:
        self.config = dataclasses.replace(config)
        self.stopped = False

    def fit(self, data_path: str | Path | None = None, run_dir: str | Path | None = None, resume: bool = False) -> Path:
        """Train and return the run directory.

        Args:
            data_path: a text file, a folder of text, or shards; a resumed run remembers its own.
            run_dir: where the run is kept; by default a new `runs/run_YYYYMMDD_HHMMSS`.
            resume: continue the run in `run_dir` from its newest checkpoint, or begin where there is none.

        Raises:
            UsageError: the config, the data or the run directory do not allow it. Nothing is left behind then.
        """
        resume = resume or int(os.environ.get("ROXXEL_ATTEMPT") or 0) > 0
        with usage_errors():
            self.config.validate()
            saved = _saved(Path(run_dir)) if resume and run_dir else {}
        # The size of XLA's thread pool decides bits, and must be known before jax makes its first device.
        pin_threads(saved.get(RECORD, {}).get("pjrt_nproc"))
        initialize()
        enable_compilation_cache()
        run = Path(agree("run directory", str(run_dir or default_run_dir())))
        with _held(run, resume) as directory:
            with _nothing_left_behind(directory), usage_errors():
                changed = changed_fields(saved, self.config)
                path = data_path or saved.get(RECORD, {}).get("data_path")
                data = self._open(path, run, resume)
                self._know_vocabulary(data)
                prompt = self._prompt(data.tokenizer)
                curriculum, held_out = self._curriculum(data)
                trainer = self._trainer(run, curriculum, held_out)
            try:
                if is_primary():
                    self._write_down(trainer, run, path, data, saved, changed)
                self._run(trainer, run, data.tokenizer, prompt)
            finally:
                trainer.close()
        return run

    def _open(self, data_path: str | Path | None, run: Path, resume: bool) -> Roxxel:
        """The corpus, made from text by rank 0 if need be."""
        if resume and is_tokens(run / DATA):
            return Roxxel(run / DATA)  # made from text when the run began, whatever the text is now
        if data_path is None:
            raise ValueError("no data: name a text file, a folder or shards with --data_path")
        if is_tokens(data_path):
            return Roxxel(data_path)
        kind, size = self.config.tokenizer_type, self.config.vocab_size
        _on_primary("corpus", lambda: build([data_path], run / DATA, tokenizer=kind, vocab_size=size).close())
        return Roxxel(run / DATA)

    def _know_vocabulary(self, data: Roxxel) -> None:
        known, wanted = data.vocab_size, self.config.vocab_size
        if known is None and wanted is None:
            raise ValueError("the shards do not say how large their vocabulary is: give --vocab_size")
        if known is not None and wanted is not None and wanted < known:
            raise ValueError(
                f"vocab_size is {wanted}, but the data has {known} tokens: leave it out, or use at least {known}"
            )
        self.config.vocab_size = wanted or known

    def _prompt(self, tokenizer: Tokenizer | None) -> list[int]:
        """The ids that the sample at the end continues; found out now, before hours of training."""
        if tokenizer is None:
            return []
        return tokenizer.encode(self.config.sample_prompt) or [tokenizer.eos_id]

    def _curriculum(self, data: Roxxel) -> tuple[Curriculum, Roxxel]:
        """The phases over the training part of the data, and the held-out part."""
        curriculum, held_out = curriculum_of(self.config, data)
        devices, grad_accum = jax.device_count(), self.config.grad_accum
        for i, phase in enumerate(curriculum.phases):
            rows = phase.batch_size or 0
            # Fewer rows than devices is a choice (one long row); a remainder is a slip that wastes most of the devices.
            if rows > devices and rows % grad_accum == 0 and (rows // grad_accum) % devices:
                raise ValueError(
                    f"phase {i + 1}: batch_size is {rows}, which does not divide by {devices} devices x grad_accum "
                    f"({grad_accum}): use a multiple of {devices * grad_accum}"
                )
        return curriculum, held_out

    def _trainer(self, run: Path, curriculum: Curriculum, held_out: Roxxel) -> Trainer:
        config, loop = self.config, self.config.part(LoopConfig)
        tx, schedule = _with_constants(NamedOptimizer(config.part(OptimizerConfig)), curriculum.total_steps)
        rngs = {"params": loop.seed, "dropout": loop.seed + 1}
        model = nnx.jit(lambda: Transformer(config.part(ModelConfig), nnx.Rngs(**rngs)))()
        return Trainer(
            model,
            tx,
            curriculum,
            next_token_loss,
            run,
            validation=held_out,
            eval_every=loop.eval_every,
            checkpoint_every=loop.checkpoint_every,
            log_every=loop.log_every,
            eval_iters=loop.eval_iters,
            seed=loop.seed,
            mesh=make_mesh(),
            grad_accum_steps=loop.grad_accum,
            max_to_keep=loop.max_to_keep,
            max_steps=loop.max_steps,
            schedule=schedule,
        )

    def _write_down(
        self, trainer: Trainer, run: Path, data_path: Any, data: Roxxel, saved: dict[str, Any], changed: list[str]
    ) -> None:
        """What a person or a later command needs to know about this run."""
        say = trainer.logger.text
        summary = summarize(trainer.state.params, trainer.state.opt_state)
        if not trainer.finished:
            place = str(Path(data_path).absolute()) if data_path else str((run / DATA).absolute())
            record = describe_environment() | {"data_path": place, "corpus": data.fingerprint}
            if before := saved.get(RECORD):
                resumes = [*before.get("resumes", []), {"step": trainer.start_step, "commit": record["git_commit"]}]
                record = before | {"resumes": resumes}
            self.config.save_yaml(run / CONFIG, record)
            if data.tokenizer is not None:
                data.tokenizer.save(run / TOKENIZER)
            (run / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        say(f"model: {summary['parameters']:,} parameters, {num_devices(make_mesh())} device(s), run directory {run}")
        train = sum(length for _, length in trainer.plan.amendments[-1].sources["self"].units.ranges)
        parts = f"{train:,} tokens to train on, {data.num_tokens - train:,} held out, in {len(data.shards)} shard(s)"
        say(f"data: {parts}, vocabulary {self.config.vocab_size:,}")
        say(trainer.plan.describe())
        for line in changed:
            say(f"changed since the run began: {line}")

    def _run(self, trainer: Trainer, run: Path, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
        def at_the_end() -> None:
            """The run is done and saved: what fails here is told, and harms nothing."""
            if not is_primary() or (trainer.finished and (run / CURVE).exists()):
                return
            say = trainer.logger.text
            for what, act in (
                (
                    "sample",
                    lambda: self._sample(trainer, tokenizer, prompt) if tokenizer else "no tokenizer: no sample",
                ),
                ("loss curve", lambda: _draw(trainer, run)),
            ):
                try:
                    say(act())
                except Exception as error:
                    say(f"no {what}: {error!r}")
            say(f"run directory: {run}")

        trainer.run(at_the_end)
        self.stopped = trainer.stopped
        barrier("end of the run", LAST_WORDS_LIMIT_S)  # a rank that left would set the launcher's clock for rank 0

    def _sample(self, trainer: Trainer, tokenizer: Tokenizer, prompt: list[int]) -> str:
        context, seed = self.config.max_context, self.config.seed
        new = generate(
            trainer.local_model(), prompt, min(SAMPLE_TOKENS, context // 2), max_context=context, seed=seed,
            eos_id=tokenizer.eos_id,
        )  # fmt: skip
        return f"a sample of what it writes now:\n{self.config.sample_prompt}{tokenizer.decode(new)}"


def _with_constants(
    optimizer: NamedOptimizer, total_steps: int
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """The optimizer and its schedule with the numbers of a run inside."""
    settings = optimizer.settings(total_steps)

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), optimizer.build(settings, 0).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        step, inner = state
        updates, inner = optimizer.build(settings, step).update(updates, inner, params)
        return updates, (step + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update), lambda step: optimizer.rate(settings, step)


def changed_fields(saved: dict[str, Any], config: Any) -> list[str]:
    """What a resumed run's config says otherwise than the saved one, a line each.

    Raises:
        ValueError: a field changed on which the checkpoint's shapes or the order of the data depend.
    """
    fixed = {f.name for f in dataclasses.fields(ModelConfig)} - set(FREE_MODEL_FIELDS)
    fixed |= set(DATA_FIELDS) - (set() if config.phases is None else {"epochs", "batch_size"})
    changed = []
    for name, value in config.to_dict().items():
        if name in saved and saved[name] != value and not (name == "vocab_size" and value is None):
            if name in fixed:
                raise ValueError(
                    f"{name} is {value}, and the run that shall be resumed has {saved[name]}: leave it as it was, or "
                    f"start a new run"
                )
            changed.append(f"{name} {saved[name]} -> {value}")
    return changed


def _saved(run: Path) -> dict[str, Any]:
    return load_yaml(run / CONFIG) if (run / CONFIG).exists() else {}


def _on_primary(what: str, act: Callable[[], Any]) -> None:
    """Do something on rank 0 alone; its error is everybody's."""
    message = ""
    if is_primary():
        try:
            with usage_errors():
                act()
        except UsageError as error:
            message = str(error) or repr(error)
    if message := agree(what, message, BUILD_LIMIT_S):
        raise UsageError(message)


@contextlib.contextmanager
def _held(run: Path, resume: bool) -> Iterator[RunDirectory]:
    """The run directory, held by rank 0 for all."""
    directory = RunDirectory(run)
    try:
        with _nothing_left_behind(directory):
            _on_primary("run directory is free", lambda: directory.claim(resume))
        yield directory
    finally:
        directory.release()


@contextlib.contextmanager
def _nothing_left_behind(directory: RunDirectory) -> Iterator[None]:
    """If the run cannot begin, take away what was made for it."""
    try:
        yield
    except BaseException:
        if is_primary():
            directory.discard()
        raise


def _draw(trainer: Trainer, run: Path) -> str:
    plan = trainer.plan
    starts = [s.first_step for s in plan.segments if s.first_step and s.phase != plan.phase(s.first_step - 1)]
    try:
        plot_losses(run / LOG, run / CURVE, [step + 1 for step in starts if step < trainer.last_step])
    except ImportError:
        return "no loss curve: pip install 'roxxel-dist[plot]' draws one"
    return f"loss curve: {run / CURVE}"
