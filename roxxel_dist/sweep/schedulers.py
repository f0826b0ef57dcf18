"""The schedulers, which say what trials get the next steps: W&B's hyperband stops trials; asha pauses them and lets
them go on.

A scheduler keeps nothing that is not in the history: a new one, shown the same trials, decides the same. An iteration
is a report, counted from 1. Hyperband stops running trials as W&B's server does since 2023: at some iterations (bands)
a trial must be among the best `1/eta` of all that came so far, those that have ended included; judged by its best value
up to now. ASHA (Li et al. 2020, arXiv 1810.05934) pauses them: a trial that reaches a rung, which is one of the bands,
pauses there unless it is among the best `1/eta` of all that came so far. A free worker continues the best paused trial
of the highest rung that has one among its best `1/eta`, or else a new trial. Where no new ones come any more, the best
of each rung goes on in any case, so one trial at least reaches its end.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.journal import History, Trial

PAUSING = ("asha",)
"""Schedulers that pause trials: W&B's server does not know them, and a program must be able to go on."""
ETA = 3
MAX_BANDS = 100
FAR = 1_000_000_000
"""Reports: no trial has so many."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision that a running trial ends, or pauses at a checkpoint."""

    kind: Literal["stop", "pause"]
    reason: str


def bands(rule: Mapping[str, Any]) -> list[int]:
    """The iterations at which trials are judged, in order, for W&B's `early_terminate`: `min_iter` and `eta` (from it
    on, each `eta` times the one before), or `max_iter`, `s` and `eta` (`s` of them, from `max_iter / eta` down).

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
        while len(levels) < MAX_BANDS and levels[-1] <= FAR:
            levels.append(levels[-1] * eta)
    iterations = [int(level) for level in levels if level >= 1]
    if not iterations:
        raise UserError("early_terminate: no iteration is left to judge trials at: raise max_iter or s, or lower eta")
    return [band for band in iterations if band <= FAR]


@dataclass(kw_only=True)
class _Curve:
    """The reports of a trial, less being better."""

    count: int = 0
    best: float = math.inf
    at: dict[int, float] = field(default_factory=dict)
    """The value at each band that it has reached, in order."""


class _Scheduler:
    """The decisions of a study.

    `rule` is `early_terminate`: `min_iter` and `eta`, or `max_iter`, `s` and `eta`; with `strict` a trial counts by its
    value at a band or rung, else by its best one up to there (of hyperband, up to now). A value times `sign` is better
    if it is less.
    """

    def __init__(self, rule: Mapping[str, Any], sign: float) -> None:
        self._eta, self._is_strict, self._sign = rule.get("eta", ETA), bool(rule.get("strict")), sign
        self._bands: list[int] = sorted(set(bands(rule)))


class Hyperband(_Scheduler):
    """Hyperband as W&B's server has it."""

    name = "hyperband"

    def __init__(self, rule: Mapping[str, Any], sign: float) -> None:
        super().__init__(rule, sign)
        self._values: dict[int, list[float]] = {band: [] for band in self._bands}
        """The values of all trials at each band, sorted."""
        self._curves: dict[int, _Curve] = {}

    def note(self, history: History, trial: int, step: int) -> None:
        """Note that a trial has reported for a step, or that the journal has a trial with reports up to it."""
        reports, curve = history.trials[trial].reports, self._curves.setdefault(trial, _Curve())
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

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """The running trials that are to stop."""
        verdicts = {}
        for number, other in history.running.items():
            curve = self._curves.get(number)
            if other.stop is not None or curve is None or not curve.at:
                continue
            band = next(reversed(curve.at))
            limit = self._values[band][math.floor(1.0 / self._eta * len(self._values[band]))]
            if (value := curve.at[band] if self._is_strict else curve.best) > limit:
                reason = (
                    f"{self._sign * value:.6g} after {curve.count} reports; the best 1/{self._eta:g} of the trials had "
                    f"{self._sign * limit:.6g} or better at report {band}"
                )
                verdicts[number] = Verdict(kind="stop", reason=reason)
        return verdicts

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """The paused trial that goes on now, with the reason: one that others paused goes on before there are new ones.
        None: a new one, or none where `can_ask` is false."""
        return next(((number, "it was paused") for number in history.paused), None)

    def estimate(self, history: History) -> dict[int, float]:
        """Nothing: a trial that runs will have a value."""
        return {}


class Asha(_Scheduler):
    """Asynchronous successive halving: its rungs are the bands."""

    name = "asha"

    def __init__(self, rule: Mapping[str, Any], sign: float) -> None:
        super().__init__(rule, sign)
        self._values: list[dict[int, float]] = [{} for _ in self._bands]
        """The value of each trial at each rung that it has reached; less is better."""

    def note(self, history: History, trial: int, step: int) -> None:
        """Note that a trial has reported."""
        values = [self._sign * value for _, value in history.trials[trial].reports]
        for rung, at in zip(self._bands[: self._level(history.trials[trial])], self._values, strict=False):
            at[trial] = values[rung - 1] if self._is_strict else min(values[:rung])

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """The pause of a trial that has come to a rung, and is not good enough there."""
        reported = history.trials[trial]
        count, level = len(reported.reports), self._level(reported)
        is_at_rung = level > 0 and count == self._bands[level - 1]
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
        """Estimates of the results of unfinished trials, for the sampler: each is taken to end as far behind the best
        trial as it is, at its last report, behind the best trial after as many reports. Best means the best value so
        far."""
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

    def _level(self, trial: Trial) -> int:
        """The number of rungs that a trial has reached."""
        return bisect_right(self._bands, len(trial.reports))

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
        return f"{rank} of {len(at)} at report {self._bands[level - 1]}, of which the best 1/{self._eta:g} go on"


Scheduler = Hyperband | Asha
"""A scheduler notes each report (`note`) and then judges the running trials (`judge`); it chooses the paused trial that
goes on where a worker is free (`choose`), and estimates the results of unfinished ones for the sampler (`estimate`)."""


def make_scheduler(sweep: Sweep) -> Scheduler | None:
    """The scheduler of a sweep; None where every trial runs to its end. Raises ValueError for a rule that cannot be."""
    rule = sweep.early_terminate
    return None if rule is None else (Asha if rule["type"] == "asha" else Hyperband)(rule, sweep.sign)
