"""What a run remembers besides its arrays and its plan; it is kept in every checkpoint.

Where a run begins, if neither with nothing nor at its newest checkpoint. Standard library alone.

`training_cursor.json`: how far a run is, for people and for programs that shall not read a checkpoint.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from roxxel_dist.data.commit import write_file


class CheckpointRef(NamedTuple):
    """A checkpoint of a run, as people write it: RUN@STEP, or RUN for its newest one."""

    run: Path
    step: int | None

    def __str__(self) -> str:
        return f"{self.run}" if self.step is None else f"{self.run}@{self.step}"

    @classmethod
    def parse(cls, text: str | Path) -> "CheckpointRef":
        """What RUN@STEP or RUN names; an @ that no number follows belongs to the folder's name."""
        run, mark, step = str(text).rpartition("@")
        return cls(Path(run), int(step)) if mark and run and step.isdecimal() else cls(Path(text), None)


@dataclass(frozen=True, kw_only=True)
class ResumeSpec:
    """What a run that has no checkpoint yet begins with, or how far one that has some goes back."""

    fork: CheckpointRef | None = None
    """Begin with the whole state of this checkpoint: parameters, moments, random streams, position in the data."""
    from_step: int | None = None
    """Go back to the run's own checkpoint of this step; later ones are deleted."""
    skip_steps: tuple[int, int] | None = None
    """With `from_step`: leave out what these steps, the first and the last, counted from 1, would have read."""

    def __post_init__(self) -> None:
        if self.fork is not None and self.fork.step is None:
            raise ValueError(f"fork is {self.fork}: it must say at which step, as in {self.fork}@1000")
        if self.fork is not None and self.from_step is not None:
            raise ValueError("fork begins a new run and from_step goes back in an old one: use one of the two")
        if self.skip_steps is None:
            return
        if self.from_step is None:
            raise ValueError("skip_steps leaves rows out behind a step that the run goes back to: name it, from_step")
        first, last = self.skip_steps
        if not self.from_step < first <= last:
            raise ValueError(
                f"skip_steps is {first}:{last}, and the run goes back to where step {self.from_step} was done: write "
                f"the first and the last step to leave out, both above {self.from_step}"
            )


RESUME_LATEST = ResumeSpec()
"""With nothing, or at the newest checkpoint."""


NAME = "training_cursor.json"


def write_cursor(run: Path, step: int, last_step: int, *, finished: bool) -> None:
    """Say, in one move, which step is saved and whether it was the last one; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        cursor = {"step": step, "last_step": last_step, "finished": finished}
        write_file(run / NAME, json.dumps(cursor) + "\n")


def read_cursor(run: Path) -> dict[str, Any]:
    """What was written last; empty where there is nothing that can be read."""
    try:
        found = json.loads((run / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
