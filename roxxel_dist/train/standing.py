"""What a run remembers besides its arrays and its plan; it is kept in every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isnan
from typing import Any

META = "meta.json"
"""The file of a checkpoint that holds it, and all else that is no array; named here, where no jax is imported."""


@dataclass(kw_only=True)
class Standing:
    """How the run stands."""

    best_loss: float | None = None
    """The lowest val_loss until now."""
    waited: int = 0
    """Validations since then."""
    rewinds: int = 0
    """How often the run went back to a checkpoint because of a bad step."""
    went_back: str = ""
    """The launched job that went back by hand: started again with the same words, it does not go back once more."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Standing":
        """From what a checkpoint keeps, among other things."""
        return cls(**{f.name: saved[f.name] for f in fields(cls) if f.name in saved})

    def judge(self, val_loss: float) -> bool:
        """Take in the loss of a validation; returns whether it is the lowest until now."""
        best = not isnan(val_loss) and (self.best_loss is None or val_loss < self.best_loss)
        self.best_loss, self.waited = (val_loss, 0) if best else (self.best_loss, self.waited + 1)
        return best

    def gave_up(self, patience: int) -> bool:
        """Whether so many validations have passed without a lower loss; never for 0."""
        return 0 < patience <= self.waited
