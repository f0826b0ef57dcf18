"""Bayesian search with a Gaussian process: where `bayes` looks next."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from roxxel_dist.sweep.coding import Coding
from roxxel_dist.sweep.gp import GaussianProcess, fit, learn
from roxxel_dist.sweep.search import Proposer, Record, one_thread
from roxxel_dist.sweep.space import InfeasibleError, Params, Sweep

LEARN_FROM, REFINE_WITH, REFINEMENTS = 60, 100, 4
"""Scales are learned from so many trials, and then from more of them in a few steps: the cost grows with the cube."""
HAND_OVER = 300
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
class Belief:
    """What a search believes."""

    value: GaussianProcess
    failure: GaussianProcess | None = None
    """None: no trial has failed yet, or all have."""
    limit: float = 0.0
    """What `failure` says of a point that is as likely to fail as not."""

    def promise(self, points: np.ndarray) -> np.ndarray:
        """The log of the expected improvement times the chance of a trial that does not fail: float64[m]."""
        found = self.value.log_improvement(points)
        if self.failure is None:
            return found
        order, chances = np.argsort(-found, kind="stable"), np.empty(len(points))
        done, best = 0, -np.inf
        while done < len(points) and best < found[order[done]]:  # what comes after can be among the best
            some = order[done : done + LIKELY]
            chances[some] = self.failure.log_chance_below(points[some], self.limit)
            done += len(some)
            best = np.sort((found + chances)[order[:done]])[-BEAM:][0]
        chances[order[done:]] = chances[order[:done]].min()
        return found + chances


def _expecting(points: np.ndarray, values: np.ndarray, running: np.ndarray) -> GaussianProcess:
    few = informative(values, LEARN_FROM)
    theta = learn(points[few], values[few])
    if len(few) < len(values):
        more = informative(values, REFINE_WITH)
        theta = learn(points[more], values[more], theta, REFINEMENTS)
    process = fit(points, values, theta)
    if not len(running):
        return process
    return fit(np.r_[points, running], np.r_[values, process.believe(running)[0]], theta)


class Bayes:
    """Proposes points for a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._coding = Coding(sweep.space, sweep.rules)
        self._late: Proposer | None = None
        self.start: int = start_count(self._coding.width)

    def __call__(self, record: Record, trial: int) -> Iterator[Sequence[float]]:
        """Points, best first."""
        coding = self._coding
        if not coding.dims:
            yield []
            return
        if record.told >= HAND_OVER:
            from roxxel_dist.sweep.tpe import Tpe

            self._late = self._late or Tpe(self._sweep)
            yield from self._late(record, trial)
            return
        chance = np.random.default_rng([record.seed, trial])
        if trial < self.start:
            cube = start_points(coding.dims, self.start, record.seed)
            yield coding.point(coding.from_cube(cube)[trial])
        if record.told < 2:
            return
        with one_thread():
            ranked = self._ranked(record, self._believed(record), chance)
        for row in ranked:
            yield coding.point(row)

    def _believed(self, record: Record) -> "Belief":
        """What is believed of values and failures; a trial that runs is taken to give what is expected of it."""
        trials = [record.trials[number] for number in sorted(record.trials)]
        told = [one for one in trials if one.told]
        points = self._coding.encode(self._coding.rows([one.point for one in told]))
        others = self._coding.encode(self._coding.rows([one.point for one in trials if not one.told]))
        values = usual_values([one.value for one in told])
        failed = np.array([float(one.value is None) for one in told])
        if not 0 < failed.mean() < 1:
            return Belief(value=_expecting(points, values, others))
        usual, spread = failed.mean(), failed.std()
        failure = _expecting(points, (failed - usual) / spread, others)
        return Belief(value=_expecting(points, values, others), failure=failure, limit=(0.5 - usual) / spread)

    def _ranked(self, record: Record, belief: Belief, chance: np.random.Generator) -> np.ndarray:
        """Rows, the one that promises most first: many anywhere and near the best, then a local search."""
        coding = self._coding
        done = sorted((one.value, number) for number, one in record.trials.items() if one.value is not None)
        top = coding.rows([record.trials[number].point for _, number in done[:5]])
        share = min(1.0, PLENTY / record.told)
        anywhere, near_best = int(CANDIDATES * share), int(NEIGHBOURS * share)
        one, three = int(40 * share), int(20 * share)
        rows = [coding.from_cube(chance.random((anywhere, coding.dims)))]
        for times, reach in ((1, 0.1), (2, 0.2), (4, 0.3)):
            rows.append(coding.mutate(np.repeat(top, near_best, 0), chance, times, reach))
        pool = np.concatenate(rows)
        worth = belief.promise(coding.encode(pool))
        beam = self._best(pool, worth)
        for reach in ROUNDS:
            near = [coding.mutate(np.repeat(beam, one, 0), chance, 1, reach)]
            near.append(coding.mutate(np.repeat(beam, three, 0), chance, 3, reach))
            fresh = np.concatenate([beam, *near])
            found = belief.promise(coding.encode(fresh))
            beam = self._best(fresh, found)
            pool, worth = np.concatenate([pool, fresh]), np.concatenate([worth, found])
        if coding.smooth:
            beam = self._climbed(belief, beam[:3])
        return np.concatenate([beam, pool[np.argsort(-worth, kind="stable")]])

    def _climbed(self, belief: Belief, beam: np.ndarray) -> np.ndarray:
        """Rows after their endless parameters have followed the slope to the top; the best first."""
        coding, smooth = self._coding, self._coding.smooth
        columns = [coding.columns[dim].start for dim in smooth]
        found = []
        for row in beam:
            place = coding.encode(row[None])[0]

            def downhill(values: np.ndarray, place: np.ndarray = place) -> tuple[float, np.ndarray]:
                here = place.copy()
                here[columns] = values
                worth, slope = belief.value.slope(here)
                return -worth, -slope[columns]

            bounds = [(0.0, 1.0)] * len(smooth)
            top = minimize(downhill, row[smooth], jac=True, method="L-BFGS-B", bounds=bounds, options=CLIMB)
            better = row.copy()
            better[smooth] = top.x
            found += [row, better]  # what promises more without failures may promise less with them
        rows = np.stack(found)
        return rows[np.argsort(-belief.promise(coding.encode(rows)), kind="stable")]

    def _best(self, rows: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """The few rows that promise most and keep the rules."""
        order = np.argsort(-worth, kind="stable")
        if not self._sweep.rules.constraints:
            return rows[order[:BEAM]]
        kept = []
        for index in order[:400]:
            if self._keeps(self._sweep.space.point(self._coding.point(rows[index]))):
                kept.append(index)
            if len(kept) == BEAM:
                break
        return rows[kept or order[:BEAM]]

    def _keeps(self, params: Params) -> bool:
        try:
            self._sweep.rules.complete(params)
        except InfeasibleError:
            return False
        return True


def start_count(width: int) -> int:
    """How many trials are spread out before anything is believed."""
    return 6 + math.ceil(math.sqrt(width))


def start_points(dims: int, count: int, seed: int) -> np.ndarray:
    """float64[count, dims] in (0, 1): each dimension has one point in each of `count` equal parts."""
    chance = np.random.default_rng([seed, 7])
    ranks = np.stack([chance.permutation(count) for _ in range(dims)], 1)
    return (ranks + chance.random((count, dims))) / count


def usual_values(values: list[float | None]) -> np.ndarray:
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


def informative(values: np.ndarray, count: int) -> np.ndarray:
    """Which trials scales are learned from: the best ones, and others evenly over time; `count` at most."""
    if len(values) <= count:
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    best, rest = order[: count // 2], np.sort(order[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.r_[best, even])
