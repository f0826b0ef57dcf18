"""ASHA (Li et al. 2020, arXiv 1810.05934): trials pause at rungs, and the best of each rung go on to the next.

Rungs are numbers of reports, as hyperband's bands. A trial that reaches one pauses there, unless it is among the best
`1/eta` of all that came so far. A worker that is free continues the best paused trial of the highest rung that has one
among its best `1/eta`, or else a new trial. Where no new ones come any more, the best of each rung goes on in any case,
so one trial at least reaches its end.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from roxxel_dist.sweep.schedulers.base import Verdict, as_far_behind
from roxxel_dist.sweep.schedulers.hyperband import ETA, bands
from roxxel_dist.sweep.study.journal import History, Trial


class Asha:
    """The decisions of a study.

    Args:
        rule: `early_terminate`: `min_iter` and `eta`, or `max_iter`, `s` and `eta`, as those of hyperband; with
            `strict` a trial counts by its value at a rung, else by its best one up to there.
        sign: what a value is multiplied by so that less is better.
    """

    name = "asha"

    def __init__(self, rule: Mapping[str, Any], sign: float) -> None:
        self._eta, self._is_strict, self._sign = rule.get("eta", ETA), bool(rule.get("strict")), sign
        self._rungs = sorted(set(bands(rule)))
        self._values: list[dict[int, float]] = [{} for _ in self._rungs]
        """The value of each trial at each rung that it has reached; less is better."""

    def note(self, history: History, trial: int, step: int) -> None:
        """Note that a trial has reported."""
        values = [self._sign * value for _, value in history.trials[trial].reports]
        for rung, at in zip(self._rungs[: self._level(history.trials[trial])], self._values, strict=False):
            at[trial] = values[rung - 1] if self._is_strict else min(values[:rung])

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """A trial that has come to a rung, and is not good enough there, pauses."""
        reported = history.trials[trial]
        count, level = len(reported.reports), self._level(reported)
        is_at_rung = level > 0 and count == self._rungs[level - 1]
        if reported.state != "running" or reported.stop or not is_at_rung or trial in self._best(history, level):
            return {}
        return {trial: Verdict(kind="pause", reason=self._place(history, trial, level))}

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """The best paused trial of the highest rung that lets one go on."""
        waiting: dict[int, list[int]] = {}
        for number, trial in history.paused.items():
            waiting.setdefault(self._level(trial), []).append(number)
        for level in sorted(waiting, reverse=True):
            if level == 0:  # paused for a reason of others
                return min(waiting[0]), "it was paused before its first rung"
            best = self._best(history, level, least=0 if can_ask else 1)
            if those := [number for number in waiting[level] if number in best]:
                number = min(those, key=lambda number: (self._values[level - 1][number], number))
                return number, self._place(history, number, level)
        return None

    def estimate(self, history: History) -> dict[int, float]:
        """Each is as far behind the best trial as it was at its last report behind the best one there."""
        return as_far_behind(history)

    def _level(self, trial: Trial) -> int:
        """How many rungs a trial has reached."""
        return bisect_right(self._rungs, len(trial.reports))

    def _values_at(self, history: History, level: int) -> dict[int, float]:
        """The values at a rung, of the trials that have reached it and have not failed: a failed one never goes on."""
        values = self._values[level - 1]
        return {number: value for number, value in values.items() if history.trials[number].state != "failed"}

    def _best(self, history: History, level: int, least: int = 0) -> set[int]:
        """The best `1/eta` of all trials that have reached a rung and have not failed."""
        at = self._values_at(history, level)
        count = max(least, math.floor(len(at) / self._eta))
        return set(sorted(at, key=lambda number: (at[number], number))[:count])

    def _place(self, history: History, number: int, level: int) -> str:
        at = self._values_at(history, level)
        rank = sorted(at.values()).index(at[number]) + 1
        return f"{rank} of {len(at)} at report {self._rungs[level - 1]}, of which the best 1/{self._eta:g} go on"
