"""A run's validation, repeated from a checkpoint. The run is only read: it may be going on, or be somebody else's.

The validation of a checkpoint, outside of any training: the program that a `Trainer` would have run.

A validation that was repeated, beside what the run's log says of it.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.builders import RunComponents, build_components, check_vocabularies
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.config import RECORD, Config, UsageError, usage_errors
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.curriculum_builder import validation_sets
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.run_directory import METRICS, no_run
from roxxel_dist.run_metadata import config_at, data_at, saved_config
from roxxel_dist.train.checkpoint.metadata import CheckpointMetadata, CheckpointRef
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.compile import AotCompiler
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.evaluator import Validation
from roxxel_dist.train.init_from import base_params_loader, open_checkpoint
from roxxel_dist.train.loggers.csv_jsonl import JsonlReader
from roxxel_dist.train.throughput import InflightThrottler
from roxxel_dist.train.train_state import init_state
from roxxel_dist.train.train_step import LossFn, fetch, make_eval_step


class Replay:
    """The weights of a checkpoint on a mesh, and what measures their losses. All ranks make the same calls.

    Moments are not read: it takes the memory of the weights alone.

    Args:
        store: the checkpoints.
        step: which one.
        build: makes the model.
        loss_fn: see `Trainer`.
        sets: the data to validate on, by name.
        train: the training data.
        shape: of the phase that was trained.
        mesh: devices of all processes.
        options: of the run: `eval_iters`, `fsdp`, `use_bf16` and `bf16_compute`.

    Raises:
        ValueError: the checkpoint is of another model or damaged, or a data set is too small for a batch.
    """

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        build: Callable[[], nnx.Module],
        loss_fn: LossFn,
        *,
        sets: Mapping[str, Roxxel],
        train: Roxxel,
        shape: Shape,
        mesh: Mesh,
        options: LoopOptions,
    ) -> None:
        dtype = jnp.bfloat16 if options.use_bf16 else None
        base = CheckpointMetadata.from_dict(store.meta(step)).base
        parts, state, self._settings = init_state(
            build, lambda params: {}, mesh, fsdp=options.fsdp, dtype=dtype, restored=True,
            load=None if base is None else base_params_loader(base.at(options.init_from)),
        )  # fmt: skip
        self._shape, self._one_in_flight = shape, InflightThrottler(mesh).limit == 1
        self._programs = AotCompiler(mesh)
        try:
            self._validation = Validation(
                sets,
                train,
                make_eval_step(parts, loss_fn, jnp.bfloat16 if options.bf16_compute else None),
                self._programs,
                batch_sharding(mesh),
                options.eval_iters,
            )
            self._validation.check(shape)
            self._validation.prepare(state, self._settings, shape)
            wanted = {name: leaves for name in ("params", "rest") if (leaves := getattr(state, name))}
            self._state = state._replace(**store.restore_model(step, wanted))
        except BaseException:
            self._programs.close()
            raise

    def losses(self) -> dict[str, float]:
        """What `Validation.summarize` says."""
        self._programs.wait_together()
        found = self._validation.run(self._state, self._settings, self._shape, one_in_flight=self._one_in_flight)
        return self._validation.summarize(fetch(found), self._shape)

    def reads(self) -> dict[str, tuple[int, int]]:
        """(batches, tokens) that are read of each data set, by name."""
        return self._validation.reads(self._shape)

    def close(self) -> None:
        """Let go of the thread that compiles."""
        self._programs.close()


VAL, TRAIN, BALANCE = "val_loss", "train_eval_loss", "val_bal"


def logged_losses(run: Path, step: int) -> dict[str, float]:
    """The validation in the log's row of a step, counted from 1; empty where there is none."""
    reader = JsonlReader(run / METRICS)
    try:
        row = next((row for row in reader.rows() if row.get("step") == step), {})
    finally:
        reader.close()
    return {name: value for name, value in row.items() if name in (VAL, TRAIN, BALANCE) or name.startswith(f"{VAL}/")}


def deviations(losses: Mapping[str, float], logged: Mapping[str, float]) -> list[str]:
    """A line for each loss that is not bit for bit what the log says; nothing where all are."""
    lines = []
    for name in dict.fromkeys([*logged, *losses]):
        here, there = losses.get(name), logged.get(name)
        if here is None or there is None:
            lines.append(f"{name}: {_exact(here)} here, {_exact(there)} in the log")
        elif here != there:
            lines.append(f"{name}: {here!r} here, {there!r} in the log, {here - there:+.3g}")
    return lines


def _exact(value: float | None) -> str:
    return "not measured" if value is None else repr(value)


def rows_of(losses: Mapping[str, float], reads: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """{"name", "metric", "loss", "perplexity", "batches", "tokens"} of each data set, and of all of them.

    Args:
        losses: by the names of the log.
        reads: (batches, tokens) by data set, as `Validation` names them: "" is what was held out, and the last one is
            the training data.
    """
    *names, train = reads
    metrics = {name: (f"{VAL}/{name}" if name else VAL, name or "held out", *reads[name]) for name in names}
    found = list(metrics.values())
    if len(names) > 1:
        batches, tokens = (sum(reads[name][i] for name in names) for i in (0, 1))
        found.append((VAL, "all of them", batches, tokens))
    found.append((TRAIN, "training data", *reads[train]))
    return [
        {
            "name": name,
            "metric": metric,
            "loss": losses[metric],
            "perplexity": perplexity(losses[metric]),
            "batches": batches,
            "tokens": tokens,
        }
        for metric, name, batches, tokens in found
    ]


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is no number of 64 bits."""
    return math.exp(loss) if loss < 700 else math.inf


def validation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as lines of text."""
    head = ("data", "loss", "perplexity", "batches", "tokens")
    cells = [
        (row["name"], f"{row['loss']:.6f}", f"{row['perplexity']:,.2f}", f"{row['batches']:,}", f"{row['tokens']:,}")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))])
        for line in [head, *cells]
    )


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

    made: RunComponents
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
    wanted = CheckpointRef.parse(run)
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
            question = _question(CheckpointRef(wanted.run, step), Config.from_dict(values), record, store, asked, held)
            made = question.made
            replay = Replay(
                store, step, made.build, made.loss, sets=question.sets, train=made.curriculum.primary_streamer,
                shape=question.shape, mesh=_mesh(made),
                options=dataclasses.replace(made.options, eval_iters=question.eval_iters),
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


def _mesh(made: RunComponents) -> Mesh:
    """The devices: as many as the run had, or all there are where those are fewer, or cannot be shared out so."""
    config, here = made.config, len(jax.devices())
    groups = config.tensor_devices * max(1, config.fsdp_devices if config.fsdp else 1)
    if config.n_devices > here or (config.n_devices or here) % groups:
        return make_mesh()
    return made.mesh()


def _saved(wanted: CheckpointRef, best: bool) -> dict[str, Any]:
    """The run's config and record."""
    if best and wanted.step is not None:
        raise ValueError(f"RUN is {wanted}, and --best takes the step with the lowest val_loss: use one of the two")
    saved = saved_config(wanted.run)
    if not saved:
        raise ValueError(no_run(wanted.run))
    return saved


@contextlib.contextmanager
def _checkpoint(wanted: CheckpointRef, best: bool) -> Iterator[tuple[CheckpointStore, int]]:
    """The checkpoints of the run, and the step meant.

    Raises:
        ValueError: there is no such checkpoint, or a run that goes on has deleted it meanwhile.
    """
    with open_checkpoint("RUN", wanted) as (store, newest):
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
    wanted: CheckpointRef,
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
    made = build_components(config, data)
    sets = made.validation
    if other:
        sets = validation_sets(dataclasses.replace(config, validation=named), data)
        check_vocabularies(sets, made.vocab_size)
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
