"""What a law says of mixtures: the metric over the shares, what more of a data set does, and what two do together.

Values are those of the mean law, which proposes too: by a median of draws other shares would be the best where the law
is nearly flat. Intervals are of joint draws, so that a difference has its own: two mixtures that are near to each other
are known together much better than each alone.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roxxel_dist.utils.display import aligned

Draws = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""float64[m, K], the shares of m mixtures, those of all entries side by side, to float64[1 + d, m]: what the mean law
says of them, and d joint draws."""
LEVEL = 0.9
"""Of every interval."""
INTERVAL = f"{LEVEL:.0%} interval if the law holds"
"""Its name, where nothing says that it is too narrow: trials cannot show that no loss is beside the law."""
MORE = 0.1
"""The share of a mixture that gives way to one data set, to measure what more of that does."""
POINTS, ROWS = 10, 5
"""Steps of a curve over the share of one of two data sets, and of a side of the triangle of three."""


class Estimate(NamedTuple):
    """A number of the law, and the interval in which it is with probability `LEVEL`."""

    value: float
    low: float
    high: float

    @classmethod
    def of_draws(cls, draws: NDArray[np.float64]) -> "Estimate":
        """Of float64[1 + d]: the value by the mean law, and that of each draw."""
        tail, value = (1 - LEVEL) / 2, float(draws[0])
        low, high = np.quantile(draws[1:], (tail, 1 - tail)).tolist()
        return cls(value, min(low, value), max(high, value))

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """For people."""
        return f"{self.value:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


class Point(NamedTuple):
    """A mixture, and what the law says of it."""

    shares: tuple[float, ...]
    """Of each data set of the entry."""
    metric: Estimate


def lattice(count: int, parts: int) -> NDArray[np.float64]:
    """All shares of `count` data sets that are multiples of 1 / parts: float64[n, count], the last changes fastest."""
    heads = (head for head in product(range(parts, -1, -1), repeat=count - 1) if sum(head) <= parts)
    return np.array([(*head, parts - sum(head)) for head in heads], np.float64) / parts


def surface(
    draws: Draws, base: NDArray[np.float64], part: slice, floors: NDArray[np.float64], caps: NDArray[np.float64]
) -> list[Point]:
    """The metric over the allowed shares of an entry of two or three data sets, the other entries being as in `base`.

    Args:
        draws: of the law.
        base: float64[K], the shares of all entries.
        part: the shares of the entry among them.
        floors: float64[k], what is allowed at least.
        caps: float64[k], at most.

    Returns:
        A line from the largest share of the first data set to the least, or the lattice of a triangle; empty for more
        than three data sets.
    """
    count = part.stop - part.start
    if count > 3:
        return []
    if count == 2:
        high, low = min(caps[0], 1 - floors[1]), max(floors[0], 1 - caps[1])
        first = np.linspace(high, low, POINTS + 1)
        rows = np.stack([first, 1 - first], axis=1)
    else:
        rows = lattice(count, ROWS)
        rows = rows[((rows >= floors - 1e-9) & (rows <= caps + 1e-9)).all(axis=1)]
    if not len(rows):
        return []
    values = draws(_replaced(base, part, rows))
    return [Point(tuple(row.tolist()), Estimate.of_draws(values[:, i])) for i, row in enumerate(rows)]


def effects(draws: Draws, base: NDArray[np.float64], part: slice) -> list[Estimate]:
    """By data set of the entry: how the metric changes where `MORE` of the mixture gives way to it.

    All shares r become (1 - MORE) r, and that of the data set MORE more: so the effects, weighed by r, sum to about 0.
    """
    values = draws(_replaced(base, part, np.vstack([base[part], _moved(base[part])])))
    return [Estimate.of_draws(values[:, 1 + number] - values[:, 0]) for number in range(part.stop - part.start)]


def interactions(draws: Draws, base: NDArray[np.float64], part: slice) -> list[tuple[tuple[int, int], Estimate]]:
    """By pair of data sets: what more of both does beyond the sum of what more of each does, the largest first.

    Where less of the metric is better, two that help each other have a negative one.
    """
    shares = base[part]
    pairs, singly = list(combinations(range(len(shares)), 2)), _moved(shares)
    both = [singly[i] + singly[j] - shares for i, j in pairs]
    values = draws(_replaced(base, part, np.vstack([shares, singly, *both])))
    singles = values[:, 1 : 1 + len(shares)]
    found = [
        Estimate.of_draws(values[:, 1 + len(shares) + number] - singles[:, i] - singles[:, j] + values[:, 0])
        for number, (i, j) in enumerate(pairs)
    ]
    return sorted(zip(pairs, found, strict=True), key=lambda one: -abs(one[1].value))


def gain(draws: Draws, mixture: NDArray[np.float64], other: NDArray[np.float64]) -> Estimate:
    """The metric of a mixture, float64[K], less that of another one."""
    values = draws(np.stack([mixture, other]))
    return Estimate.of_draws(values[:, 0] - values[:, 1])


def _moved(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[k, k]: in row j `MORE` of the mixture has given way to data set j."""
    return (1 - MORE) * shares + MORE * np.eye(len(shares))


def _replaced(base: NDArray[np.float64], part: slice, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[m, K]: `base` with the shares of one entry replaced, a row each."""
    shares = np.repeat(base[None], len(rows), axis=0)
    shares[:, part] = rows
    return shares


def told(names: Sequence[str], points: Sequence[Point], goal: str, interval: str = INTERVAL) -> list[str]:
    """A surface as lines of text: a table for two data sets, a triangle for three; its best point is marked."""
    if not points:
        return []
    best = (min if goal == "minimize" else max)(points, key=lambda point: point.metric.value)
    if len(names) == 2:
        rows = [[f"share of {names[0]}", "predicted", interval, ""]]
        for point in points:
            metric, mark = point.metric, "best" if point is best else ""
            rows.append(
                [f"{point.shares[0]:.3f}", f"{metric.value:.4f}", f"{metric.low:.4f} to {metric.high:.4f}", mark]
            )
        return aligned(rows, left=None)
    return _triangle(names, points, best)


def _triangle(names: Sequence[str], points: Sequence[Point], best: Point) -> list[str]:
    """Rows of equal shares of the first data set, with half of the interval's width behind each number."""
    rows: dict[float, list[str]] = {}
    for point in points:
        half = (point.metric.high - point.metric.low) / 2
        cell = f"{point.metric.value:.3f}±{half:.3f}{'*' if point is best else ' '}"
        rows.setdefault(round(point.shares[0], 6), []).append(cell)
    width = max(len("  ".join(cells)) for cells in rows.values())
    lines = [f"{share:>5.2f}  {'  '.join(cells):^{width}}".rstrip() for share, cells in rows.items()]
    head = f"{names[0]}: a row each; in a row more {names[2]} to the right, else {names[1]}; * is the best"
    return [head, *lines]
