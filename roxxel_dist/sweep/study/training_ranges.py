"""How much text each data set of a search over mixtures has."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.units import Ranges
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.curriculum import open_data_sets


def training_ranges(config: Any, data_path: str | Path | None) -> dict[str, Ranges]:
    """The training part of each data set of a `Config`. Raises ValueError where it is text, or cannot be opened."""
    path = config.primary_path(data_path)
    if path is None or not is_tokens(path):
        raise UserError(
            f"mixtures: {path} is text, whose tokens are not counted yet: make shards of it first "
            f"(`roxxel-dist data build {path} --out DIR`)"
        )
    with ExitStack() as held:
        data = held.enter_context(Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)))
        sets = {name: held.enter_context(each) for name, each in open_data_sets(config, "datasets", data).items()}
        train, _ = data.split(0 if config.validation else config.val_fraction)
        return {"self": list(train.ranges), **{name: list(each.ranges) for name, each in sets.items()}}
