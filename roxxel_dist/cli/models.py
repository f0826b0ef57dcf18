"""The commands about a trained model: eval, generate, merge, export."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from roxxel_dist.checkpoint.metadata import CheckpointRange, CheckpointRef
from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.report import UNKNOWN, scalar_names
from roxxel_dist.settings.config import parse_yaml
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.display import aligned, plain

if TYPE_CHECKING:
    from roxxel_dist.run.evaluate import Evaluation

MOST_SAMPLES = 10_000
"""Texts of one `generate`: they are one batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Repeat the validation of a run from a kept checkpoint, and compare its val_loss with the log. The run does not
    change, and may be training."""

    run: Positional[str]
    """RUN@STEP, or RUN for its newest checkpoint. RUN@A:B: each kept checkpoint from step A to B, a row for each;
    RUN@A,B,C: these."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""
    data_path: str | None = None
    """Shards. Default: the data of the run."""
    data_dtype: str | None = None
    """Type of the tokens in `.bin` files without a header; auto: uint16. Default: that of the run."""
    validation: str | None = None
    """Validation data sets that replace those of the run: '{name: PATH}'."""
    eval_iters: int | None = None
    """Batches to read from each data set. Default: as many as in the run."""
    tasks: list[str] | None = None
    """Files of evaluation tasks that replace those of the run (eval_tasks)."""
    json: bool = False
    """Print one JSON object instead of the table; of several checkpoints a list of them."""


def evaluate(words: list[str]) -> int:
    """Repeat a run's validation from a checkpoint."""
    args = parse(EvalArgs, words, "eval")
    with usage_errors():
        validation = _named_sets(args.validation)
        if args.tasks is not None and not args.tasks:
            raise UserError("--tasks has no value: name one file at least, or leave it out")
    from roxxel_dist.cluster.distributed import is_primary
    from roxxel_dist.run.evaluate import evaluate, evaluate_range

    names = ("best", "data_path", "eval_iters", "tasks", "data_dtype")
    options: dict[str, Any] = {name: getattr(args, name) for name in names} | {"validation": validation}
    if CheckpointRange.parse(args.run):
        several = evaluate_range(args.run, **options)
        result, table = [_as_json(one) for one in several], evaluations_table(several)
    else:
        evaluation = evaluate(args.run, **options)
        result, table = _as_json(evaluation), evaluation_table(evaluation)
    if is_primary():
        print(json.dumps(result) if args.json else table, flush=True)
    return 0


def _named_sets(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    sets = parse_yaml(text, "--validation")
    if not isinstance(sets, dict) or not sets:
        raise UserError(f"--validation is {text!r}: write names and paths, such as '{{code: data/code}}'")
    return sets


def _as_json(evaluation: Any) -> dict[str, Any]:
    names = ("data", "tasks", "logged_val_loss", "difference", "notes")
    more = {name: getattr(evaluation, name) for name in names}
    return plain({"run": evaluation.run, "step": evaluation.step, **evaluation.losses, **more})


def evaluation_table(evaluation: "Evaluation") -> str:
    """An evaluation as text: a line for each data set, the logged val_loss, and a line for each task."""
    rows = [["data", "loss", "perplexity", "bits per byte", "batches", "tokens"]]
    for row in evaluation.data:
        loss, batches, tokens = f"{row['loss']:.6f}", f"{row['batches']:,}", f"{row['tokens']:,}"
        bits = UNKNOWN if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.6f}"
        rows.append([row["name"], loss, _perplexity(row), bits, batches, tokens])
    logged, difference = evaluation.logged_val_loss, evaluation.difference
    if logged is None:
        log = f"the log has no val_loss of step {evaluation.step}"
    elif difference == 0:
        log = "val_loss is the same as in the log, to the last bit"
    else:
        log = f"val_loss is {evaluation.losses['val_loss']!r}, and {logged!r} in the log: {difference:+.3g}"
    data = [*aligned(rows), log] if evaluation.data else []
    if scalars := scalar_names(evaluation.losses):
        data += aligned([["scalar", "value"], *([name, f"{evaluation.losses[name]:.6f}"] for name in scalars)])
    tasks = [["task", "score", "value"]]
    tasks += [[name, key, f"{value:.4f}"] for name, scores in evaluation.tasks.items() for key, value in scores.items()]
    lines = [*data, *(aligned(tasks) if evaluation.tasks else []), *evaluation.notes]
    return "\n".join([f"{CheckpointRef(evaluation.run, None)}, step {evaluation.step}", *lines])


def _perplexity(row: Mapping[str, Any]) -> str:
    return UNKNOWN if row["perplexity"] is None else f"{row['perplexity']:,.2f}"


def evaluations_table(evaluations: Sequence["Evaluation"]) -> str:
    """Evaluations of one run as text: a line for each checkpoint, with how far its val_loss is from the log."""
    first = evaluations[0]
    metrics = sorted((row["metric"] for row in first.data), key=lambda name: name != "val_loss")  # that one first
    scores = [(task, key) for task, of_task in first.tasks.items() for key in of_task]
    metrics += scalar_names(first.losses)
    head = ["step", *metrics, *(f"{task} {key}" for task, key in scores)]
    rows = [[*head[:2], "perplexity", *head[2:], "minus the log"] if metrics else head]
    for one in evaluations:
        cells = [f"{one.step:,}", *(f"{one.losses[name]:.6f}" for name in metrics)]
        cells += [f"{one.tasks[task][key]:.4f}" for task, key in scores]
        if metrics:
            # One validation set with a name has a row of its own, and no row of all of them.
            cells.insert(2, _perplexity(next((row for row in one.data if row["metric"] == "val_loss"), one.data[0])))
            cells.append(UNKNOWN if one.difference is None else f"{one.difference:+.3g}" if one.difference else "0")
        rows.append(cells)
    return "\n".join([str(CheckpointRef(first.run, None)), *aligned(rows), *first.notes])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text with a trained model."""

    run_dir: Positional[str]
    """A run directory, an export of `export`, or a Hugging Face model folder."""
    prompt: str = ""
    """The text to continue. If empty, the model starts a new document."""
    max_new_tokens: int = 200
    """Maximum number of new tokens. A text also ends at max_context."""
    temperature: float = 0.8
    """Sampling temperature: 0 always takes the most likely token, 1 samples from the distribution of the model."""
    top_k: int = 0
    """Sample from the K most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; 1 for all."""
    seed: int = 0
    """Random seed of the sampling."""
    stop: list[str] | None = None
    """Texts that end the text: it ends before the first of them."""
    num_samples: int = 1
    """Number of texts, sampled with this seed and the next seeds."""
    step: int | None = None
    """Step of the checkpoint. Default: the newest."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""
    expert_devices: int | None = None
    """Devices that share the experts. Default: as in the run, or as many of these as are here."""
    tensor_devices: int | None = None
    """Devices that share each matrix. Default: as in the run, or as many of these as are here."""
    fsdp_devices: int | None = None
    """Devices that share the other parameters, which are gathered for each token. Default: 1."""


def generate(words: list[str]) -> int:
    """Continue a text with a trained model."""
    args = parse(GenerateArgs, words, "generate")
    with usage_errors():
        if not 1 <= args.num_samples <= MOST_SAMPLES:
            raise UserError(f"--num_samples is {args.num_samples}: it must be from 1 to {MOST_SAMPLES:,}, in one batch")
        if args.best and args.step is not None:
            raise UserError("--best and --step name two checkpoints: use one of the two")
        from roxxel_dist.cluster.determinism import enable_compilation_cache
        from roxxel_dist.cluster.distributed import make_devices
        from roxxel_dist.weights.generator import Generator

        make_devices()
        enable_compilation_cache()
        notes: list[str] = []
        which = {name: getattr(args, name) for name in ("expert_devices", "tensor_devices", "fsdp_devices")}
        model = Generator(args.run_dir, best=args.best, step=args.step, say=notes.append, **which)
        how: dict[str, Any] = {
            name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")
        }
        how["stop"] = args.stop or ()
        if args.num_samples == 1:
            pieces = model.stream(args.prompt, seed=args.seed, **how)
            # The first one, before anything is shown: what is wrong with the arguments is found now.
            print(args.prompt + next(pieces, ""), end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
            print()
        else:
            seeds = range(args.seed, args.seed + args.num_samples)
            for i, text in enumerate(model.generate([args.prompt] * args.num_samples, seed=seeds, **how)):
                print(f"--- sample {i + 1}, seed {seeds[i]}\n{args.prompt}{text}", flush=True)
        for line in notes:
            print(f"roxxel-dist: {line}", file=sys.stderr, flush=True)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeArgs:
    """Average the parameters of several kept checkpoints of a run, in place of a decay of the rate. The result is a
    run directory with one checkpoint, without moments. The run does not change."""

    run: Positional[str]
    """RUN@A:B for all kept checkpoints from step A to B, or RUN@A,B,C."""
    out: str
    """The folder to create."""
    weights: Literal["uniform", "1-sqrt"] = "uniform"
    """uniform: the mean. 1-sqrt: as if the rate had decayed from A to B as 1 - sqrt(t)."""


def merge(words: list[str]) -> int:
    """Average several checkpoints of a run into one model."""
    args = parse(MergeArgs, words, "merge")
    with usage_errors():
        from roxxel_dist.weights.export import merge_run

        print(merge_run(**dataclasses.asdict(args)))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write the weights of a run for other programs, with its config and tokenizer. The run does not change."""

    run: Positional[str]
    """RUN@STEP, or RUN for its newest checkpoint."""
    format: Literal["msgpack", "safetensors", "hf"]
    """msgpack: one Flax file. safetensors: the same names in safetensors files. hf: a folder for transformers, of
    the family that has what the model has."""
    out: str
    """The folder to create."""
    step: int | None = None
    """Step of the checkpoint."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""
    merge_lora: bool = False
    """For a run with LoRA adapters: merge them into the weights, and write a plain model."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights. Default: as trained."""
    max_shard_size: str = "5GB"
    """For safetensors and hf: maximum size of a file, such as 500MB."""
    overwrite: bool = False
    """Replace the folder if it exists."""


def export(words: list[str]) -> int:
    """Write a run's weights for other programs: msgpack, safetensors, hf."""
    args = parse(ExportArgs, words, "export")
    with usage_errors():
        if args.best and args.step is not None:
            raise UserError("--best and --step name two checkpoints: use one of the two")
        from roxxel_dist.weights.export import export_run

        print(export_run(**dataclasses.asdict(args)))
    return 0
