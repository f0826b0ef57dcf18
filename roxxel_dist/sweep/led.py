"""A sweep that a W&B server leads, as the driver here sees it."""

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from roxxel_dist.sweep.space import Params

LOGIN = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Led:
    """An engine that leaves the parameters to somebody else: every trial has none until it has ended."""

    def __init__(self) -> None:
        self._next = 0

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial."""
        self._next += 1
        return self._next - 1, {}

    def tell(self, trial: int, value: float | None) -> None:
        """The server was told by the trial itself."""

    def point(self, trial: int) -> list[float]:
        """The server does not say."""
        return []

    def recall(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Count a trial of an earlier start."""
        self._next = max(self._next, trial + 1)


def logged_in() -> bool:
    """Whether W&B's client would find a login, without asking anybody for it."""
    if any(os.environ.get(name) for name in LOGIN):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    wandb.teardown()  # its service, which the environment names to all that this process starts
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(str(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def definition(sweep_id: str) -> Mapping[str, Any]:
    """What the server has of a sweep, as W&B's YAML would have it. Raises ValueError where there is none."""
    import wandb

    try:
        # As with the other calls of the client: many errors, and no base of them all.
        return dict(wandb.Api().sweep(sweep_id).config)
    except Exception as error:
        raise ValueError(f"--sweep_id {sweep_id}: {' '.join(str(error).split()) or repr(error)}") from error
