"""The command that writes a model for other programs."""

import dataclasses
from typing import Literal

import tyro

from roxxel_dist.cli.arguments import Switch, parse
from roxxel_dist.config import usage_errors


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
    best: Switch = False
    """The checkpoint with the lowest val_loss."""
    merge_lora: Switch = False
    """Of a run that trained adapters: the plain model that does what it does with them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; as they were trained where not given."""
    max_shard_size: str = "5GB"
    """Of safetensors and hf: how large a file may be, such as 500MB."""
    overwrite: Switch = False
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
