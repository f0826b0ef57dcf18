"""Whether the trainings of a sweep will log its metric, known before the first trial."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.space.sweep_file import Sweep


def check_of_trainings(sweep: Sweep, fields: Mapping[str, Any], config: Config, path: str | Path | None) -> None:
    """Raises UserError where the trainings have no such validation set, or no text whose bytes could be counted.

    Args:
        sweep: its metric.
        fields: of a Config, those that are given, flat.
        config: of the trials, without their parameters.
        path: of the primary data set.
    """
    swept = {parameter.path[-1] for parameter in sweep.space.parameters}
    for logged in sweep.logged or (sweep.metric,):
        kind, _, name = logged.partition("/")
        if not kind.startswith("val_"):
            continue
        sets = fields.get("validation") or {}
        if name and name not in sets and "validation" not in swept:
            there = f"`validation` names {', '.join(sets)}" if sets else "there is no `validation`"
            raise UserError(
                f"metric: {logged} is the validation of the data set {name!r}, and {there}: give it validation text, "
                f"as in validation: {{{name}: PATH}}"
            )
        if kind == "val_bpb":
            _check_text(logged, fields, config, path, swept)


def _check_text(
    logged: str, fields: Mapping[str, Any], config: Config, path: str | Path | None, swept: set[str]
) -> None:
    if fields.get("loss") is not None or "loss" in swept:
        raise UserError(f"metric: {logged} is counted with the built-in loss alone: leave out loss, or use val_loss")
    if path is None or not is_tokens(path):
        return  # text gets a tokenizer
    with Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as data:
        if data.tokenizer is None:
            raise UserError(
                f"metric: {logged} needs the bytes of the text, and {path} has no tokenizer: put its tokenizer.json "
                f"beside the shards, or use val_loss"
            )
        name, sets = logged.partition("/")[2], fields.get("validation") or {}
        places = {set_name: place for set_name, place in sets.items() if name in ("", set_name)} if sets else {"": path}
        for place in places.values() if "validation" not in swept else ():
            if not is_tokens(place):
                continue
            with Roxxel(place, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as of_set:
                if of_set.text_scale(data.tokenizer) is None:
                    raise UserError(
                        f"metric: {logged} needs the bytes of the text, and the shards in {place} do not have them: "
                        f"their tokenizer may change a text. Build them of the text with `roxxel-dist data build`, or "
                        f"use val_loss"
                    )
