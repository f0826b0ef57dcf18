"""Bayesian search with a Gaussian process: where `bayes` looks next.

Spaces as the Gaussian process sees them: rows of numbers, made from points and back.

A *row* has one number a free parameter: u in [0, 1] where values are endless, the number of the choice otherwise. What
the process is given is the row *encoded*: ordered choices on one axis, other choices on an axis each.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from roxxel_dist.sweep.samplers.base import Point, Sampler, TrialHistory, one_thread
from roxxel_dist.sweep.samplers.gp import GaussianProcess, fit, learn
from roxxel_dist.sweep.space.constraints import Expression
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Params, Rules, Space, Sweep

INACTIVE = 0.5
"""Where a parameter stands that does not matter, since its condition does not hold."""


STEPWISE = 12
"""Ordered choices up to so many are walked one by one; more of them, by a share of their range."""


class SpaceTransform:
    """How the free parameters of a space become columns."""

    def __init__(self, space: Space, rules: Rules) -> None:
        kinds = [one.distribution for one in space.free]
        self._space, self._kinds = space, kinds
        self.dims: int = len(kinds)
        self.counts: list[int | None] = [None if kind.choices is None else len(kind.choices) for kind in kinds]
        self._ordered = [kind.is_ordered or len(kind.choices or ()) == 2 for kind in kinds]
        widths = [1 if ordered else count or 1 for ordered, count in zip(self._ordered, self.counts, strict=True)]
        ends = np.cumsum(widths, dtype=int)
        self.columns: list[slice] = [slice(int(end) - width, int(end)) for end, width in zip(ends, widths, strict=True)]
        self.width: int = int(ends[-1]) if widths else 0
        self.smooth: list[int] = [dim for dim, count in enumerate(self.counts) if count is None]
        """The parameters that the slope of anything can be followed along."""
        counts = np.array([count or 0 for count in self.counts])
        self._endless, self._last = counts == 0, np.maximum(counts - 1.0, 1.0)
        self._steps = np.array(self._ordered, dtype=bool) & (counts > 2)
        """Which parameters move from a choice to the next one; others take any."""
        self._many = counts > STEPWISE
        self._conditions = [
            (dims, _needed(space, formula), formula, {})
            for name, formula in rules.when.items()
            if (dims := [dim for dim, one in enumerate(space.free) if one.path[0] == name])
        ]

    def rows(self, points: Sequence[Point]) -> np.ndarray:
        """float64[n, dims] of points in the unit cube."""
        return np.array(
            [
                [u if kind.choices is None else kind.index_at(u) for kind, u in zip(self._kinds, point, strict=True)]
                for point in points
            ],
            dtype=float,
        ).reshape(len(points), self.dims)

    def point(self, row: np.ndarray) -> list[float]:
        """The point of the unit cube that a row stands for."""
        return [
            float(value) if kind.choices is None else kind.to_unit(int(value))
            for kind, value in zip(self._kinds, row, strict=True)
        ]

    def from_cube(self, cube: np.ndarray) -> np.ndarray:
        """float64[n, dims] of rows for as many points: choices are as likely as the sweep says."""
        found = cube.copy()
        for dim, (kind, count) in enumerate(zip(self._kinds, self.counts, strict=True)):
            if count is not None:
                ends = None if kind.weights is None else np.cumsum(kind.weights)[:-1]
                share = cube[:, dim]
                found[:, dim] = np.floor(share * count) if ends is None else np.searchsorted(ends, share, side="right")
        return found

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """float64[n, width], each column in [0, 1]."""
        found = np.empty((len(rows), self.width))
        for dim, (count, ordered, columns) in enumerate(zip(self.counts, self._ordered, self.columns, strict=True)):
            if count is None:
                found[:, columns] = rows[:, dim : dim + 1]
            elif ordered:
                found[:, columns] = rows[:, dim : dim + 1] / (count - 1)
            else:
                found[:, columns] = (rows[:, dim : dim + 1] == np.arange(count)) / np.sqrt(2)
        for dims, off in self._off(rows):
            for dim in dims:
                found[off, self.columns[dim]] = INACTIVE if self._ordered[dim] else 0.0
        return found

    def _off(self, rows: np.ndarray) -> list[tuple[list[int], np.ndarray]]:
        """For each condition its parameters, and the rows where they do not matter: bool[n]."""
        found = []
        for dims, needed, formula, known in self._conditions:
            each, places = np.unique(rows[:, needed], axis=0, return_inverse=True)
            off = []
            for values in map(tuple, each.tolist()):
                if values not in known:
                    known[values] = not self._holds(formula, needed, values)
                off.append(known[values])
            found.append((dims, np.array(off, dtype=bool)[places.reshape(-1)]))
        return found

    def _holds(self, formula: Expression, needed: Sequence[int], values: Sequence[float]) -> bool:
        row = np.zeros(self.dims)
        row[list(needed)] = values
        with suppress(ValueError):  # it cannot be worked out: no trial is made of these values
            return bool(formula(self._space.point(self.point(row))))
        return False

    def mutate(self, rows: np.ndarray, rng: np.random.Generator, times: int, reach: float) -> np.ndarray:
        """Neighbours: each row with `times` parameters, picked at random, moved by about `reach` of their range."""
        found, every = rows.copy(), np.arange(len(rows))
        for _ in range(times):
            picked = rng.integers(self.dims, size=len(rows))
            steps, other = reach * rng.normal(size=len(rows)), rng.random(len(rows))
            values, last = found[every, picked], self._last[picked]
            near = np.round(np.where(self._many[picked], np.abs(steps) * last, 1.0))
            moved = np.clip(values + np.copysign(np.maximum(near, 1.0), steps), 0.0, last)
            any_choice = np.minimum(np.floor(other * (last + 1)), last)
            slid = np.clip(values + steps, 0.0, 1.0)
            found[every, picked] = np.select([self._endless[picked], self._steps[picked]], [slid, moved], any_choice)
        return found


def _needed(space: Space, formula: Expression) -> list[int]:
    """The free parameters that a formula asks for."""
    return [dim for dim, one in enumerate(space.free) if one.path[0] in formula.names]


LEARN_FROM, REFINE_WITH, REFINEMENTS = 60, 100, 4
"""Scales are learned from so many trials, and then from more of them in a few steps: the cost grows with the cube."""
MAX_GP_TRIALS = 300
"""From so many ended trials on, TPE proposes: the process would take too long."""
CANDIDATES, NEIGHBOURS = 1500, 100
"""Rows looked at anywhere, and near each of the best; fewer after `PLENTY` trials, for each costs more then."""
PLENTY = 80
BEAM = 8
LIKELY = 256
"""Rows whose chance of a failure is looked at in one go: most promise too little for it to matter."""
OUTLIER = 3.0
"""A value further behind the median than so many times the best one is ahead of it counts as that far: a diverged loss
says no more than that, and would make all others look alike."""
ROUNDS = (0.1, 0.05, 0.02, 0.01, 0.005)
"""How far the local search reaches, round by round, as a share of each range."""


CLIMB = {"maxiter": 15, "ftol": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """What a search believes."""

    value: GaussianProcess
    failure: GaussianProcess | None = None
    """None: no trial has failed yet, or all have."""
    limit: float = 0.0
    """What `failure` says of a point that is as likely to fail as not."""

    def log_score(self, points: np.ndarray) -> np.ndarray:
        """The log of the expected improvement times the chance of a trial that does not fail: float64[m]."""
        found = self.value.log_expected_improvement(points)
        if self.failure is None:
            return found
        order, log_chances = np.argsort(-found, kind="stable"), np.empty(len(points))
        done, best = 0, -np.inf
        while done < len(points) and best < found[order[done]]:  # what comes after can be among the best
            some = order[done : done + LIKELY]
            log_chances[some] = self.failure.log_probability_below(points[some], self.limit)
            done += len(some)
            best = np.sort((found + log_chances)[order[:done]])[-BEAM:][0]
        log_chances[order[done:]] = log_chances[order[:done]].min()
        return found + log_chances


def _expecting(points: np.ndarray, values: np.ndarray, running: np.ndarray) -> GaussianProcess:
    few = training_subset(values, LEARN_FROM)
    theta = learn(points[few], values[few])
    if len(few) < len(values):
        more = training_subset(values, REFINE_WITH)
        theta = learn(points[more], values[more], theta, REFINEMENTS)
    process = fit(points, values, theta)
    if not len(running):
        return process
    return fit(np.r_[points, running], np.r_[values, process.predict(running)[0]], theta)


class BayesSampler:
    """Proposes points for a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._transform = SpaceTransform(sweep.space, sweep.rules)
        self._late: Sampler | None = None
        self.start: int = start_count(self._transform.width)

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[Sequence[float]]:
        """Points, best first."""
        transform = self._transform
        if not transform.dims:
            yield []
            return
        if history.told >= MAX_GP_TRIALS:
            from roxxel_dist.sweep.samplers.tpe import TpeSampler

            self._late = self._late or TpeSampler(self._sweep)
            yield from self._late(history, trial)
            return
        rng = np.random.default_rng([history.seed, trial])
        if trial < self.start:
            cube = start_points(transform.dims, self.start, history.seed)
            yield transform.point(transform.from_cube(cube)[trial])
        if history.told < 2:
            return
        with one_thread():
            ranked = self._ranked(history, self._believed(history), rng)
        for row in ranked:
            yield transform.point(row)

    def _believed(self, history: TrialHistory) -> "Acquisition":
        """What is believed of values and failures; a trial that runs is taken to give what is expected of it."""
        trials = [history.trials[number] for number in sorted(history.trials)]
        told = [one for one in trials if one.told]
        points = self._transform.encode(self._transform.rows([one.point for one in told]))
        others = self._transform.encode(self._transform.rows([one.point for one in trials if not one.told]))
        values = standardize([one.value for one in told])
        failed = np.array([float(one.value is None) for one in told])
        if not 0 < failed.mean() < 1:
            return Acquisition(value=_expecting(points, values, others))
        usual, spread = failed.mean(), failed.std()
        failure = _expecting(points, (failed - usual) / spread, others)
        return Acquisition(value=_expecting(points, values, others), failure=failure, limit=(0.5 - usual) / spread)

    def _ranked(self, history: TrialHistory, acquisition: Acquisition, rng: np.random.Generator) -> np.ndarray:
        """Rows, the one that promises most first: many anywhere and near the best, then a local search."""
        transform = self._transform
        done = sorted((one.value, number) for number, one in history.trials.items() if one.value is not None)
        top = transform.rows([history.trials[number].point for _, number in done[:5]])
        share = min(1.0, PLENTY / history.told)
        anywhere, near_best = int(CANDIDATES * share), int(NEIGHBOURS * share)
        one, three = int(40 * share), int(20 * share)
        rows = [transform.from_cube(rng.random((anywhere, transform.dims)))]
        for times, reach in ((1, 0.1), (2, 0.2), (4, 0.3)):
            rows.append(transform.mutate(np.repeat(top, near_best, 0), rng, times, reach))
        pool = np.concatenate(rows)
        score = acquisition.log_score(transform.encode(pool))
        beam = self._best(pool, score)
        for reach in ROUNDS:
            near = [transform.mutate(np.repeat(beam, one, 0), rng, 1, reach)]
            near.append(transform.mutate(np.repeat(beam, three, 0), rng, 3, reach))
            fresh = np.concatenate([beam, *near])
            found = acquisition.log_score(transform.encode(fresh))
            beam = self._best(fresh, found)
            pool, score = np.concatenate([pool, fresh]), np.concatenate([score, found])
        if transform.smooth:
            beam = self._climbed(acquisition, beam[:3])
        return np.concatenate([beam, pool[np.argsort(-score, kind="stable")]])

    def _climbed(self, acquisition: Acquisition, beam: np.ndarray) -> np.ndarray:
        """Rows after their endless parameters have followed the slope to the top; the best first."""
        transform, smooth = self._transform, self._transform.smooth
        columns = [transform.columns[dim].start for dim in smooth]
        found = []
        for row in beam:
            place = transform.encode(row[None])[0]

            def downhill(values: np.ndarray, place: np.ndarray = place) -> tuple[float, np.ndarray]:
                here = place.copy()
                here[columns] = values
                score, slope = acquisition.value.slope(here)
                return -score, -slope[columns]

            bounds = [(0.0, 1.0)] * len(smooth)
            top = minimize(downhill, row[smooth], jac=True, method="L-BFGS-B", bounds=bounds, options=CLIMB)
            better = row.copy()
            better[smooth] = top.x
            found += [row, better]  # what promises more without failures may promise less with them
        rows = np.stack(found)
        return rows[np.argsort(-acquisition.log_score(transform.encode(rows)), kind="stable")]

    def _best(self, rows: np.ndarray, score: np.ndarray) -> np.ndarray:
        """The few rows that promise most and keep the rules."""
        order = np.argsort(-score, kind="stable")
        if not self._sweep.rules.constraints:
            return rows[order[:BEAM]]
        kept = []
        for index in order[:400]:
            if self._keeps(self._sweep.space.point(self._transform.point(rows[index]))):
                kept.append(index)
            if len(kept) == BEAM:
                break
        return rows[kept or order[:BEAM]]

    def _keeps(self, params: Params) -> bool:
        try:
            self._sweep.rules.resolve(params)
        except InfeasibleError:
            return False
        return True


def start_count(width: int) -> int:
    """How many trials are spread out before anything is believed."""
    return 6 + math.ceil(math.sqrt(width))


def start_points(dims: int, count: int, seed: int) -> np.ndarray:
    """float64[count, dims] in (0, 1): each dimension has one point in each of `count` equal parts."""
    rng = np.random.default_rng([seed, 7])
    ranks = np.stack([rng.permutation(count) for _ in range(dims)], 1)
    return (ranks + rng.random((count, dims))) / count


def standardize(values: list[float | None]) -> np.ndarray:
    """Values with failures as bad as the worst, of mean 0 and deviation 1."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return np.zeros(len(values))
    known = np.ldexp(known, -np.frexp(np.abs(known).max())[1])  # the square of a huge value would be endless
    middle, least = np.median(known), known.min()
    if middle > least:
        known = np.minimum(known, middle + OUTLIER * (middle - least))
    worst, rest = known.max(), iter(known)
    whole = np.array([worst if value is None else next(rest) for value in values])
    spread = whole.std()
    return (whole - whole.mean()) / (spread if spread > 0 else 1.0)


def training_subset(values: np.ndarray, count: int) -> np.ndarray:
    """Which trials scales are learned from: the best ones, and others evenly over time; `count` at most."""
    if len(values) <= count:
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    best, rest = order[: count // 2], np.sort(order[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.r_[best, even])
