"""What a search found at a small width, as the config of a wider model: with mup its best rates are the same ones."""

from dataclasses import fields, replace
from pathlib import Path

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.study.folder import Study

TRANSFERRED = "transferred.yaml"
"""The config of the wider model, in the study's folder."""
NO_SHAPE = {"init_std", "dropout_rate", "alpha_balance", "z_loss", "lora_dropout"}
"""Fields of a model that no parameter's shape follows from."""


def wide_config(path: str | Path, narrow: Config, searched: set[str]) -> Config:
    """The config in a file, with parametrization mup at the width of `narrow`.

    Args:
        path: the config of the wider model; its `num_blocks` may be another one too.
        narrow: what the trials begin from.
        searched: the names of the parameters that the sweep searches.

    Raises:
        ValueError: the search's result cannot carry over to it.
    """
    if shapes := sorted(searched & ({field.name for field in fields(ModelConfig)} - NO_SHAPE)):
        raise UserError(
            f"--transfer_to {path}: the sweep searches {', '.join(shapes)}, and what carries over to another width is "
            f"searched at a single shape: leave {'them' if shapes[1:] else 'it'} out of the sweep's parameters"
        )
    wide = replace(Config.from_yaml(path), parametrization="mup", base_dim=narrow.base_dim or narrow.dim)
    wide.validate()
    if wide.model != narrow.model:
        raise UserError(
            f"--transfer_to {path}: its model is {wide.model or 'the built-in one'}, and the sweep's is "
            f"{narrow.model or 'the built-in one'}: the two must be the same"
        )
    if wide.model is None and narrow.parametrization == "standard":
        base, trained = wide.part(ModelConfig).at_base_width().heads(), narrow.part(ModelConfig).heads()
        if base != trained:
            raise UserError(
                f"--transfer_to {path}: at dim {narrow.dim} its (n_heads, kv_heads, head_size) would be {base}, and in "
                f"the sweep they are {trained}: give both the same head_size, or both the same n_heads"
            )
    return wide


def write_transferred(study: Study, wide: Config, base: Config, best: Config, searched: set[str]) -> Path:
    """Write the config of the wider model with the values of the best trial; returns the file.

    Args:
        study: where it is written.
        wide: from `wide_config`.
        base: what the trials began from.
        best: the config of the best one.
        searched: the names of the parameters that the sweep searches.
    """
    before, values = base.to_dict(), best.to_dict()
    carried = {name: value for name, value in values.items() if name in searched or value != before[name]}
    path = study.path / TRANSFERRED
    replace(wide, **carried).save_yaml(path)
    return path
