"""Hyperband: which running trials are to be stopped early, as W&B's server decides it since 2023.

An iteration is a report, counted from 1. At some iterations (bands) a trial must be among the best `1/eta` of all
that came so far, those that have ended included; it is judged by its best value up to now.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.schedulers.base import Verdict
from roxxel_dist.sweep.study.journal import History

ETA = 3
MAX_BANDS = 100
FAR = 1_000_000_000
"""Reports: no trial has so many."""


def bands(rule: Mapping[str, Any], longest: float = FAR) -> list[int]:
    """The iterations at which trials are judged, in order, up to that of the longest trial.

    Args:
        rule: W&B's `early_terminate`: `min_iter` and `eta` (from it on, each `eta` times the one before), or
            `max_iter`, `s` and `eta` (`s` of them, from `max_iter / eta` down).
        longest: how many reports the longest trial has.

    Raises ValueError where the rule leaves no band.
    """
    eta = rule.get("eta", ETA)
    if not eta > 1:
        raise UserError(f"early_terminate.eta: {eta} must be more than 1")
    if "max_iter" in rule:
        levels, level = [], rule["max_iter"]
        for _ in range(min(int(rule["s"]), MAX_BANDS)):
            level /= eta
            levels.insert(0, level)
    else:
        levels = [rule["min_iter"]]
        while len(levels) < MAX_BANDS and levels[-1] <= longest:
            levels.append(levels[-1] * eta)
    iterations = [int(level) for level in levels if level >= 1]
    if not iterations:
        raise UserError("early_terminate: no iteration is left to judge trials at: raise max_iter or s, or lower eta")
    return [band for band in iterations if band <= longest]


@dataclass(kw_only=True)
class _Curve:
    """The reports of a trial, less being better."""

    count: int = 0
    best: float = math.inf
    at: dict[int, float] = field(default_factory=dict)
    """The value at each band that it has reached, in order."""


class Hyperband:
    """The decisions of a study.

    Args:
        rule: W&B's `early_terminate`. With `strict`, a trial is judged by its value at the last band that it reached.
        sign: what a value is multiplied by so that less is better.
    """

    name = "hyperband"

    def __init__(self, rule: Mapping[str, Any], sign: float) -> None:
        self._eta, self._is_strict, self._sign = rule.get("eta", ETA), rule.get("strict"), sign
        self._values: dict[int, list[float]] = {band: [] for band in bands(rule)}
        """The values of all trials at each band, sorted."""
        self._curves: dict[int, _Curve] = {}

    def note(self, history: History, trial: int, step: int) -> None:
        """Note that a trial has reported for a step."""
        self.report(trial, history.trials[trial].reports, step)

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """The running trials that are to stop."""
        running = [number for number, other in history.running.items() if other.stop is None]
        return {number: Verdict(kind="stop", reason=why) for number, why in self.trials_to_stop(running).items()}

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """A trial that was paused for a reason of others goes on before there are new ones."""
        return next(((number, "it was paused") for number in history.paused), None)

    def estimate(self, history: History) -> dict[int, float]:
        """Nothing: a trial that runs will have a value."""
        return {}

    def report(self, trial: int, reports: Sequence[tuple[int, float]], step: int) -> None:
        """Note that a trial has reported for a step; `reports` are all of its own, by step."""
        curve = self._curves.setdefault(trial, _Curve())
        if len(reports) <= curve.count or reports[-1][0] != step:  # a trial that is run again, with other values
            for band, value in curve.at.items():
                del self._values[band][bisect_left(self._values[band], value)]
            curve = self._curves[trial] = _Curve()
        for _, value in reports[curve.count :]:
            curve.count += 1
            curve.best = min(curve.best, self._sign * value)
            if curve.count in self._values:
                curve.at[curve.count] = self._sign * value
                insort(self._values[curve.count], self._sign * value)

    def trials_to_stop(self, running: Iterable[int]) -> dict[int, str]:
        """Those of the running trials that should be stopped, each with the reason."""
        reasons = {}
        for trial in running:
            curve = self._curves.get(trial, _Curve())
            band = next(reversed(curve.at), None)
            if band is None:
                continue
            values = self._values[band]
            limit = values[math.floor(1.0 / self._eta * len(values))]
            value = curve.at[band] if self._is_strict else curve.best
            if value > limit:
                reasons[trial] = (
                    f"{self._sign * value:.6g} after {curve.count} reports; the best 1/{self._eta:g} of the trials had "
                    f"{self._sign * limit:.6g} or better at report {band}"
                )
        return reasons
