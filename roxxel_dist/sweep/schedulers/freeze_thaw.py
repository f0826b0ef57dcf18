"""Freeze-thaw: the next slice goes to the trial, old or new, that is expected to win the most per step.

After Swersky, Snoek, Adams 2014 (arXiv 1406.3896), with a model of two parts that are each solved in closed form.

*Curves*: how a report follows from the two before it is a regression over all trials, a step of the curve at a time.
Trials were paused for what they had reported until then, so those that went on tell the truth about the others. Chained
to the end of the longest trial these regressions give what a trial would end with, and how sure that is.

*Parameters*: a Gaussian process over the parameters, given these ends as measurements of known noise, has for every
trial, new ones too, the end that is expected of it and its deviation.

A trial is worth what the next reports may show: after `h` of them its expected end moves by a known amount. Where it
moves below the best value the trial is trained to its end, else it is left. What is won that way, over the steps that
it takes, is largest for the trial that gets the next slice.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import ndtr
from threadpoolctl import threadpool_limits

from roxxel_dist.sweep.journal import History
from roxxel_dist.sweep.samplers.acquisition import OUTLIER, training_subset
from roxxel_dist.sweep.samplers.base import Point
from roxxel_dist.sweep.samplers.bayes import SpaceTransform
from roxxel_dist.sweep.samplers.gp import JITTER, fit_hyperparameters, prior_covariance
from roxxel_dist.sweep.schedulers.base import Verdict, as_far_behind, by_value
from roxxel_dist.sweep.space.sweep_file import Sweep

FIRST_SLICE = 3
"""Reports of a new trial before the first one has ended, and nobody knows how long a curve is."""
HORIZONS = (1, 2, 3, 5, 8, 13)
FRESH = 8
"""New configurations, at random, of which the most promising stands for what a new trial is worth."""
FIT_TO = 60
PRIOR = 2.0
"""Reports that the prior of a regression counts for: a curve goes on as flat as it has become."""
USUAL_ERROR = 0.3
"""Of a regression before any curve is known, as a share of the usual change."""
NEAR = 0.5
"""How far, in reports, a step of a curve learns from the steps beside it: the width of a bell."""
SAME_WAY = 0.7
"""Deviations of following reports add up, times this: 1 where all err in the same direction."""
BEGUN = 0.7
"""Share of a change that the next one is before any curve is known."""
UNLIKELY = 0.02
"""Where no new trials come any more, a paused one goes on if it is as likely as that to end as the best."""
STAYS = 1.1
"""A trial that runs keeps its worker unless another is expected to win so many times as much: to start costs too."""


class FreezeThaw:
    """The decisions of a study.

    Args:
        rule: `early_terminate`, which has nothing but its type.
        sweep: what is searched.
        seed: of the search.
    """

    name = "freeze_thaw"

    def __init__(self, rule: Mapping[str, Any], sweep: Sweep, seed: int) -> None:
        self._transform, self._seed = SpaceTransform(sweep), seed
        self._known: tuple[Any, _Model] | None = None

    def note(self, history: History, trial: int, step: int) -> None:
        """Nothing is kept: the history has all."""

    def judge(self, history: History, trial: int) -> dict[int, Verdict]:
        """A trial pauses where another one, old or new, is expected to win more."""
        reported = history.trials[trial]
        if reported.state != "running" or reported.stop:
            return {}
        if not _ended(history):
            pilot = min(number for number, each in history.trials.items() if each.state in ("running", "paused"))
            if trial == pilot or len(reported.reports) < FIRST_SLICE:
                return {}
            return {trial: Verdict(kind="pause", reason="no curve is known to its end yet")}
        model = self._model(history)
        if len(reported.reports) >= model.length:
            return {}  # it is about to end
        own, others = model.gain_of(trial), {number: model.gain_of(number) for number in history.paused}
        best = max(others, key=others.__getitem__, default=None)
        new = model.new
        if own * STAYS >= max(new, 0.0 if best is None else others[best]):
            return {}
        what = "a new trial" if best is None or new >= others[best] else f"trial {best}"
        most = new if best is None else max(new, others[best])
        why = f"{what} is expected to win more: {most:.3g} a report, this one {own:.3g}"
        return {trial: Verdict(kind="pause", reason=why)}

    def choose(self, history: History, *, can_ask: bool) -> tuple[int, str] | None:
        """The trial that is expected to win the most a step."""
        if not _ended(history):
            return None if can_ask else (min(history.paused), "no curve is known to its end yet")
        model = self._model(history)
        gains = {number: model.gain_of(number) for number in history.paused}
        best = max(gains, key=gains.__getitem__)
        if can_ask and model.new > gains[best]:
            return None
        if not can_ask and model.chance(best) < UNLIKELY:
            return None
        return best, f"expected to win {gains[best]:.3g} a report, a new trial {model.new:.3g}"

    def estimate(self, history: History) -> dict[int, float]:
        """Each is as far behind the best trial as it was at its last report behind the best one there."""
        return as_far_behind(history)

    def rank(self, history: History) -> list[int]:
        """The paused trials, those that are expected to win the least first."""
        if not _ended(history):
            return by_value(history)
        model = self._model(history)
        return sorted(by_value(history), key=lambda number: (model.gain_of(number), -number))

    def _model(self, history: History) -> "_Model":
        """Of the reports and ends so far; several questions in a row are about the same ones."""
        ends = [history.count(state) for state in ("done", "stopped", "failed")]
        key = history.steps, sum(len(trial.reports) for trial in history.trials.values()), *ends, len(history.trials)
        if self._known is None or self._known[0] != key:
            with threadpool_limits(1, user_api="blas"):
                self._known = key, _Model(self._transform, history, self._seed)
        return self._known[1]


def _ended(history: History) -> bool:
    """Whether the length of a curve is known."""
    return history.count("done") > 0


class Curves:
    """Learning curves of one length, less being better, as far as they are known.

    Args:
        values: float64[n, length]; NaN after the last report.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.length: int = values.shape[1]
        self.counts: np.ndarray = np.isfinite(values).sum(1)
        self._steps = [self._fit(at) for at in range(1, self.length)]

    def _fit(self, at: int) -> tuple[np.ndarray, float]:
        """What report `at` + 1 is, less report `at`: coefficients of (1, value, last change), and their noise."""
        rows, targets, weights = [np.empty((0, 3))], [np.empty(0)], [np.empty(0)]
        for step in range(max(1, at - 2), min(self.length, at + 3)):
            those = self.values[self.counts > step]
            before = those[:, step - 1] - those[:, step - 2] if step > 1 else np.zeros(len(those))
            rows.append(np.stack([np.ones(len(those)), those[:, step - 1], before], 1))
            targets.append(those[:, step] - those[:, step - 1])
            weights.append(np.full(len(those), math.exp(-0.5 * ((step - at) / NEAR) ** 2)))
        x, y, w = np.concatenate(rows), np.concatenate(targets), np.concatenate(weights)
        scale = max(float(np.nanstd(self.values[:, 0])), float(np.nanstd(self.values)), 1e-12)
        centre = np.average(x[:, 1], weights=w) if w.sum() > 0 else 0.0
        x[:, 1] -= centre
        prior = np.array([0.0, 0.0, BEGUN if at > 1 else 0.0])
        strength = np.array([0.01, PRIOR * scale**2, PRIOR * (0.1 * scale) ** 2])
        left = (x * w[:, None]).T @ x + np.diag(strength)
        coefficients = np.linalg.solve(left, (x * w[:, None]).T @ y + strength * prior)
        errors = y - x @ coefficients
        usual = (w @ y**2) / max(w.sum(), 1e-12)  # of the change itself
        noise = (w @ errors**2 + PRIOR * USUAL_ERROR**2 * usual) / (max(w.sum() - 2.0, 0.0) + PRIOR)
        coefficients[0] -= coefficients[1] * centre
        return coefficients, float(noise)

    @cached_property
    def variances(self) -> np.ndarray:
        """float64[length + 1]: how unsure the end is after so many reports; of none, endless."""
        variances = np.full(self.length + 1, np.inf)
        variances[self.length] = 0.0
        # The end as a function of (value, last change), backwards: end = a + b value + c change.
        b, c, deviation = 1.0, 0.0, 0.0
        for at in range(self.length - 1, 0, -1):
            (_, by_value, by_change), noise = self._steps[at - 1]
            deviation += abs(b + c) * math.sqrt(noise)  # a trial that errs in one report errs so in the next, too
            b, c = b + (b + c) * by_value, (b + c) * by_change
            variances[at] = (SAME_WAY * deviation) ** 2
        return variances

    def ends(self) -> np.ndarray:
        """float64[n]: the expected last value of each curve that has a report."""
        last = self.values[np.arange(len(self.values)), self.counts - 1].copy()
        change = np.where(self.counts > 1, last - self.values[np.arange(len(self.values)), self.counts - 2], 0.0)
        for at in range(1, self.length):
            (start, by_value, by_change), _ = self._steps[at - 1]
            step = start + by_value * last + by_change * change
            moves = self.counts <= at
            last, change = np.where(moves, last + step, last), np.where(moves, step, change)
        return last


class _Model:
    """What is expected of every trial, and of new ones; all in values that are less being better."""

    def __init__(self, transform: SpaceTransform, history: History, seed: int) -> None:
        known = sorted(number for number, trial in history.trials.items() if trial.reports and trial.state != "failed")
        self.index: dict[int, int] = {number: row for row, number in enumerate(known)}
        trials = [history.trials[number] for number in known]
        self.length: int = max(len(trial.reports) for trial in trials if trial.state in ("done", "paused", "running"))
        values = np.full((len(trials), self.length), np.nan)
        for row, trial in zip(values, trials, strict=True):
            row[: len(trial.reports)] = [history.sign * value for _, value in trial.reports]
        first, least = np.median(values[:, 0]), np.nanmin(values)
        self._best: float = float(least)
        values = np.minimum(values, first + (first - least))  # a loss that diverged says no more than that
        curves = Curves(values)
        ended = np.array([trial.state in ("done", "stopped") for trial in trials])
        self._left = np.where(ended, 0, self.length - curves.counts)
        ends, noise = curves.ends(), curves.variances[np.minimum(curves.counts, self.length)]
        ends = np.where(ended, np.nanmin(values, 1), ends)
        noise = np.where(ended, 0.0, noise)
        self._ends, self._variances = ends, curves.variances
        self._condition(transform, [tuple(trial.point) for trial in trials], ends, noise, [seed, len(history.trials)])

    def _condition(
        self, transform: SpaceTransform, points: Sequence[Point], ends: np.ndarray, noise: np.ndarray, seed: list[int]
    ) -> None:
        """Give the process over the parameters the ends as measurements, each of its own noise."""
        median, least = np.median(ends), ends.min()
        limit = median + OUTLIER * (median - least) if median > least else np.inf
        clipped = np.minimum(ends, limit)
        mean, scale = clipped.mean(), max(clipped.std(), 1e-12)
        targets, noise = (clipped - mean) / scale, noise / scale**2
        features = transform.encode(transform.rows(points))
        subset = training_subset(targets + np.sqrt(noise), FIT_TO)
        theta = fit_hyperparameters(features[subset], targets[subset])
        own = np.exp(theta[-2])  # what the parameters do not explain of an end
        prior = prior_covariance(theta, features, features) + own * np.eye(len(targets))
        factor = cho_factor(prior + np.diag(noise + JITTER), lower=True)
        weights = cho_solve(factor, targets)
        half = solve_triangular(factor[0], prior, lower=True)
        self._mean = mean + scale * (prior @ weights)
        self._variance = scale**2 * np.maximum(np.diag(prior) - (half**2).sum(0), 1e-12)
        rng = np.random.default_rng(seed)
        fresh = transform.encode(transform.from_cube(rng.random((FRESH, transform.dims))))
        across = prior_covariance(theta, fresh, features)
        half = solve_triangular(factor[0], across.T, lower=True)
        means = mean + scale * (across @ weights)
        before = np.diag(prior_covariance(theta, fresh, fresh)) + own
        variances = scale**2 * np.maximum(before - (half**2).sum(0), 1e-12)
        self.new: float = float(max(self._gain(m, v, 0, self.length) for m, v in zip(means, variances, strict=True)))

    def gain_of(self, number: int) -> float:
        """What a report of a trial is expected to win."""
        if number not in self.index:
            return 0.0
        row = self.index[number]
        return self._gain(self._mean[row], self._variance[row], self.length - self._left[row], self._left[row])

    def chance(self, number: int) -> float:
        """The probability that a trial ends below the best value."""
        row = self.index[number]
        return float(ndtr((self._best - self._mean[row]) / math.sqrt(self._variance[row])))

    def _gain(self, mean: float, variance: float, count: int, left: int) -> float:
        """The most that is won a report by any plan: `h` reports, and then the rest where they are good enough."""
        if left <= 0:
            return 0.0
        # Without its own reports; they are told again with less noise.
        without = 1.0 / max(1.0 / variance - 1.0 / max(self._variances[count], 1e-12), 1e-12)
        gains = []
        for h in (*(h for h in HORIZONS if h < left), left):
            after = self._variances[count + h]
            sure = 0.0 if after <= 0 else 1.0 / (1.0 / without + 1.0 / after)
            deviation = math.sqrt(max(variance - sure, 1e-18))
            z = (self._best - mean) / deviation
            goes_on = float(ndtr(z))
            won = deviation * (z * goes_on + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
            gains.append(max(won, 0.0) / (h + goes_on * (left - h)))
        return max(gains)
