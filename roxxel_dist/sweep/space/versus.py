"""`versus` of a study: two configurations, trained in pairs that share a seed, and when their comparison ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roxxel_dist.process.exit_codes import UserError

SIDE, SEED = "side", "seed"
"""The parameters of such a study: the side is no field of a Config. Sorted, the two trials of a seed are neighbours."""
SIDES = ("A", "B")
SEEDS = 10_000
"""So many seeds are there to be asked for."""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The key `versus` of the second file of a study."""

    changes: Mapping[str, Any]
    """The fields of side B that differ from the config of the study, which is side A."""
    names: Mapping[str, str]
    """What people call each side."""
    level: float = 0.9
    smallest: float | None = None
    """A difference that matters: an interval within plus and minus this one says that there is none."""

    def __post_init__(self) -> None:
        """Raises UserError for a number that is none."""
        if not 0.5 <= self.level < 1:
            raise UserError(f"--level {self.level:g}: must be at least 0.5 and below 1, such as 0.9")
        if self.smallest is not None and not 0 < self.smallest < float("inf"):
            raise UserError(f"--smallest {self.smallest:g}: must be more than 0, in units of the metric")

    def fields(self, side: str) -> Mapping[str, Any]:
        """What a side changes in the config of the study."""
        return self.changes if side == SIDES[1] else {}

    @classmethod
    def parameters(cls, seed: int) -> dict[str, Any]:
        """The parameters of the sweep that trains the pairs, from a seed on."""
        return {SEED: {"min": seed, "max": seed + SEEDS - 1}, SIDE: {"values": [*SIDES]}}
