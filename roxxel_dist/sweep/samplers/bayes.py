"""Bayesian search with a Gaussian process: where `bayes` looks next.

The process sees *rows*: one number for each axis of the space, u in [0, 1] where values are endless, the index of the
choice otherwise; and features, made of rows: ordered choices on one axis, other choices on an axis each, and the shares
of a mixture as log-ratios. Decision 29.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from roxxel_dist.sweep.samplers.acquisition import (
    Acquisition,
    choose_scale,
    fit_failures,
    fit_values,
    training_subset,
)
from roxxel_dist.sweep.samplers.base import Point, SampledTrial, TrialHistory
from roxxel_dist.sweep.samplers.law_proposals import LawProposals
from roxxel_dist.sweep.space.constraints import Expression
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Sweep

INACTIVE = 0.5
"""The feature of a parameter that does not matter, since its condition does not hold."""
STEPWISE = 12
"""Ordered choices up to so many are walked one by one; more of them, by a share of their range."""


class SpaceTransform:
    """The free parameters of a sweep as rows and features."""

    def __init__(self, sweep: Sweep) -> None:
        kinds = sweep.space.axes
        self._space, self._kinds = sweep.space, kinds
        self.dims: int = len(kinds)
        self.counts: list[int | None] = [None if kind.choices is None else len(kind.choices) for kind in kinds]
        self._ordered = [kind.is_ordered or len(kind.choices or ()) == 2 for kind in kinds]
        widths = [1 if ordered else count or 1 for ordered, count in zip(self._ordered, self.counts, strict=True)]
        ends = np.cumsum(widths, dtype=int)
        self.columns: list[slice] = [slice(int(end) - width, int(end)) for end, width in zip(ends, widths, strict=True)]
        self.width: int = sum(widths)
        free = len(sweep.space.free)
        self.smooth: list[int] = [dim for dim, count in enumerate(self.counts[:free]) if count is None]
        """The parameters along which there is a gradient."""
        self._mixtures = [
            (
                mixture,
                axes,
                slice(self.columns[axes.start].start, self.columns[axes.stop - 1].stop),
                *mixture.ratio_span,
            )
            for mixture, axes in zip(sweep.space.mixtures, sweep.space.share_axes, strict=True)
        ]
        """Each mixture, its axes, its columns, and the least log-ratios and their widths."""
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
        """Features, float64[n, width], each column in [0, 1] (those of rare mixtures may be a little outside)."""
        features = np.empty((len(rows), self.width))
        for dim, (count, ordered, columns) in enumerate(zip(self.counts, self._ordered, self.columns, strict=True)):
            if count is None:
                features[:, columns] = rows[:, dim : dim + 1]
            elif ordered:
                features[:, columns] = rows[:, dim : dim + 1] / (count - 1)
            else:
                features[:, columns] = (rows[:, dim : dim + 1] == np.arange(count)) / np.sqrt(2)
        for mixture, axes, columns, low, width in self._mixtures:
            features[:, columns] = (mixture.log_ratios(mixture.from_cube(rows[:, axes])) - low) / width
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


MOST_TRIALS = 250
"""Trials that a process is given: the cost of a suggestion grows with their square, and with no more of them."""
MOST_FAILURES = 60
"""Of these, the latest that failed."""
MOST_RUNNING = 100
"""Trials that run, the latest, whose values are drawn; of all others only the places are known."""
CANDIDATES, NEIGHBOURS = 1500, 100
"""Rows looked at anywhere, and near each of the best."""
PROMISING = 500
"""Of all these, the rows that are looked at more closely."""
BEAM = 8
ROUNDS = (0.1, 0.05, 0.02, 0.01, 0.005)
"""How far the local search reaches, round by round, as a share of each range."""
CLIMB = {"maxiter": 15, "ftol": 1e-6}


class BayesSampler:
    """Spread-out points first, then those of the highest expected improvement."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._transform, self._law = sweep, SpaceTransform(sweep), LawProposals(sweep)
        self.start: int = 6 + math.ceil(math.sqrt(self._transform.width))
        """Trials that are spread out before anything is expected; of those that fail, as many again."""

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[Sequence[float]]:
        """Points, best first."""
        transform, ended = self._transform, history.ended
        if not transform.dims:
            yield []
            return
        rng = np.random.default_rng([history.seed, trial])
        lap, index = divmod(trial, self.start)
        failed = sum(one.ended and one.value is None for one in history.trials.values())
        if lap == 0 or (lap == 1 and trial - failed < self.start):
            cube = start_points(transform.dims, self.start, history.seed, lap)
            yield transform.point(transform.from_cube(cube)[index])
        if ended >= 2:
            with threadpool_limits(1, user_api="blas"):  # threads spin: beside busy trials they take ten times as long
                ranked = self._ranked(history, self._acquisition(history, rng), rng)
                proposed = self._laws(history, trial, transform.point(ranked[0]))
            yield from proposed
            yield from map(transform.point, ranked)

    def _laws(self, history: TrialHistory, trial: int, other: Sequence[float]) -> Sequence[Point]:
        """What the law of the mixtures proposes, with the other parameters of a point."""
        if not self._sweep.space.mixtures:
            return []
        numbers = [number for number, one in history.trials.items() if one.value is not None]
        features = self._features([history.trials[number] for number in numbers])
        return self._law.points(history, trial, dict(zip(numbers, features, strict=True)), other)

    def _acquisition(self, history: TrialHistory, rng: np.random.Generator) -> Acquisition:
        """Models of values and failures; for trials that run or have failed, values predicted from the others."""
        trials = [history.trials[number] for number in sorted(history.trials)]
        failed = [trial for trial in trials if trial.ended and trial.value is None][-MOST_FAILURES:]
        running = [trial for trial in trials if not trial.ended]
        known = [trial for trial in trials if trial.value is not None]
        kept = training_subset(np.array([trial.value for trial in known]), MOST_TRIALS - len(failed))
        known = [known[index] for index in kept]
        values = [trial.value for trial in known]
        known_at, failed_at, every_running_at = map(self._features, (known, failed, running))
        running_at = every_running_at[-MOST_RUNNING:]
        failed_mask = np.arange(len(known) + len(failed)) >= len(known)
        failure = fit_failures(np.r_[known_at, failed_at], failed_mask, running_at)
        if len(known) < 2:  # too few to learn values from: failures count as bad ones
            known_at, values = np.r_[known_at, failed_at], [0.0] * len(known) + [1.0] * len(failed)
            failed_at = failed_at[:0]
        if failure is not None and failure.weight < 0.5:  # accidents: nothing is learnt of them
            failure, failed_at = None, failed_at[:0]
        blame = failure.blame if failure is not None and len(failed_at) else np.zeros(len(failed_at))
        processes = fit_values(known_at, *choose_scale(known_at, values), failed_at, blame, running_at, rng)
        return Acquisition(values=processes, failure=failure, running=every_running_at)

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
        if not self._sweep.rules.restrict:
            return rows[order[:BEAM]]
        kept = []
        for index in order[:400]:
            with suppress(InfeasibleError):
                self._sweep.rules.resolve(self._sweep.space.point(self._transform.point(rows[index])))
                kept.append(index)
            if len(kept) == BEAM:
                break
        return rows[kept or order[:BEAM]]


def start_points(dims: int, count: int, seed: int, lap: int) -> np.ndarray:
    """A Latin hypercube, float64[count, dims]: each dimension has one point in each of `count` equal parts."""
    rng = np.random.default_rng([seed, 7 + lap])
    ranks = np.stack([rng.permutation(count) for _ in range(dims)], 1)
    return (ranks + rng.random((count, dims))) / count
