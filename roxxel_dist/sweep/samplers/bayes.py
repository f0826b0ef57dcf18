"""Bayesian search with a Gaussian process: where `bayes` looks next.

The process sees *rows*: one number a free parameter, u in [0, 1] where values are endless, the index of the choice
otherwise; and features, made of rows: ordered choices on one axis, other choices on an axis each.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_ndtr
from threadpoolctl import threadpool_limits

from roxxel_dist.sweep.samplers.base import Point, SampledTrial, TrialHistory
from roxxel_dist.sweep.samplers.gp import GaussianProcess, condition, fit_hyperparameters, sample_hyperparameters
from roxxel_dist.sweep.space.constraints import Expression
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Sweep

INACTIVE = 0.5
"""The feature of a parameter that does not matter, since its condition does not hold."""
STEPWISE = 12
"""Ordered choices up to so many are walked one by one; more of them, by a share of their range."""


class SpaceTransform:
    """The free parameters of a sweep as rows and features."""

    def __init__(self, sweep: Sweep) -> None:
        kinds = [parameter.distribution for parameter in sweep.space.free]
        self._space, self._kinds = sweep.space, kinds
        self.dims: int = len(kinds)
        self.counts: list[int | None] = [None if kind.choices is None else len(kind.choices) for kind in kinds]
        self._ordered = [kind.is_ordered or len(kind.choices or ()) == 2 for kind in kinds]
        widths = [1 if ordered else count or 1 for ordered, count in zip(self._ordered, self.counts, strict=True)]
        ends = np.cumsum(widths, dtype=int)
        self.columns: list[slice] = [slice(int(end) - width, int(end)) for end, width in zip(ends, widths, strict=True)]
        self.width: int = sum(widths)
        self.smooth: list[int] = [dim for dim, count in enumerate(self.counts) if count is None]
        """The parameters along which there is a gradient."""
        counts = np.array([count or 0 for count in self.counts])
        self._endless, self._last = counts == 0, np.maximum(counts - 1.0, 1.0)
        self._steps = np.array(self._ordered, dtype=bool) & (counts > 2)
        """Which parameters move from a choice to the next one; others take any."""
        self._many = counts > STEPWISE
        self._conditions: list[tuple[list[int], list[int], Expression, dict[tuple[float, ...], bool]]] = []
        """Of each: its parameters, those that its formula asks for, itself, and for which of their values it is off."""
        for name, formula in sweep.rules.when.items():
            names = [parameter.path[0] for parameter in sweep.space.free]
            needed = [dim for dim, other in enumerate(names) if other in formula.names]
            self._conditions.append(([dim for dim, other in enumerate(names) if other == name], needed, formula, {}))

    def rows(self, points: Sequence[Point]) -> np.ndarray:
        """float64[n, dims] of points in the unit cube."""
        rows = [
            [u if kind.choices is None else kind.index_at(u) for kind, u in zip(self._kinds, point, strict=True)]
            for point in points
        ]
        return np.array(rows, dtype=float).reshape(len(points), self.dims)

    def point(self, row: np.ndarray) -> list[float]:
        """The point of the unit cube that a row stands for."""
        return [
            float(value) if kind.choices is None else kind.to_unit(int(value))
            for kind, value in zip(self._kinds, row, strict=True)
        ]

    def from_cube(self, cube: np.ndarray) -> np.ndarray:
        """float64[n, dims] of rows for as many points: choices are as likely as the sweep says."""
        rows = cube.copy()
        for dim, (kind, count) in enumerate(zip(self._kinds, self.counts, strict=True)):
            if count is not None and kind.weights is None:
                rows[:, dim] = np.floor(cube[:, dim] * count)
            elif kind.weights is not None:
                rows[:, dim] = np.searchsorted(np.cumsum(kind.weights)[:-1], cube[:, dim], side="right")
        return rows

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Features, float64[n, width], each column in [0, 1]."""
        features = np.empty((len(rows), self.width))
        for dim, (count, ordered, columns) in enumerate(zip(self.counts, self._ordered, self.columns, strict=True)):
            if count is None:
                features[:, columns] = rows[:, dim : dim + 1]
            elif ordered:
                features[:, columns] = rows[:, dim : dim + 1] / (count - 1)
            else:
                features[:, columns] = (rows[:, dim : dim + 1] == np.arange(count)) / np.sqrt(2)
        for dims, needed, formula, known in self._conditions:
            distinct, index = np.unique(rows[:, needed], axis=0, return_inverse=True)
            keys = list(map(tuple, distinct.tolist()))
            for values in set(keys) - set(known):
                known[values] = not self._holds(formula, needed, values)
            off = np.array([known[values] for values in keys], dtype=bool)[index.reshape(-1)]
            for dim in dims:
                features[off, self.columns[dim]] = INACTIVE if self._ordered[dim] else 0.0
        return features

    def _holds(self, formula: Expression, needed: Sequence[int], values: Sequence[float]) -> bool:
        row = np.zeros(self.dims)
        row[list(needed)] = values
        with suppress(ValueError):  # it cannot be worked out: no trial is made of these values
            return bool(formula(self._space.point(self.point(row))))
        return False

    def mutate(self, rows: np.ndarray, rng: np.random.Generator, times: int, reach: float) -> np.ndarray:
        """Neighbours: each row with `times` parameters, picked at random, moved by about `reach` of their range."""
        mutants, every = rows.copy(), np.arange(len(rows))
        for _ in range(times):
            picked = rng.integers(self.dims, size=len(rows))
            steps, other = reach * rng.normal(size=len(rows)), rng.random(len(rows))
            values, last = mutants[every, picked], self._last[picked]
            near = np.round(np.where(self._many[picked], np.abs(steps) * last, 1.0))
            moved = np.clip(values + np.copysign(np.maximum(near, 1.0), steps), 0.0, last)
            any_choice = np.minimum(np.floor(other * (last + 1)), last)
            slid = np.clip(values + steps, 0.0, 1.0)
            mutants[every, picked] = np.select([self._endless[picked], self._steps[picked]], [slid, moved], any_choice)
        return mutants


FIT_TO = 80
"""Trials that the scales are fitted to: the cost grows with their cube."""
MOST_TRIALS = 250
"""Trials that a process is given: the cost of a suggestion grows with their square, and with no more of them."""
MOST_FAILURES = 60
"""Of these, the latest that failed."""
MEMBERS, MEMBERS_TIMES = 4, 400
"""Draws of the scales that are averaged over, and their number times that of trials: many values leave little open."""
FAILURE_NOISE = 0.1
"""The centre of the prior of a failure's noise: some trials fail for no reason."""
ACCIDENTS = 2.0
"""The log odds that trials fail at a constant rate, before anything is seen: the process can say that too."""
CANDIDATES, NEIGHBOURS = 1500, 100
"""Rows looked at anywhere, and near each of the best."""
PROMISING = 500
"""Of all these, the rows that are looked at more closely."""
BEAM = 8
ROUNDS = (0.1, 0.05, 0.02, 0.01, 0.005)
"""How far the local search reaches, round by round, as a share of each range."""
CLIMB = {"maxiter": 15, "ftol": 1e-6}
OUTLIER = 3.0
"""A value further behind the median than so many times the best one is ahead of it counts as that far: a diverged loss
says no more than that, and would make all others look alike."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """How likely a trial is to fail: a process over the parameters, or a constant rate, by how well each predicts."""

    process: GaussianProcess
    limit: float
    """The mean of the process where a trial is as likely to fail as not."""
    rate: float
    weight: float
    """Of the process: near 0 where the parameters say nothing about which trials fail."""
    blame: np.ndarray
    """How likely the parameters of each failed trial were to make it fail, as the other trials tell: float64[k]."""

    def log_success(self, features: np.ndarray) -> np.ndarray:
        """The log probability of a trial that does not fail: float64[m] for float64[m, width]."""
        modelled = np.exp(self.process.log_probability_below(features, self.limit))
        return np.log(self.weight * modelled + (1 - self.weight) * (1 - self.rate) + 1e-30)


def fit_failures(features: np.ndarray, failed: np.ndarray, running: np.ndarray) -> FailureModel | None:
    """The model of failures, or None where none or all have failed.

    The weight of the process is its share of the likelihood that both models have of each trial given all others, less
    what a constant rate is likelier by before anything is seen.

    Args:
        features: float64[n, width] of the trials that ended.
        failed: bool[n], which of them failed.
        running: float64[m, width] of those that run.
    """
    rate, count = failed.mean(), len(failed)
    if not 0 < rate < 1:
        return None
    spread = failed.std()
    values, limit = (failed - rate) / spread, (0.5 - rate) / spread
    subset = training_subset(-values, FIT_TO)
    theta = fit_hyperparameters(features[subset], values[subset], FAILURE_NOISE)
    process = condition(features, values, theta)
    mean, deviation = process.leave_one_out()
    log_fails = log_ndtr((mean - limit) / deviation)
    log_modelled = np.where(failed, log_fails, log_ndtr((limit - mean) / deviation)).sum()
    others = (count * rate - failed + 0.5) / count  # the rate of all other trials, never 0 or 1
    log_constant = np.log(np.where(failed, others, 1 - others)).sum()
    weight = float(expit(log_modelled - log_constant - ACCIDENTS))
    return FailureModel(
        process=process.given(running, process.predict(running)[0]),
        limit=limit,
        rate=rate,
        weight=weight,
        blame=weight * np.exp(log_fails[failed]),
    )


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """What a trial is expected to be worth, on average over what may be true of the values."""

    values: Sequence[GaussianProcess]
    failure: FailureModel | None = None
    """None: no trial has failed yet, or all have."""

    def log_score(self, features: np.ndarray) -> np.ndarray:
        """The log of the expected improvement times the probability of a trial that does not fail: float64[m]."""
        score = _log_mean([process.log_expected_improvement(features) for process in self.values])
        return score if self.failure is None else score + self.failure.log_success(features)

    def slope(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The log of the expected improvement at one point, and its gradient: float64[width]."""
        scores, slopes = zip(*[process.slope(point) for process in self.values], strict=True)
        score = _log_mean(np.array(scores)[:, None])[0]
        return float(score), np.exp(np.array(scores) - score) @ np.array(slopes) / len(scores)


def _log_mean(scores: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The log of the mean of numbers given by their logs, float64[k, m]: float64[m]."""
    return np.logaddexp.reduce(np.array(scores), axis=0) - np.log(len(scores))


class BayesSampler:
    """Spread-out points first, then those of the highest expected improvement."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._transform = sweep, SpaceTransform(sweep)
        self.start: int = 6 + math.ceil(math.sqrt(self._transform.width))
        """How many trials are spread out before anything is expected."""

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[Sequence[float]]:
        """Points, best first."""
        transform, ended = self._transform, history.ended
        if not transform.dims:
            yield []
            return
        rng = np.random.default_rng([history.seed, trial])
        if trial < self.start:
            cube = start_points(transform.dims, self.start, history.seed)
            yield transform.point(transform.from_cube(cube)[trial])
        if ended >= 2:
            with threadpool_limits(1, user_api="blas"):  # threads spin: beside busy trials they take ten times as long
                ranked = self._ranked(history, self._acquisition(history, rng), rng)
            yield from map(transform.point, ranked)

    def _acquisition(self, history: TrialHistory, rng: np.random.Generator) -> Acquisition:
        """What is believed of values and failures; of trials that run or have failed, what the others make likely."""
        trials = [history.trials[number] for number in sorted(history.trials)]
        failed = [trial for trial in trials if trial.ended and trial.value is None][-MOST_FAILURES:]
        running = [trial for trial in trials if not trial.ended]
        known = [trial for trial in trials if trial.value is not None]
        kept = training_subset(np.array([trial.value for trial in known]), MOST_TRIALS - len(failed))
        known = [known[index] for index in kept]
        values = standardize([trial.value for trial in known])
        known_at, failed_at, running_at = map(self._features, (known, failed, running))
        failure = fit_failures(
            np.r_[known_at, failed_at], np.arange(len(known) + len(failed)) >= len(known), running_at
        )
        if len(known) < 2:  # too few to learn values from: failures count as bad ones
            known_at, values = np.r_[known_at, failed_at], np.r_[values, np.ones(len(failed))]
        subset = training_subset(values, FIT_TO)
        sample = known_at[subset], values[subset]
        thetas = [fit_hyperparameters(*sample)]
        if (count := min(MEMBERS, MEMBERS_TIMES // len(values))) > 1:
            thetas = sample_hyperparameters(*sample, thetas[0], count, rng)
        processes = []
        for theta in thetas:
            process = condition(known_at, values, theta)
            best = process.best
            if failure is not None and len(failed_at) and len(known) >= 2:
                # What fails by its parameters is as bad as the worst; what fails by accident is as good as it looks.
                believed = (1 - failure.blame) * process.predict(failed_at)[0] + failure.blame * values.max()
                process = process.given(failed_at, believed)
            if len(running_at):
                drawn = process.draw(running_at, rng)
                process, best = process.given(running_at, drawn), min(best, float(drawn.min()))
            processes.append(replace(process, best=best))
        return Acquisition(values=processes, failure=failure)

    def _features(self, trials: Sequence[SampledTrial]) -> np.ndarray:
        return self._transform.encode(self._transform.rows([trial.point for trial in trials]))

    def _ranked(self, history: TrialHistory, acquisition: Acquisition, rng: np.random.Generator) -> np.ndarray:
        """Rows, the best first: many anywhere and near the best trials, then a local search."""
        transform = self._transform
        done = sorted((trial.value, number) for number, trial in history.trials.items() if trial.value is not None)
        top = transform.rows([history.trials[number].point for _, number in done[:5]])
        rows = [transform.from_cube(rng.random((CANDIDATES, transform.dims)))]
        for times, reach in ((1, 0.1), (2, 0.2), (4, 0.3)):
            rows.append(transform.mutate(np.repeat(top, NEIGHBOURS, 0), rng, times, reach))
        pool = np.concatenate(rows)
        one = replace(acquisition, values=acquisition.values[:1])
        pool = pool[np.argsort(-one.log_score(transform.encode(pool)), kind="stable")[:PROMISING]]
        scores = acquisition.log_score(transform.encode(pool))
        beam = self._best(pool, scores)
        for reach in ROUNDS:
            near = [transform.mutate(np.repeat(beam, 20, 0), rng, 1, reach)]
            near.append(transform.mutate(np.repeat(beam, 10, 0), rng, 3, reach))
            fresh = np.concatenate([beam, *near])
            fresh_scores = acquisition.log_score(transform.encode(fresh))
            beam = self._best(fresh, fresh_scores)
            pool, scores = np.concatenate([pool, fresh]), np.concatenate([scores, fresh_scores])
        if transform.smooth:
            beam = self._climbed(acquisition, beam[:3])
        return np.concatenate([beam, pool[np.argsort(-scores, kind="stable")]])

    def _climbed(self, acquisition: Acquisition, beam: np.ndarray) -> np.ndarray:
        """Rows after their endless parameters have followed the gradient to the top; the best first."""
        transform, smooth = self._transform, self._transform.smooth
        columns = [transform.columns[dim].start for dim in smooth]
        rows = []
        for row in beam:
            features = transform.encode(row[None])[0]

            def downhill(values: np.ndarray, features: np.ndarray = features) -> tuple[float, np.ndarray]:
                here = features.copy()
                here[columns] = values
                score, slope = acquisition.slope(here)
                return -score, -slope[columns]

            bounds = [(0.0, 1.0)] * len(smooth)
            climbed = row.copy()
            climbed[smooth] = minimize(
                downhill, row[smooth], jac=True, method="L-BFGS-B", bounds=bounds, options=CLIMB
            ).x
            rows += [row, climbed]  # what is better without failures may be worse with them
        stacked = np.stack(rows)
        return stacked[np.argsort(-acquisition.log_score(transform.encode(stacked)), kind="stable")]

    def _best(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The few best rows that keep the rules."""
        order = np.argsort(-scores, kind="stable")
        if not self._sweep.rules.constraints:
            return rows[order[:BEAM]]
        kept = []
        for index in order[:400]:
            with suppress(InfeasibleError):
                self._sweep.rules.resolve(self._sweep.space.point(self._transform.point(rows[index])))
                kept.append(index)
            if len(kept) == BEAM:
                break
        return rows[kept or order[:BEAM]]


def start_points(dims: int, count: int, seed: int) -> np.ndarray:
    """A Latin hypercube, float64[count, dims]: each dimension has one point in each of `count` equal parts."""
    rng = np.random.default_rng([seed, 7])
    ranks = np.stack([rng.permutation(count) for _ in range(dims)], 1)
    return (ranks + rng.random((count, dims))) / count


def standardize(values: Sequence[float]) -> np.ndarray:
    """Values of mean 0 and deviation 1, the worst of them cut off: float64[n]."""
    known = np.array(values, dtype=float)
    if not len(known):
        return known
    known = np.ldexp(known, -np.frexp(np.abs(known).max())[1])  # the square of a huge value would be endless
    median, least = np.median(known), known.min()
    if median > least:
        known = np.minimum(known, median + OUTLIER * (median - least))
    spread = known.std()
    return (known - known.mean()) / (spread if spread > 0 else 1.0)


def training_subset(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of at most `count` trials to fit the scales to: the best ones, and others evenly over time."""
    if len(values) <= count:
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    best, rest = order[: count // 2], np.sort(order[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.r_[best, even])
