"""The validation of a run, repeated from a checkpoint. The run is only read: it may be training, or read-only."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.checkpoint.metadata import BaseModelRef, CheckpointRange, CheckpointRef
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import NoShardsError, absolute, is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.tasks import Task
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.place.directory import METRICS, TOKENIZER, no_run
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import RunComponents, build_components, check_vocabularies, open_tasks
from roxxel_dist.run.curriculum import open_data_sets
from roxxel_dist.run.metadata import RunMetadata, data_of, saved_config
from roxxel_dist.run.record import kernel_begun_with
from roxxel_dist.settings.config import RECORD, Config
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.log.csv_jsonl import read_rows
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import fetch
from roxxel_dist.train.steps import StepOptions, make_steps
from roxxel_dist.train.validation.evaluator import (
    Validation,
    ValidationRows,
    summarize,
    unknown_bits_notes,
)
from roxxel_dist.train.validation.task_scores import TaskScores, scores_of_task
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.base import load_base_params, open_checkpoint
from roxxel_dist.weights.load import attention_kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The losses of a checkpoint."""

    run: Path
    step: int
    losses: Mapping[str, float]
    """By the names of the log: "val_loss", "val_bal", "val_loss/<name>", "train_eval_loss", where the text of the
    tokens is known "val_bpb" and "val_bpb/<name>", and "val_<scalar>" of each scalar of a loss of the user's."""
    data: tuple[Mapping[str, Any], ...]
    """{"name", "metric", "loss", "perplexity", "bits_per_byte", "batches", "tokens"} of each data set, of all of them
    if there are several, and of the training data; "bits_per_byte" is None where the text is not known, and it
    and "perplexity" with a loss that is not the mean cross-entropy of the tokens."""
    tasks: Mapping[str, Mapping[str, float]]
    """The scores of each evaluation task by its name: "acc" and "acc_norm", or "bits_per_byte"."""
    notes: tuple[str, ...]
    """What was not read of the data, choices of tasks that were cut, why a set has no bits per byte, and what the
    tokenizer loses of texts."""
    logged_val_loss: float | None
    """The logged val_loss of the step; None if the step was not validated."""

    @property
    def difference(self) -> float | None:
        """`val_loss` minus the logged one; None where one of them is missing."""
        if self.logged_val_loss is None or "val_loss" not in self.losses:
            return None
        return self.losses["val_loss"] - self.logged_val_loss


def evaluate(
    run: str | Path,
    *,
    best: bool = False,
    data_path: str | None = None,
    validation: Mapping[str, str] | None = None,
    eval_iters: int | None = None,
    tasks: Sequence[str] | None = None,
    data_dtype: str | None = None,
) -> Evaluation:
    """The validation of a run at a kept checkpoint, on all the processes this one belongs to.

    It uses the current config and data of the run. If these have not changed since the step, the same devices,
    processes and versions give the logged numbers bit for bit; with virtual shards any number of devices does.

    Args:
        run: RUN or RUN@STEP; without a step the newest checkpoint.
        best: the checkpoint with the lowest val_loss; not together with a step.
        data_path: shards instead of those that the run remembers.
        validation: data sets to validate on, name: path, instead of the run's.
        eval_iters: batches to read of each data set, instead of as many as the run does.
        tasks: files of evaluation tasks, instead of the run's (`eval_tasks`).
        data_dtype: of the tokens in `.bin` files without a header, instead of the run's; "auto": uint16.

    Raises:
        UserError: there is no such run, checkpoint or data, or they do not fit each other.
    """
    checkpoint = CheckpointRef.parse(run)
    with usage_errors():
        if best and checkpoint.step is not None:
            raise UserError(
                f"RUN is {checkpoint}, and --best takes the step with the lowest val_loss: use one of the two"
            )
        folder = local_run(checkpoint.run)
        saved = saved_config(folder)
        if not saved:
            raise UserError(no_run(folder, absolute(checkpoint.run)))
        if saved.get("deterministic"):
            determinism.make_deterministic()
    # As in the run: the size of XLA's thread pool decides bits.
    determinism.pin_threads(RunMetadata.from_config(saved).pjrt_nproc)
    make_devices()
    determinism.enable_compilation_cache()
    with contextlib.ExitStack() as held:
        with usage_errors():
            store, step = held.enter_context(_checkpoint(checkpoint, best))
            metadata = store.metadata(step)
            plan, base = Plan.from_state(metadata.plan), metadata.base
            shape = plan.segment(step - 1).shape
            # Of a run without validation the rows are those of the phase.
            begun = {"batches": (), **metadata.validation, "eval_iters": saved["eval_iters"]}
            rows = ValidationRows.from_dict(begun).with_phases([shape])
            config = Config.from_dict({name: value for name, value in saved.items() if name != RECORD})
            if data_dtype is not None:
                config = dataclasses.replace(config, data_dtype=data_dtype)
            data = held.enter_context(open_data(folder, saved, data_path, config))
            if eval_iters is not None:
                config = dataclasses.replace(config, eval_iters=eval_iters)
            config = _with_kernel(config, plan, saved)
            tokenizer = Tokenizer.load(folder / TOKENIZER) if (folder / TOKENIZER).exists() else data.tokenizer
            found = open_tasks(config, tokenizer, tasks, "eval_tasks" if tasks is None else "--tasks")
            components, sets = _components(config, data, plan, validation, folder, needed=not found)
            compiler = AotCompiler(evaluation_mesh(components))
            held.callback(compiler.close)
            state, hparams, evaluator, scores = _measures(components, sets, rows, found, plan, base, compiler)
            unknown = unknown_bits_notes(sets, components.curriculum.primary_streamer, components.loss)
            evaluator.check(shape)
            evaluator.prepare(state, hparams, shape)
            scores.check(state, hparams)
            scores.prepare(state, hparams)
            weights = {name: leaves for name in ("params", "rest") if (leaves := getattr(state, name))}
            state = state._replace(**store.restore_evaluated(step, weights))
        # Outside usage_errors: an error while tracing is in the model or the loss function, and needs a traceback.
        compiler.wait_together()
        means = summarize(fetch(evaluator.run(state, hparams, shape)))
        of_tasks = scores.summarize(fetch(scores.run(state, hparams)))
        rows = read_rows(folder / METRICS)
        notes = [*evaluator.remarks(shape), *(task.truncation for task in found), tokenizer.losses if tokenizer else ""]
        return Evaluation(
            run=checkpoint.run,
            step=step,
            losses=means,
            data=_by_data_set(means, evaluator.reads(shape), evaluator.gives_nats),
            tasks={task.name: scores_of_task(task.name, of_tasks) for task in found},
            notes=(*filter(None, notes), *unknown),
            logged_val_loss=next((row.get("val_loss") for row in rows if row.get("step") == step), None),
        )


def evaluate_range(run: str | Path, **options: Any) -> list[Evaluation]:
    """Evaluate each kept checkpoint that RUN@A:B or RUN@A,B,C names, in the order of their steps, with the options of
    `evaluate`. Raises UserError: no such checkpoint is kept, or an error of `evaluate`."""
    named = CheckpointRange.parse(run)
    if named is None:
        raise UserError(f"RUN is {run}: it must name several checkpoints, as RUN@1000:2000 or RUN@1000,1500,2000")
    if options.get("best"):
        raise UserError(f"RUN is {named}, and --best takes the step with the lowest val_loss: use one of the two")
    with usage_errors():
        make_devices()
        with open_checkpoint("RUN", CheckpointRef(named.run, None)) as (store, _):
            steps = named.among(store.steps())
    return [evaluate(str(CheckpointRef(named.run, step)), **options) for step in steps]


@contextlib.contextmanager
def _checkpoint(checkpoint: CheckpointRef, best: bool) -> Iterator[tuple[CheckpointReader, int]]:
    """The checkpoints of the run, and the requested step; ValueError if it does not exist, or was deleted."""
    with open_checkpoint("RUN", checkpoint) as (store, newest):
        step = store.best_step() if best else newest
        if step is None:
            raise UserError(
                f"--best: no checkpoint of {checkpoint.run} was saved with a val_loss; kept are "
                f"{', '.join(map(str, store.steps()))}, name one as {checkpoint.run}@{newest}"
            )
        try:
            yield store, step
        except (OSError, ValueError) as error:
            if (store.folder / str(step)).exists():
                raise
            raise UserError(  # it leaves the place where others become one
                f"RUN is {checkpoint}: the run has deleted its checkpoint of step {step} meanwhile; name a newer one, "
                f"or one that it keeps (keep_every, keep_steps, max_to_keep)"
            ) from error


def open_data(run: Path, saved: Mapping[str, Any], data_path: str | None, config: Config) -> Roxxel:
    """The primary data set of the run, or its replacement `data_path`, read with the data_dtype of `config`."""
    path = data_path or data_of(saved, run)
    data = None
    with contextlib.suppress(NoShardsError):
        if path is not None and is_tokens(path):
            opened = Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig))
            _ = opened.shards  # raises if there are no shards
            data = opened
    if data is None:
        raise UserError(
            f"data_path is {path}: there are no shards. Put the data of {run} back, or name it with "
            f"{argument('data_path', 'PATH')}; text becomes shards with `roxxel-dist data build TEXT --out DIR` "
            f"and the run's tokenizer"
        )
    if (run / TOKENIZER).exists() and data.tokenizer_fingerprint is not None:
        known = Tokenizer.load(run / TOKENIZER).fingerprint
        if data.tokenizer_fingerprint != known:
            raise UserError(
                f"data_path is {path}, made with tokenizer {data.tokenizer_fingerprint}, and {run} was trained with "
                f"{known}: build the data with {run / TOKENIZER}"
            )
    return data


def _with_kernel(config: Any, plan: Plan, saved: Mapping[str, Any]) -> Any:
    """The config with the run's attention kernel, for the same bits; with auto if the kernel cannot run here."""
    try:
        kernel = attention_kernel(config, plan.shapes, kernel_begun_with(saved))
    except ValueError:
        kernel = "auto"
    return dataclasses.replace(config, attention=kernel)


def _components(
    config: Any, data: Roxxel, plan: Plan, validation: Mapping[str, str] | None, run: Path, *, needed: bool
) -> tuple[RunComponents, Mapping[str, Roxxel]]:
    """(the components of the run, the validation data sets by name); without one only where none is `needed`."""
    # Training rows are not read, so only the primary data set must exist.
    names = ("steps", "batch_size", "seq_len", "packing")
    phases = [{name: getattr(shape, name) for name in names} for shape in plan.shapes]
    config = dataclasses.replace(config, datasets=None, phases=phases)
    fraction = 0.0 if config.validation else config.val_fraction
    if validation is None:
        components = build_components(config, data)
        sets = components.validation
    else:
        named = dataclasses.replace(config, validation=dict(validation))
        named.validate()
        components = build_components(dataclasses.replace(config, validation=None, val_fraction=fraction), data)
        sets = open_data_sets(named, "validation", data)
        check_vocabularies(sets, components.vocab_size)
    if needed and not any(data_set.num_tokens for data_set in sets.values()):
        raise UserError(
            f"{run} has nothing to validate on (val_fraction is {config.val_fraction}, and validation names no "
            f"data): name some, as in --validation '{{code: data/code}}'"
        )
    return components, sets


def _measures(
    components: RunComponents,
    sets: Mapping[str, Roxxel],
    rows: ValidationRows,
    tasks: Sequence[Task],
    plan: Plan,
    base: BaseModelRef | None,
    compiler: AotCompiler,
) -> tuple[TrainState, dict[str, jax.Array], Validation, TaskScores]:
    """The abstract state, the inputs of every step, and what measures the data sets and the tasks."""
    # Without an optimizer moments are not read: it takes the memory of the weights alone.
    options = StepOptions.of_run(components.options)
    steps = make_steps(components.build, components.loss, None, compiler.mesh, options)
    load = None if base is None else functools.partial(load_base_params, base.resolve(components.options.init_from))
    state, hparams = steps.init(restored=True, load=load)
    train, split = components.curriculum.primary_streamer, steps.split
    model = split.merge(state.params, state.rest, hparams, training=False)
    rows = dataclasses.replace(rows, eval_iters=components.options.eval_iters)
    evaluator = Validation.of_steps(sets, train, steps, model, compiler, rows)
    scores = TaskScores(tasks, split, compiler, steps.sharding, plan.shapes, options.compute_dtype)
    return state, hparams, evaluator, scores


def evaluation_mesh(components: RunComponents) -> Mesh:
    """The devices: as many as the run had, or all devices if there are fewer, or the run's number does not divide.

    All devices share experts and matrices as in the run, or as far as their number allows.

    With virtual shards any number gives the same bits, and there is one device for each of them at most.
    """
    config, here, shards = components.config, len(jax.devices()), components.options.virtual_shards
    if shards:
        config = dataclasses.replace(config, n_devices=min(config.n_devices or here, here, shards), fsdp_devices=0)
        return dataclasses.replace(components, config=config).mesh()
    groups = config.tensor_devices * config.expert_devices * max(1, config.fsdp_devices if config.fsdp else 1)
    if config.n_devices > here or (config.n_devices or here) % groups:
        tensor = math.gcd(config.tensor_devices, here)
        return make_mesh(expert=math.gcd(config.expert_devices, here // tensor), tensor=tensor)
    return components.mesh()


def _by_data_set(
    losses: Mapping[str, float], reads: Mapping[str, tuple[int, int]], in_nats: bool
) -> tuple[dict[str, Any], ...]:
    """`Evaluation.data` from losses by logged name, and (batches, tokens) from `Validation.reads`."""
    if not reads:
        return ()
    *names, train = reads  # "" is the held-out part, and the last one is the training data
    rows: list[tuple[Any, ...]] = [
        (name or "held out", f"val_loss/{name}" if name else "val_loss", *reads[name]) for name in names
    ]
    if len(names) > 1:
        batches, tokens = (sum(reads[name][i] for name in names) for i in (0, 1))
        rows.append(("all of them", "val_loss", batches, tokens))
    rows.append(("training data", "train_eval_loss", *reads[train]))
    return tuple(
        {
            "name": name,
            "metric": metric,
            "loss": losses[metric],
            "perplexity": perplexity(losses[metric]) if in_nats else None,
            "bits_per_byte": losses.get("val_bpb" + metric.removeprefix("val_loss")),
            "batches": batches,
            "tokens": tokens,
        }
        for name, metric, batches, tokens in rows
    )


def perplexity(loss: float) -> float:
    """exp(loss); infinite if it overflows float64."""
    return math.exp(loss) if loss < 700 else math.inf
