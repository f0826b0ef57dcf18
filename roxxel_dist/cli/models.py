"""The commands about a trained model: eval, generate, export."""

import dataclasses
import json
import math
import sys
from typing import Any, Literal

import tyro

from roxxel_dist.cli.arguments import parse
from roxxel_dist.cluster.exit_codes import EXIT_FAILED
from roxxel_dist.config import usage_errors, yaml_problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Repeat a run's validation from a kept checkpoint, to the last bit, and compare it with the log. The run is only
    read, and may be training; exits with 1 if a checkpoint does not give its own losses."""

    run: tyro.conf.Positional[str]
    """RUN@STEP, or RUN for its newest checkpoint."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""
    data_path: str | None = None
    """Shards; the run remembers its own. Other tokens than the run's are another question, and not compared."""
    validation: str | None = None
    """Data sets to validate on instead of the run's: '{name: PATH}'."""
    eval_iters: int | None = None
    """Batches to read of each data set, if not as many as the run did."""
    json: bool = False
    """Print one JSON object instead of the table."""


def evaluate(words: list[str]) -> int:
    """Repeat a run's validation from a checkpoint, to the last bit."""
    args = parse(EvalArgs, words, "eval")
    with usage_errors():
        validation = _named_sets(args.validation)
    from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary
    from roxxel_dist.evaluate import Asked, evaluate

    asked = Asked(data_path=args.data_path, validation=validation, eval_iters=args.eval_iters)
    found = evaluate(args.run, asked, best=args.best)
    if is_primary():
        print(json.dumps(_as_json(found)) if args.json else _as_text(found), flush=True)
        if found.broken:
            print(_alarm(found), file=sys.stderr, flush=True)
    return EXIT_FAILED if broadcast_from_primary("eval", "broken" if found.broken else "") else 0


def _named_sets(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--validation is not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"--validation is {text!r}: write names and paths, such as '{{code: data/code}}'")
    return found


def _as_json(found: Any) -> dict[str, Any]:
    from roxxel_dist.evaluate import rows_of

    def finite(row: dict[str, Any]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}

    compared = bool(found.logged) and not found.changed
    return {
        "run": str(found.run),
        "step": found.step,
        **finite(dict(found.losses)),
        "data": [finite(row) for row in rows_of(found.losses, found.reads)],
        "logged": dict(found.logged) or None,
        "same_as_logged": not found.deviations if compared else None,
        "changed": list(found.changed),
        "different": list(found.different),
    }


def _as_text(found: Any) -> str:
    from roxxel_dist.evaluate import rows_of, validation_table

    lines = [f"{found.run}, step {found.step}", validation_table(rows_of(found.losses, found.reads))]
    if found.changed:
        lines.append(f"not compared with the log, as another question was asked: {'; '.join(found.changed)}")
    elif not found.logged:
        lines.append(f"not compared with the log: it has no validation of step {found.step}")
    elif not found.deviations:
        lines.append("the same as in the log, to the last bit")
    else:
        lines += ["not the same as in the log:", *(f"  {line}" for line in found.deviations)]
        if found.different:
            lines += ["which may come from what was another then:", *(f"  {line}" for line in found.different)]
    return "\n".join(lines)


def _alarm(found: Any) -> str:
    return (
        f"roxxel-dist: THE CHECKPOINT OF STEP {found.step} IN {found.run} DOES NOT GIVE ITS OWN LOSSES "
        f"({'; '.join(found.deviations)}), and devices, versions and flags are those that the run had. Either its "
        f"arrays or the log were changed, or what is not compared: the data sets that validation names, the code of a "
        f"model or loss of your own, other packages than jax"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text with a trained model."""

    run_dir: tyro.conf.Positional[str]
    """The run directory of the model, what `export` has made of one, or a folder of Hugging Face."""
    prompt: str = ""
    """The text to continue; the beginning of a document where empty."""
    max_new_tokens: int = 200
    """Tokens to add at most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws from the model's distribution."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest of the likeliest tokens that have this probability together; 1 for all."""
    seed: int = 0
    """Of the draws."""
    num_samples: int = 1
    """Texts to write, drawn with this seed and the ones behind it."""
    step: int | None = None
    """The checkpoint to use; the newest where not given."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""


def generate(words: list[str]) -> int:
    """Continue a text with a trained model."""
    args = parse(GenerateArgs, words, "generate")
    with usage_errors():
        if args.num_samples < 1:
            raise ValueError(f"--num_samples is {args.num_samples}: it must be at least 1")
        if args.best and args.step is not None:
            raise ValueError("--best and --step name two checkpoints: use one of the two")
        from roxxel_dist.cluster.determinism import enable_compilation_cache
        from roxxel_dist.cluster.distributed import initialize
        from roxxel_dist.generator import Generator

        initialize()
        enable_compilation_cache()
        model = Generator(args.run_dir, best=args.best, step=args.step)
        how = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
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
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write the weights of a run for other programs, with its config and tokenizer. The run is only read."""

    run: tyro.conf.Positional[str]
    """RUN@STEP, or RUN for its newest checkpoint."""
    format: Literal["msgpack", "safetensors", "hf"]
    """msgpack: one file of flax's; safetensors: the same names in files of that library; hf: a folder that transformers
    loads as a LLaMA, Mistral or Mixtral."""
    out: str
    """The folder to make."""
    step: int | None = None
    """The checkpoint of this step."""
    best: bool = False
    """The checkpoint with the lowest val_loss."""
    merge_lora: bool = False
    """Of a run that trained adapters: the plain model that does what it does with them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; as they were trained where not given."""
    max_shard_size: str = "5GB"
    """Of safetensors and hf: how large a file may be, such as 500MB."""
    overwrite: bool = False
    """Replace the folder if it is there already."""


def export(words: list[str]) -> int:
    """Write a run's weights for other programs: msgpack, safetensors, hf."""
    args = parse(ExportArgs, words, "export")
    with usage_errors():
        if args.best and args.step is not None:
            raise ValueError("--best and --step name two checkpoints: use one of the two")
        from roxxel_dist.export import export_run

        print(export_run(**dataclasses.asdict(args)))
    return 0
