"""The interface of a scheduler: which trials stop or pause after a report, and which continue when a worker is free.

A scheduler keeps nothing that is not in the history: a new one, shown the same trials, decides the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

from roxxel_dist.sweep.study.journal import History


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """That a running trial is to end, or to pause at a checkpoint."""

    kind: Literal["stop", "pause"]
    reason: str


class Scheduler(Protocol):
    """Decides which trials get the next steps."""

    name: str
    """As in `early_terminate.type`."""

    def note(self, history: History, trial: int, step: int) -> None:
        """Note that a trial has reported for a step, or that the journal has a trial with reports up to it."""
        ...

    def judge(self, history: History, trial: int) -> Mapping[int, Verdict]:
        """Which running trials are to stop or to pause, now that this one has reported."""
        ...

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """The paused trial that goes on now, with the reason; None: a new one, or none where `can_ask` is false."""
        ...

    def estimate(self, history: History) -> Mapping[int, float]:
        """Estimates of the results of unfinished trials, for the sampler."""
        ...


def as_far_behind(history: History) -> dict[int, float]:
    """Estimates of the results of unfinished trials, for the sampler.

    A trial is taken to end as far behind the best trial as it is, at its last report, behind the best trial after as
    many reports. Best means the best value so far.
    """
    if history.best is None or history.best.value is None:
        return {}
    leaders: list[float] = []
    reached: dict[int, float] = {}
    for number, trial in history.trials.items():
        values = list(accumulate((history.sign * value for _, value in trial.reports), min))
        common = [min(pair) for pair in zip(leaders, values, strict=False)]
        leaders = [*common, *(leaders[len(common) :] or values[len(common) :])]
        reached |= {number: values[-1]} if values else {}
    best = history.best.value
    return {
        number: best + history.sign * (reached[number] - leaders[len(trial.reports) - 1])
        for number, trial in (history.paused | history.running).items()
        if number in reached
    }
