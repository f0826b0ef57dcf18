"""Where a run begins, if neither with nothing nor at its newest checkpoint. Standard library alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class RunStep(NamedTuple):
    """A checkpoint of a run, as people write it: RUN@STEP, or RUN for its newest one."""

    run: Path
    step: int | None

    def __str__(self) -> str:
        return f"{self.run}" if self.step is None else f"{self.run}@{self.step}"


def run_step(text: str | Path) -> RunStep:
    """The checkpoint that RUN@STEP or RUN names; an @ that no number follows belongs to the folder's name."""
    run, mark, step = str(text).rpartition("@")
    return RunStep(Path(run), int(step)) if mark and run and step.isdecimal() else RunStep(Path(text), None)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run that has no checkpoint yet begins with, or how far one that has some goes back."""

    fork: RunStep | None = None
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


NEWEST = Origin()
"""With nothing, or at the newest checkpoint."""
