"""Freeze-thaw: the next slice goes to the trial, old or new, whose reports are expected to win the most per report.

After Swersky, Snoek, Adams 2014 (arXiv 1406.3896). Trials pause at rungs of 1, 3, 9, … reports. The model has two
parts, each solved in closed form.

*Curves*: how the best value at a rung follows from that at the rung before is a regression over all trials. Chained to
the last rung, these regressions give the value that a trial would end with, and its variance.

*Parameters*: a Gaussian process over the parameters takes these ends as measurements of known noise. It has for every
trial, new ones too, the expected end and its variance.

A slice is worth what its reports may change (the knowledge gradient, Frazier, Powell, Dayanik 2008): by how much the
trial's expected end may fall below that of the leader, the trial with the lowest one. The leader itself is worth what
may bring another trial to the front, or what its own end may win over the best value so far. With a budget of steps,
the leader runs to its end once all workers would spend the rest of the budget until then.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import ndtr
from threadpoolctl import threadpool_limits

from roxxel_dist.sweep.journal import History, Trial
from roxxel_dist.sweep.samplers.acquisition import OUTLIER, training_subset
from roxxel_dist.sweep.samplers.bayes import SpaceTransform
from roxxel_dist.sweep.samplers.gp import JITTER, fit_hyperparameters, prior_covariance
from roxxel_dist.sweep.schedulers.base import Verdict, as_far_behind, by_value
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Sweep

ETA = 3
"""Each rung has so many times the reports of the one before."""
FIRST = 5
"""Trials that report once before anything is compared."""
CANDIDATES, NEIGHBOURS = 200, 20
"""New configurations anywhere, and near each of the best, of which the most promising stands for a new trial."""
FIT_TO = 60
PRIOR = 2.0
"""Trials that the prior of a regression counts for."""
USUAL_ERROR, LEAST_CHANGE = 0.3, 0.3
"""Of a regression before any trial is known at its rung: its error as a share of the change from rung to rung, which is
taken for at least so many deviations of the first reports."""
KEPT_CHANGE = 0.7
"""Share of the last change that the next one is before any trial is known there."""
HUGE = 1e100
"""A value beyond it counts as that: the square of a larger one would be endless."""
UNLIKELY = 0.02
"""Where no new trials come any more, a paused one goes on if it is as likely as that to end as the best."""
STAYS = 1.1
"""A trial that runs keeps its worker unless another is expected to win so many times as much: to start costs too."""
RESERVE = 2 / 3
"""The share of the budget of steps that is kept for the leader until a trial has ended."""
LAST = "the rest of the budget is kept for the trial that leads"


class FreezeThaw:
    """The decisions of a study.

    Args:
        rule: `early_terminate`, which has nothing but its type.
        sweep: what is searched.
        seed: of the search.
        max_steps: the budget of steps of all trials together.
    """

    name = "freeze_thaw"

    def __init__(self, rule: Mapping[str, Any], sweep: Sweep, seed: int, max_steps: float = math.inf) -> None:
        self._sweep, self._transform, self._seed, self._max_steps = sweep, SpaceTransform(sweep), seed, max_steps
        self._known: tuple[Any, _Model] | None = None

    def note(self, history: History, trial: int, step: int) -> None:
        """Nothing is kept: the history has all."""

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """A trial at a rung pauses where another one, old or new, is expected to win more."""
        reported = history.trials[trial]
        count = len(reported.reports)
        if reported.state != "running" or reported.stop or not _is_rung(count) or not self._transform.dims:
            return {}
        model = self._model(history)
        if model.is_length_known and count >= model.length:
            return {}  # it is about to end
        if len(model.index) < FIRST:
            return {trial: Verdict(kind="pause", reason=f"fewer than {FIRST} trials have reported")}
        own, others = model.gain_of(trial), {number: model.gain_of(number) for number in history.paused}
        best = max(others, key=others.__getitem__, default=None)
        most = model.new if best is None else max(model.new, others[best])
        if own * STAYS >= most:
            return {}
        if model.is_last_chance:
            return {trial: Verdict(kind="pause", reason=LAST)} if math.isinf(most) else {}
        what = "a new trial" if best is None or model.new >= others[best] else f"trial {best}"
        return {
            trial: Verdict(kind="pause", reason=f"{what} is expected to win more: {most:.3g} a report, this {own:.3g}")
        }

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """The trial that is expected to win the most a report."""
        paused = by_value(history)
        if not paused:
            return None if can_ask else (min(history.paused), "it has not reported yet")
        if not self._transform.dims:
            return min(history.paused), "there is one configuration alone"
        model = self._model(history)
        if can_ask and len(model.index) < FIRST:
            return None
        # The last ones go on only where they may still become the best; one trial at least reaches its end.
        are_all_able = can_ask or not model.is_length_known
        able = [number for number in paused if are_all_able or model.chance(number) >= UNLIKELY]
        gains = {number: model.gain_of(number) for number in able}
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or (can_ask and model.new > gains[best]):
            return None
        if math.isinf(gains[best]):
            return best, LAST
        return best, f"expected to win {gains[best]:.3g} a report, a new trial {model.new:.3g}"

    def estimate(self, history: History) -> dict[int, float]:
        """The expected ends of trials that run or are paused."""
        reported = any(trial.reports for trial in history.trials.values() if trial.state != "failed")
        if not reported or not self._transform.dims:
            return as_far_behind(history)
        model = self._model(history)
        known = [number for number in history.paused | history.running if number in model.index]
        return {number: history.sign * model.end_of(number) for number in known}

    def _model(self, history: History) -> "_Model":
        """Of the reports and ends so far; several questions in a row are about the same ones."""
        ends = [history.count(state) for state in ("done", "stopped", "failed")]
        key = history.steps, sum(len(trial.reports) for trial in history.trials.values()), *ends, len(history.trials)
        if self._known is None or self._known[0] != key:
            with threadpool_limits(1, user_api="blas"):
                self._known = key, _Model(self._transform, history, self._sweep, self._seed, self._max_steps)
        return self._known[1]


def _is_rung(count: int) -> bool:
    """Whether a trial of so many reports is at one."""
    while count % ETA == 0:
        count //= ETA
    return count == 1


def rungs_to(length: int) -> list[int]:
    """The numbers of reports of all rungs; the last one is the whole curve."""
    rungs = [1]
    while rungs[-1] * ETA < length:
        rungs.append(rungs[-1] * ETA)
    return [*rungs, length] if length > 1 else rungs


class Curves:
    """The best values at the rungs, less being better, as far as they are known.

    Args:
        values: float64[n, rungs]; NaN after the last rung that a trial has reached, which is the first one at least.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.levels: np.ndarray = np.isfinite(values).sum(1)
        """Rungs that each trial has reached."""
        self._steps: list[tuple[float, float, float]] = []
        """Of each rung but the first: value = start + slope x the value at the rung before, and its variance."""
        change, scale = 0.0, max(float(np.nanstd(values[:, 0])), 1e-12)
        for at in range(1, values.shape[1]):
            those = values[self.levels > at]
            change = self._fit(those[:, at - 1], those[:, at], KEPT_CHANGE * change, scale, change)

    def _fit(self, before: np.ndarray, after: np.ndarray, expected: float, scale: float, last: float) -> float:
        """Note how a rung follows from the one before; returns the mean change."""
        centre = before.mean() if len(before) else 0.0
        x, changes = before - centre, after - before
        left = np.array([[len(x) + 0.01, x.sum()], [x.sum(), (x**2).sum() + 0.1 * PRIOR * scale**2]])
        start, slope = np.linalg.solve(left, np.array([changes.sum() + 0.01 * expected, (x * changes).sum()]))
        usual = USUAL_ERROR**2 * max(last**2, (LEAST_CHANGE * scale) ** 2)
        errors = changes - start - slope * x
        noise = ((errors**2).sum() + PRIOR * usual) / (max(len(x) - 1, 0) + PRIOR)
        self._steps.append((float(start - slope * centre), float(1 + slope), float(noise)))
        return float(changes.mean()) if len(x) else expected

    def variances(self) -> np.ndarray:
        """float64[rungs + 1]: of the end, for a trial that has reached so many rungs; of none, endless."""
        count, factor = self.values.shape[1], 1.0
        variances = np.zeros(count + 1)
        variances[0] = np.inf
        for at in range(count - 1, 0, -1):
            _, slope, noise = self._steps[at - 1]
            variances[at] = variances[at + 1] + factor**2 * noise
            factor *= slope
        return variances

    def ends(self) -> np.ndarray:
        """float64[n]: the expected value of each trial at the last rung."""
        last = self.values[np.arange(len(self.values)), self.levels - 1].copy()
        for at, (start, slope, _) in enumerate(self._steps, 1):
            last = np.where(self.levels <= at, start + slope * last, last)
        return last


class _Model:
    """What is expected of every trial, and of new ones; all in values that are less being better.

    Attributes:
        index: rows of the trials that have reported and not failed.
        length: reports of a whole curve; of the longest one, times ETA, where none has ended.
        is_length_known: whether a trial has ended.
        is_last_chance: whether the rest of the budget is kept for the leader's end.
        new: what a report of a new trial is expected to win.
    """

    def __init__(self, transform: SpaceTransform, history: History, sweep: Sweep, seed: int, max_steps: float) -> None:
        known = sorted(number for number, trial in history.trials.items() if trial.reports and trial.state != "failed")
        self.index: dict[int, int] = {number: row for row, number in enumerate(known)}
        trials = [history.trials[number] for number in known]
        values = [[history.sign * max(min(value, HUGE), -HUGE) for _, value in trial.reports] for trial in trials]
        bests = [list(accumulate(each, min)) for each in values]
        done = [len(trial.reports) for trial in trials if trial.state == "done"]
        longest = max(map(len, bests))
        self.is_length_known: bool = bool(done)
        self.length: int = max(longest, *done) if done else longest * ETA
        self._rungs = rungs_to(self.length)
        self._counts = [len(best) for best in bests]
        self._best = min(best[-1] for best in bests)
        by_rung = np.full((len(trials), len(self._rungs)), np.nan)
        for row, best in zip(by_rung, bests, strict=True):
            reached = [best[rung - 1] for rung in self._rungs if rung <= len(best)]
            row[: len(reached)] = reached
        middle, least = np.median(by_rung[:, 0]), by_rung[:, 0].min()
        curves = Curves(np.minimum(by_rung, middle + (middle - least)))  # a loss that diverged says no more than that
        self._levels, self._variances = curves.levels, curves.variances()
        self._ended = np.array([trial.state in ("done", "stopped") for trial in trials])
        ends = np.where(self._ended, np.nanmin(curves.values, 1), curves.ends())
        noise = np.where(self._ended, 0.0, self._variances[curves.levels])
        self._condition(transform, trials, ends, noise, sweep, np.random.default_rng([seed, len(history.trials)]))
        steps_per_report = history.steps / sum(self._counts)
        to_end = (self.length - self._counts[self._leader]) * max(len(history.running), 1) * steps_per_report
        reserve = to_end if done else RESERVE * max_steps
        self.is_last_chance = math.isfinite(max_steps) and max_steps - history.steps <= reserve

    def _condition(
        self,
        transform: SpaceTransform,
        trials: Sequence[Trial],
        ends: np.ndarray,
        noise: np.ndarray,
        sweep: Sweep,
        rng: np.random.Generator,
    ) -> None:
        """Give the process over the parameters the ends as measurements, each of its own noise."""
        median, least = np.median(ends), ends.min()
        limit = median + OUTLIER * (median - least) if median > least else np.inf
        clipped = np.minimum(ends, limit)
        mean, scale = clipped.mean(), max(clipped.std(), 1e-12)
        targets, noise = (clipped - mean) / scale, noise / scale**2
        rows = transform.rows([tuple(trial.point) for trial in trials])
        features = transform.encode(rows)
        subset = training_subset(targets, FIT_TO)
        theta = fit_hyperparameters(features[subset], targets[subset])
        own = np.exp(theta[-2])  # what the parameters do not explain of an end
        prior = prior_covariance(theta, features, features) + own * np.eye(len(targets))
        factor = cho_factor(prior + np.diag(noise + JITTER), lower=True)
        weights = cho_solve(factor, targets)
        half = solve_triangular(factor[0], prior, lower=True)
        self._mean = mean + scale * (prior @ weights)
        self._variance = scale**2 * np.maximum(np.diag(prior) - (half**2).sum(0), 1e-12)
        order = np.argsort(self._mean, kind="stable")
        self._leader, self._first = int(order[0]), float(self._mean[order[0]])
        self._second = float(self._mean[order[min(1, len(order) - 1)]])

        fresh_rows = [transform.from_cube(rng.random((CANDIDATES, transform.dims)))]
        for times, reach in ((1, 0.1), (2, 0.2)):
            fresh_rows.append(transform.mutate(np.repeat(rows[order[:5]], NEIGHBOURS, 0), rng, times, reach))
        candidates = np.concatenate(fresh_rows)
        fresh = transform.encode(candidates)
        across = prior_covariance(theta, fresh, features)
        half = solve_triangular(factor[0], across.T, lower=True)
        before = np.diag(prior_covariance(theta, fresh, fresh)) + own
        variances = scale**2 * np.maximum(before - (half**2).sum(0), 1e-12)
        means = mean + scale * (across @ weights)
        gains = _expected_improvement(self._first - means, variances / np.sqrt(variances + self._variances[1]))
        seen = set(map(tuple, rows.tolist()))
        self.new: float = 0.0
        for index in np.argsort(-gains, kind="stable"):
            if tuple(candidates[index].tolist()) not in seen:
                with suppress(InfeasibleError):
                    sweep.rules.resolve(sweep.space.point(transform.point(candidates[index])))
                    self.new = float(gains[index])
                    break

    def end_of(self, number: int) -> float:
        """The expected end of a trial."""
        return float(self._mean[self.index[number]])

    def chance(self, number: int) -> float:
        """The probability that a trial ends below the best value."""
        row = self.index[number]
        return float(ndtr((self._best - self._mean[row]) / math.sqrt(self._variance[row])))

    def gain_of(self, number: int) -> float:
        """What a report of a trial is expected to win: the most by any plan to train it to a later rung."""
        row = self.index.get(number)
        if row is None or self._ended[row]:
            return 0.0
        level, count = int(self._levels[row]), self._counts[row]
        mean, variance = float(self._mean[row]), float(self._variance[row])
        # The variance without the own reports of the trial: its next report replaces them, with less noise.
        without = 1.0 / max(1.0 / variance - 1.0 / max(self._variances[level], 1e-12), 1e-12)
        leads = row == self._leader
        if leads and self.is_last_chance:
            return math.inf
        ahead = mean - self._second if leads else self._first - mean
        gains = [0.0]
        for rung, after in zip(self._rungs[level:], self._variances[level + 1 :], strict=True):
            sure = 0.0 if after <= 0 else 1.0 / (1.0 / without + 1.0 / after)
            deviation = math.sqrt(max(variance - sure, 1e-18))
            gains.append(float(_expected_improvement(ahead, deviation)) / (rung - count))
        if leads:
            won = float(_expected_improvement(self._best - mean, math.sqrt(variance)))
            gains.append(won / max(self.length - count, 1))
        return max(gains)


def _expected_improvement(ahead: Any, deviation: Any) -> Any:
    """Of normal values around `ahead`, the expected part above 0: arrays or numbers."""
    z = ahead / deviation
    return np.maximum(ahead * ndtr(z) + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi), 0.0)
