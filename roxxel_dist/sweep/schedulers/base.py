"""What a scheduler is: it says after a report who stops or pauses, and who goes on where a worker is free.

A scheduler keeps nothing that the history does not say: made anew, and shown the same trials, it decides the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from roxxel_dist.sweep.journal import History


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """That a running trial is to end, or to pause at a checkpoint."""

    kind: Literal["stop", "pause"]
    reason: str


class Scheduler(Protocol):
    """Decides who gets the next steps."""

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
        """What trials without an end are taken to give, for whoever proposes parameters."""
        ...

    def rank(self, history: History) -> list[int]:
        """The paused trials that have reported, the least promising first."""
        ...


def shifted(history: History, best: Mapping[int, float], level: Mapping[int, int]) -> dict[int, float]:
    """Estimates of trials without an end: each is as far behind the best trial as behind the best one at its level.

    Args:
        history: of the study.
        best: the best value of each trial up to its level, less being better.
        level: how far each has come, in any unit.
    """
    sign = history.sign
    leaders: dict[int, float] = {}
    for trial, value in best.items():
        leaders[level[trial]] = min(value, leaders.get(level[trial], value))
    leader = min((sign * trial.value for trial in history.trials.values() if trial.value is not None), default=None)
    if leader is None:
        return {}
    unended = [*history.paused, *history.running]
    return {trial: sign * (best[trial] - leaders[level[trial]] + leader) for trial in unended if trial in best}


def by_value(history: History) -> list[int]:
    """The paused trials that have reported, those with the worst value first."""
    value = {number: history.sign * trial.value for number, trial in history.paused.items() if trial.value is not None}
    return sorted(value, key=lambda number: (-value[number], -number))
