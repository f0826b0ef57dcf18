"""Spaces as the Gaussian process sees them: rows of numbers, made from points and back.

A *row* has one number a free parameter: u in [0, 1] where values are endless, the number of the choice otherwise. What
the process is given is the row *encoded*: ordered choices on one axis, other choices on an axis each.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from roxxel_dist.sweep.expressions import Expression
from roxxel_dist.sweep.search import Point
from roxxel_dist.sweep.space import Rules, Space

MIDDLE = 0.5
"""Where a parameter stands that does not matter, since its condition does not hold."""


STEPWISE = 12
"""Ordered choices up to so many are walked one by one; more of them, by a share of their range."""


class Coding:
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
                [u if kind.choices is None else kind.number(u) for kind, u in zip(self._kinds, point, strict=True)]
                for point in points
            ],
            dtype=float,
        ).reshape(len(points), self.dims)

    def point(self, row: np.ndarray) -> list[float]:
        """The point of the unit cube that a row stands for."""
        return [
            float(value) if kind.choices is None else kind.middle(int(value))
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
                found[off, self.columns[dim]] = MIDDLE if self._ordered[dim] else 0.0
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

    def mutate(self, rows: np.ndarray, chance: np.random.Generator, times: int, reach: float) -> np.ndarray:
        """Neighbours: each row with `times` parameters, picked at random, moved by about `reach` of their range."""
        found, every = rows.copy(), np.arange(len(rows))
        for _ in range(times):
            picked = chance.integers(self.dims, size=len(rows))
            steps, other = reach * chance.normal(size=len(rows)), chance.random(len(rows))
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
