"""Whether the code of a model, a loss and an optimizer of the user's own has been checked by `check-layouts`.

A mark in the user's cache says so. Its name is a digest of the files that have the code, and of `model_args`: a change
of either asks for another check. A file that these import is not looked at.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.model.user_code import import_function, is_function
from roxxel_dist.process.durable import cache_folder, make_folder, write_file
from roxxel_dist.settings.config import Config
from roxxel_dist.train.parts import Parts

FOLDER = "layouts"


def own_code(source: Config | Parts) -> list[Any]:
    """The user's own functions and classes of a run: model, loss and optimizer."""
    if isinstance(source, Config):
        names = ("model", source.model), ("loss", source.loss), ("optimizer", source.optimizer)
        return [import_function(field, name) for field, name in names if name and is_function(name)]
    model, loss = source.model, source.loss_fn
    own = [] if isinstance(model, Transformer | TransformerBuilder) else [model]
    return own if loss in (token_losses, next_token_loss) else [*own, loss]


def mark_checked(code: Iterable[Any], model_args: Any = None) -> None:
    """Remember that a check has found that; a cache that cannot be written is no error."""
    mark = _mark(code, model_args)
    try:
        make_folder(mark.parent)
        write_file(mark, b"")
    except OSError:
        return


def _mark(code: Iterable[Any], model_args: Any) -> Path:
    digest = hashlib.sha256(json.dumps(model_args or {}, sort_keys=True, default=str).encode())
    for each in code:
        named = each if hasattr(each, "__qualname__") else type(each)
        digest.update(f"{named.__module__}:{named.__qualname__}".encode())
        file = getattr(sys.modules.get(named.__module__), "__file__", None)
        digest.update(Path(file).read_bytes() if file and Path(file).exists() else b"")
    return cache_folder() / FOLDER / digest.hexdigest()[:32]


def line_for(source: Config | Parts, devices: int, command: str) -> str:
    """What a run says whose code was never checked; empty for the built-in model, one device, and checked code."""
    code = own_code(source) if devices > 1 else []
    if not code or _mark(code, source.model_args if isinstance(source, Config) else None).exists():
        return ""
    return (
        f"never checked: whether a step of this model on {devices} devices is the step of one device; {command} says so"
    )
