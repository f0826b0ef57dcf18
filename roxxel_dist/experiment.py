"""From a Config and a path to a trained run: corpus, model, optimizer, Trainer and run directory."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from roxxel_dist.cluster.mesh import make_mesh, num_devices
from roxxel_dist.cluster.process import agree, enable_compilation_cache, initialize, is_primary, pin_threads
from roxxel_dist.config import RECORD, UsageError, load_yaml, usage_errors
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.data.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import generate
from roxxel_dist.model.transformer import Transformer, next_token_loss
from roxxel_dist.record import describe_environment, summarize
from roxxel_dist.train.config import LoopConfig, OptimizerConfig
from roxxel_dist.train.curve import plot_losses
from roxxel_dist.train.optimizer import make_optimizer, make_schedule
from roxxel_dist.train.trainer import Trainer

CONFIG, TOKENIZER, DATA = "config.yaml", "tokenizer.json", "data"
BUILD_LIMIT_S = 6 * 3600.0
SAMPLE_TOKENS = 160


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
        run = Path(run_dir) if run_dir else default_run_dir()
        with usage_errors():
            self.config.validate()
            record = load_yaml(run / CONFIG).get(RECORD, {}) if resume and (run / CONFIG).exists() else {}
        # The size of XLA's thread pool decides bits, and must be known before jax makes its first device.
        pin_threads(record.get("pjrt_nproc"))
        initialize()
        enable_compilation_cache()
        _on_primary("run directory", lambda: _claim(run, resume))
        with _nothing_left_behind(run), usage_errors():
            data = self._open(data_path or record.get("data_path"), run)
            self._know_vocabulary(data)
            curriculum, held_out = self._curriculum(data)
            trainer = self._trainer(run, curriculum, held_out)
        try:
            if is_primary():
                self._write_down(run, trainer, data_path or record.get("data_path"), data)
            self._run(trainer, run, data.tokenizer)
        finally:
            trainer.close()
        return run

    def _open(self, data_path: str | Path | None, run: Path) -> Roxxel:
        """The corpus, made from text by rank 0 if need be."""
        if data_path is None:
            raise ValueError("no data: name a text file, a folder or shards with --data_path")
        if is_shards(data_path):
            return Roxxel(data_path)
        folder = run / DATA
        _on_primary(
            "corpus",
            lambda: build(
                [data_path], folder, tokenizer=self.config.tokenizer_type, vocab_size=self.config.vocab_size
            ).close(),
        )
        return Roxxel(folder)

    def _know_vocabulary(self, data: Roxxel) -> None:
        known, wanted = data.vocab_size, self.config.vocab_size
        if known is None and wanted is None:
            raise ValueError("the shards do not say how large their vocabulary is: give --vocab_size")
        if known is not None and wanted is not None and wanted < known:
            raise ValueError(
                f"vocab_size is {wanted}, but the data has {known} tokens: leave it out, or use at least {known}"
            )
        self.config.vocab_size = wanted or known

    def _curriculum(self, data: Roxxel) -> tuple[Curriculum, Roxxel]:
        """The phases over the training part of the data, and the held-out part."""
        loop, model = self.config.part(LoopConfig), self.config.part(ModelConfig)
        train, held_out = data.split(loop.val_fraction)
        phases: list[Any] = loop.phases or [
            Phase(epochs=loop.epochs, batch_size=loop.batch_size * loop.grad_accum, seq_len=model.max_context + 1)
        ]
        curriculum = Curriculum(train, phases)
        devices = jax.device_count()
        for i, phase in enumerate(curriculum.phases):
            rows, length = phase.batch_size or 0, phase.seq_len or 0
            if length > model.max_context + 1:
                raise ValueError(
                    f"phase {i + 1}: seq_len is {length}, and the model reads at most max_context + 1 = "
                    f"{model.max_context + 1} tokens, target included: use a larger max_context or a smaller seq_len"
                )
            # Fewer rows than devices is a choice (one long row); a remainder is a slip that wastes most of the devices.
            if rows > devices and rows % loop.grad_accum == 0 and (rows // loop.grad_accum) % devices:
                multiple = devices * loop.grad_accum
                raise ValueError(
                    f"phase {i + 1}: batch_size is {rows}, which does not divide by {devices} devices x grad_accum "
                    f"({loop.grad_accum}): use a multiple of {multiple}"
                )
        return curriculum, held_out

    def _trainer(self, run: Path, curriculum: Curriculum, held_out: Roxxel) -> Trainer:
        config, loop = self.config, self.config.part(LoopConfig)
        optimizer = config.part(OptimizerConfig)
        total = curriculum.total_steps
        model = nnx.jit(
            lambda: Transformer(config.part(ModelConfig), nnx.Rngs(params=loop.seed, dropout=loop.seed + 1))
        )()
        return Trainer(
            model,
            make_optimizer(optimizer, total),
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
            schedule=make_schedule(optimizer, total),
        )

    def _write_down(self, run: Path, trainer: Trainer, data_path: Any, data: Roxxel) -> None:
        """What a person or a later command needs to know about this run."""
        record = describe_environment() | {"data_path": str(Path(data_path).absolute()), "corpus": data.fingerprint}
        self.config.save_yaml(run / CONFIG, record)
        if data.tokenizer is not None:
            data.tokenizer.save(run / TOKENIZER)
        summary = summarize(trainer.state.params, trainer.state.opt_state)
        (run / "model_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        say = trainer.logger.text
        say(f"model: {summary['parameters']:,} parameters, {num_devices(make_mesh())} devices, run directory {run}")
        say(f"data: {data.num_tokens:,} tokens in {len(data.shards)} shard(s), vocabulary {self.config.vocab_size:,}")
        say(trainer.plan.describe())

    def _run(self, trainer: Trainer, run: Path, tokenizer: Tokenizer | None) -> None:
        def at_the_end() -> None:
            if is_primary():
                if tokenizer is not None:
                    trainer.logger.text(f"a sample of what it writes now:\n{self._sample(trainer, tokenizer)}")
                trainer.logger.text(_draw(run, trainer))
                trainer.logger.text(f"run directory: {run}")

        trainer.run(at_the_end)
        self.stopped = trainer.stopped

    def _sample(self, trainer: Trainer, tokenizer: Tokenizer) -> str:
        context, prompt = self.config.max_context, self.config.sample_prompt
        ids = tokenizer.encode(prompt) if prompt else [tokenizer.eos_id]
        new = generate(
            trainer.local_model(),
            ids,
            min(SAMPLE_TOKENS, context // 2),
            max_context=context,
            seed=self.config.seed,
            eos_id=tokenizer.eos_id,
        )
        return prompt + tokenizer.decode(new)


def default_run_dir() -> Path:
    """`runs/run_<id>`: the launcher's id, the same on every rank, or the time, made unique."""
    if run_id := os.environ.get("ROXXEL_RUN_ID"):
        return Path("runs") / f"run_{run_id}"
    name = Path("runs") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    candidates = (name if i == 0 else name.with_name(f"{name.name}_{i}") for i in range(1_000_000))
    return next(path for path in candidates if not path.exists())


def is_shards(path: str | Path) -> bool:
    """Whether `path` names `.rox` shards, rather than text to make some from."""
    p = Path(path)
    return p.suffix == ".rox" or (p.is_dir() and any(p.glob("*.rox"))) or "*" in p.name


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


def _claim(run: Path, resume: bool) -> None:
    """Raises unless `run` is free, or holds a run that shall be continued."""
    if run.exists() and not run.is_dir():
        raise ValueError(f"--run_dir {run} is a file: name a folder")
    if (run / CONFIG).exists() and not resume:
        raise ValueError(f"{run} holds a run already: add --resume to continue it, or name another --run_dir")
    run.mkdir(parents=True, exist_ok=True)
    if not os.access(run, os.W_OK):
        raise ValueError(f"--run_dir {run} cannot be written: choose another folder, or change its permissions")


@contextlib.contextmanager
def _nothing_left_behind(run: Path) -> Iterator[None]:
    """If the run cannot begin, take away what was made for it; an older run in the folder stays as it was."""
    try:
        yield
    except BaseException:
        if is_primary() and not (run / CONFIG).exists():
            for made in (DATA, "checkpoints"):
                shutil.rmtree(run / made, ignore_errors=True)
            for folder in (run, run.parent):
                with contextlib.suppress(OSError):  # not empty: somebody else's
                    folder.rmdir()
        raise


def _draw(run: Path, trainer: Trainer) -> str:
    starts = [
        s.first_step + 1
        for s in trainer.plan.segments
        if s.first_step and s.phase != trainer.plan.phase(s.first_step - 1)
    ]
    picture = run / "plots" / "loss.png"
    try:
        plot_losses(run / "training_log.csv", picture, [s for s in starts if s <= trainer.last_step])
    except ImportError:
        return "no loss curve: pip install 'roxxel-dist[plot]' draws one"
    return f"loss curve: {picture}"
