"""How a sweep is run, and how it ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a sweep is run.

    Args:
        count: trials in all, those of earlier starts included; None: until the engine has no more.
        workers: trials at once.
        max_failures: so many failed trials in a row end the sweep.
        max_retries: how often a trial is run again whose worker or node was lost.
        resources: of each trial, as Ray counts them (CPU, GPU, memory in bytes, custom ones); before the sweep's own.
        ray_address: of a Ray cluster (`auto` or HOST:PORT); None: a Ray of its own on this machine.
        insecure: use the cluster also without a token.
        method: of the engine, for the journal.
        seed: of the engine, for the journal.
    """

    count: int | None = None
    workers: int = 1
    max_failures: int = 5
    max_retries: int = 3
    resources: Mapping[str, float] = field(default_factory=dict)
    ray_address: str | None = None
    insecure: bool = False
    method: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"count": 1, "workers": 1, "max_failures": 1, "max_retries": 0}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"--{name} {given}: must be {value} or more")
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"resources.{name}: {amount} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a sweep ended."""

    code: int
    """Of the process: 0, 1 (it cannot go on as it is), 42 (asked to end: start it again to go on)."""
    reason: str
