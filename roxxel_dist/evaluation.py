"""A run's validation, repeated from a checkpoint. The run is only read: it may be going on, or be somebody else's."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.assemble import Recipe, check_vocabularies, recipe
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.config import RECORD, Config, UsageError, usage_errors
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.lineage import config_at, data_at, saved_config
from roxxel_dist.reading import validation_sets
from roxxel_dist.report.validation import deviations, logged_losses
from roxxel_dist.run_directory import no_run
from roxxel_dist.train.base import opened
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.origin import RunStep, run_step
from roxxel_dist.train.replay import Replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked otherwise than the run itself did; all None asks the same again."""

    data_path: str | None = None
    """Shards instead of those that the run remembers."""
    validation: Mapping[str, str] | None = None
    """Data sets to validate on, name: path, instead of the run's."""
    eval_iters: int | None = None
    """Batches to read of each data set."""


OWN = Asked()
"""The run's own question."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the losses of a checkpoint are here, and what the log of its run says."""

    run: Path
    step: int
    losses: Mapping[str, float]
    """By the names of the log: "val_loss", "val_bal", "val_loss/<name>", "train_eval_loss"."""
    reads: Mapping[str, tuple[int, int]]
    """(batches, tokens) read of each data set, by the names of `train.evaluate`."""
    changed: tuple[str, ...]
    """What makes it another question than the run's own; nothing for the same one."""
    logged: Mapping[str, float]
    """As `losses`, in the log; empty where the step has no validation in it."""
    different: tuple[str, ...]
    """A line for each thing that decides bits and was another when the step was done."""

    @property
    def deviations(self) -> list[str]:
        """A line for each loss that is not the one in the log; nothing where they were not compared."""
        return deviations(self.losses, self.logged) if self.logged and not self.changed else []

    @property
    def broken(self) -> bool:
        """Whether other numbers came out though nothing that is known to decide them is different."""
        return bool(self.deviations) and not self.different


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """What is evaluated on what."""

    made: Recipe
    sets: Mapping[str, Roxxel]
    eval_iters: int
    shape: Shape
    """Of the phase of the step."""
    changed: tuple[str, ...]


def evaluate(run: str | Path, asked: Asked = OWN, *, best: bool = False) -> Evaluation:
    """The validation of a run at a kept checkpoint, on all the processes this one belongs to.

    On the devices, processes and versions that the run had then, the numbers are those of its log, to the last bit.

    Args:
        run: RUN or RUN@STEP; without a step the newest checkpoint.
        asked: what shall be other than in the run.
        best: the checkpoint with the lowest val_loss; no step is named then.

    Raises:
        UsageError: there is no such run, checkpoint or data, or they do not fit each other.
    """
    wanted = run_step(run)
    with usage_errors():
        saved = _saved(wanted, best)
        if saved.get("deterministic"):
            determinism.make_deterministic()
    # As in the run: the size of XLA's thread pool decides bits.
    determinism.pin_threads(saved.get(RECORD, {}).get("pjrt_nproc"))
    initialize()
    determinism.enable_compilation_cache()
    with contextlib.ExitStack() as held:
        with usage_errors():
            store, step = held.enter_context(_checkpoint(wanted, best))
            values, record = config_at(saved, step)
            question = _question(RunStep(wanted.run, step), Config.from_dict(values), record, store, asked, held)
            made = question.made
            replay = Replay(
                store, step, made.build, made.loss, sets=question.sets, train=made.curriculum.primary_streamer,
                shape=question.shape, mesh=_mesh(made),
                options=LoopOptions(**{**made.options, "eval_iters": question.eval_iters}),
            )  # fmt: skip
            held.callback(replay.close)
        # Not within: what fails while it is traced is the model's or the loss function's, and needs its traceback.
        return Evaluation(
            run=wanted.run,
            step=step,
            losses=replay.losses(),
            reads=replay.reads(),
            changed=question.changed,
            logged=logged_losses(wanted.run, step),
            different=_different(record),
        )


def _different(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides bits and was another when the step was done."""
    if "bits" not in record:
        return ("the run has not written down what decides bits",)
    return tuple(determinism.changed(record["bits"], determinism.numerics_fingerprint()))


def _mesh(made: Recipe) -> Mesh:
    """The devices: as many as the run had, or all there are where those are fewer, or cannot be shared out so."""
    config, here = made.config, len(jax.devices())
    groups = config.tensor_devices * max(1, config.fsdp_devices if config.fsdp else 1)
    if config.n_devices > here or (config.n_devices or here) % groups:
        return make_mesh()
    return made.mesh()


def _saved(wanted: RunStep, best: bool) -> dict[str, Any]:
    """The run's config and record."""
    if best and wanted.step is not None:
        raise ValueError(f"RUN is {wanted}, and --best takes the step with the lowest val_loss: use one of the two")
    saved = saved_config(wanted.run)
    if not saved:
        raise ValueError(no_run(wanted.run))
    return saved


@contextlib.contextmanager
def _checkpoint(wanted: RunStep, best: bool) -> Iterator[tuple[CheckpointStore, int]]:
    """The checkpoints of the run, and the step meant.

    Raises:
        ValueError: there is no such checkpoint, or a run that goes on has deleted it meanwhile.
    """
    with opened("RUN", wanted) as (store, newest):
        step = store.best_step() if best else newest
        if step is None:
            raise ValueError(
                f"--best: no checkpoint of {wanted.run} was saved with a val_loss; kept are "
                f"{', '.join(map(str, store.steps()))}, name one as {wanted.run}@{newest}"
            )
        try:
            yield store, step
        except (OSError, ValueError) as error:
            if (store.folder / str(step)).exists():
                raise
            raise UsageError(  # it leaves the place where others become one
                f"RUN is {wanted}: the run has deleted its checkpoint of step {step} meanwhile; name a newer one, or "
                f"one that it keeps (keep_every, keep_steps, max_to_keep)"
            ) from error


def _question(
    wanted: RunStep,
    config: Any,
    record: Mapping[str, Any],
    store: CheckpointStore,
    asked: Asked,
    held: contextlib.ExitStack,
) -> _Question:
    """What the run asked at the step, but for what is `asked` otherwise."""
    step = wanted.step or 0
    meta = store.meta(step)
    plan = Plan.from_state(meta["plan"])
    changed: list[str] = []
    named = config.validation if asked.validation is None else dict(asked.validation)
    iters = config.eval_iters if asked.eval_iters is None else asked.eval_iters
    dataclasses.replace(config, validation=named, eval_iters=iters).validate()
    other = _absolute(named) != _absolute(config.validation)
    if other:
        changed.append("--validation names other data")
    if iters != config.eval_iters:
        changed.append(f"--eval_iters is {iters}, and the run had {config.eval_iters}")
    fraction = 0.0 if config.validation else config.val_fraction
    data, same = data_at(wanted, record, meta, fraction, asked.data_path)
    held.enter_context(data)
    if not same:
        changed.append("--data_path names other tokens than the run's")
    # The rows to train on are not read, so nothing but the primary data set need be there any more.
    phases = [
        {"steps": s.steps, "batch_size": s.batch_size, "seq_len": s.seq_len, "packing": s.packing} for s in plan.shapes
    ]
    config = dataclasses.replace(config, datasets=None, phases=phases)
    if other:
        config = dataclasses.replace(config, validation=None, val_fraction=fraction)
    made = recipe(config, data)
    sets = made.validation
    if other:
        sets = validation_sets(dataclasses.replace(config, validation=named), data)
        check_vocabularies(sets, made.config.vocab_size)
    if not any(one.num_tokens for one in sets.values()):
        raise ValueError(
            f"{wanted.run} has nothing to validate on (val_fraction is {config.val_fraction}, and validation names no "
            f"data): name some, as in --validation '{{code: data/code}}'"
        )
    return _Question(
        made=made,
        sets=sets,
        eval_iters=iters,
        shape=plan.segment(step - 1).shape,
        changed=tuple(changed),
    )


def _absolute(paths: Mapping[str, str] | None) -> dict[str, str]:
    return {name: os.path.abspath(path) for name, path in (paths or {}).items()}
