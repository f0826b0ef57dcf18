"""Shares of data sets as a search space: the simplex between floors and caps.

A simplex is no cube. Shares that are drawn one by one and then normalised favour the middle, and those that are drawn
one after another favour the first. Here points of the unit cube become shares such that uniform points are uniform
shares: the Rosenblatt transform (Rosenblatt 1952). In an order of the data sets, share j is drawn from its distribution
given those before it, whose density is that of a sum of independent uniform numbers, those of the data sets after it.
Those sums have no short stable formula, so their distributions are tabulated, once a space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from roxxel_dist.curriculum.phases import LEAST_SHARE
from roxxel_dist.process.exit_codes import UserError

DIGITS = 6
"""Decimals of a share: what a trial trains on is what its tables say."""
UNIT = 10**DIGITS
LEAST = round(LEAST_SHARE * UNIT)
"""The least share that is not 0, in units."""
CELLS = 4096
"""Of a tabulated distribution."""
RARE = 0.05
"""Added to a share before its logarithm is taken: a data set that is left out is not endlessly far from a rare one.

Of 30 mixtures, half of them near the best, the process of `bayes` predicts each from the others with an error of 0.107
of their deviation, as a median (0.132 with 0.01): made losses of 3 data sets; of 5 sets 0.179 (0.232), of 5 Markov
sources 0.161 (0.223), of recorded trainings of two phases 0.445 (0.531). It was less in 33 to 35 of 40 seeds of each.
"""
SPANNED = 2000
"""Mixtures at random that say how far log-ratios reach."""
LATTICE = 50_000
"""Points of a lattice."""
NARROWEST = 1e-3
"""What floors and caps must leave between them: less is a single mixture, and no search."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureSpace:
    """The shares of k data sets in some phases; `mixture_space` makes it."""

    phases: tuple[int, ...]
    """They have the same shares, and are counted from 1 as in the config."""
    names: tuple[str, ...]
    floors: np.ndarray
    """float64[k]."""
    caps: np.ndarray
    """float64[k], lowered to what the most passes over each data set leave."""
    natural: np.ndarray
    """float64[k]: the tokens of each data set over those of all, moved to the nearest shares allowed (by KL)."""
    uniform: np.ndarray
    """float64[k]: the same of 1/k."""
    step: float | None = None
    """Shares are multiples of it; None: any shares."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the shares among the parameters of a trial, such as mixture.1.code."""
        return tuple(f"mixture.{self.phases[0]}.{name}" for name in self.names)

    @property
    def axes(self) -> int:
        """The dimensions of the cube: k - 1."""
        return len(self.names) - 1

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Shares that are uniform over all that are allowed: float64[k]."""
        return self.shares(rng.random(self.axes))

    def allows(self, shares: np.ndarray) -> bool:
        """Whether float64[k] sum to 1 and are between floors and caps, but for rounding."""
        slack = 1e-9
        is_between = (shares >= self.floors - slack).all() and (shares <= self.caps + slack).all()
        return bool(is_between and abs(shares.sum() - 1) < 1 / UNIT)

    def shares(self, point: Sequence[float] | np.ndarray) -> np.ndarray:
        """The shares of a point of the cube, as a trial has them: float64[k] of float64[k - 1]."""
        shares = self.from_cube(np.asarray(point, float)[None])[0]
        if self.step is None:
            return round_shares(shares, self.floors, self.caps)
        return self.lattice[int(((self.lattice - shares) ** 2).sum(1).argmin())]

    def from_cube(self, points: np.ndarray) -> np.ndarray:
        """Shares before rounding, float64[n, k] of float64[n, k - 1]: uniform points give uniform shares."""
        return self._transform.shares(points)

    def to_cube(self, shares: np.ndarray) -> np.ndarray:
        """The point of the cube for shares that are allowed: float64[k - 1] of float64[k]."""
        return self._transform.points(shares[None])[0]

    def log_ratios(self, shares: np.ndarray) -> np.ndarray:
        """Isometric log-ratio coordinates: float64[..., k - 1] of float64[..., k].

        Egozcue et al. 2003, in the basis of Helmert. `RARE` is added to each share, so that 0 has a logarithm.
        """
        return np.log(shares + RARE) @ _helmert(len(self.names))

    def from_log_ratios(self, ratios: np.ndarray) -> np.ndarray:
        """The nearest shares (by KL) that are allowed: float64[k] of float64[k - 1]; the inverse where it has one."""
        logs = _helmert(len(self.names)) @ ratios
        shares = np.exp(logs - logs.max())
        shares = shares / shares.sum() * (1 + RARE * len(shares)) - RARE
        return nearest_by_kl(np.maximum(shares, LEAST_SHARE / 10), self.floors, self.caps)

    @cached_property
    def ratio_span(self) -> tuple[np.ndarray, np.ndarray]:
        """The least log-ratios of mixtures that are allowed, and the widths to the largest: float64[k - 1] each."""
        found = self.log_ratios(self.from_cube(np.random.default_rng(0).random((SPANNED, self.axes))))
        low, high = found.min(0), found.max(0)
        return low, np.maximum(high - low, 1e-9)

    @cached_property
    def lattice(self) -> np.ndarray:
        """All shares that are multiples of `step`, the last one changing fastest: float64[n, k].

        Raises:
            ValueError: there is none, or there are too many.
        """
        assert self.step is not None
        parts = round(1 / self.step)
        spans = [
            range(int(np.ceil(floor * parts - 1e-6)), int(np.floor(cap * parts + 1e-6)) + 1)
            for floor, cap in zip(self.floors, self.caps, strict=True)
        ]
        count = _compositions(spans, parts)
        bounds = ", ".join(
            f"{n} {f:.4g} to {c:.4g}" for n, f, c in zip(self.names, self.floors, self.caps, strict=True)
        )
        if count == 0:
            raise UserError(f"step: no multiples of {self.step:g} sum to 1 within {bounds}: use a smaller step")
        if count > LATTICE:
            raise UserError(f"step: {count:,} mixtures are multiples of {self.step:g}: {LATTICE:,} are the maximum")
        return np.array(_rows(spans, parts), float) / parts

    @cached_property
    def _transform(self) -> "_Rosenblatt":
        return _Rosenblatt(self.floors, self.caps)


def mixture_space(
    phases: Sequence[int],
    names: Sequence[str],
    floors: Sequence[float] | np.ndarray | None = None,
    caps: Sequence[float] | np.ndarray | None = None,
    tokens: Sequence[float] | np.ndarray | None = None,
    step: float | None = None,
) -> MixtureSpace:
    """The space of shares between floors and caps.

    Args:
        phases: those that have these shares, counted from 1.
        names: k data sets, two or more.
        floors: float[k]; 0 where not given.
        caps: float[k]; 1 where not given.
        tokens: float[k] of each data set; natural shares are uniform where not given.
        step: shares are multiples of it, and 1 is one too.

    Raises:
        ValueError: what floors and caps leave is nothing, or next to nothing; the numbers are in the message.
    """
    count = len(names)
    if step is not None and not (1e-3 <= step <= 0.5 and abs(round(1 / step) - 1 / step) < 1e-6):
        raise UserError(f"step: {step!r} must be 1 over a whole number from 2 to 1,000, such as 0.1 or 0.05")
    low = np.zeros(count) if floors is None else np.array(floors, float)
    high = np.ones(count) if caps is None else np.array(caps, float)
    # No share can be above what the floors of the others leave, nor below what their caps leave.
    low, high = np.maximum(low, 1 - (high.sum() - high)), np.minimum(high, 1 - (low.sum() - low))
    low, high = np.where(low < 1e-12, 0.0, low), np.where(high < LEAST_SHARE, 0.0, high)
    if (high - low).sum() < NARROWEST:
        fixed = ", ".join(f"{name} {share:.4g}" for name, share in zip(names, low, strict=True))
        raise UserError(f"there is one mixture only ({fixed}): write it as `weights` of the phase, or widen the bounds")
    even = np.full(count, 1 / count)
    sizes = even if tokens is None else np.array(tokens, float) / np.sum(tokens)
    space = MixtureSpace(
        phases=tuple(phases),
        names=tuple(names),
        floors=low,
        caps=high,
        natural=round_shares(nearest_by_kl(sizes, low, high), low, high),
        uniform=round_shares(nearest_by_kl(even, low, high), low, high),
        step=step,
    )
    if step is not None:
        len(space.lattice)
    return space


def split_shares(spaces: Sequence[MixtureSpace], shares: np.ndarray) -> list[np.ndarray]:
    """Shares of several mixtures side by side, float64[K], as those of each: float64[k]."""
    return np.split(shares, np.cumsum([len(space.names) for space in spaces])[:-1])


def nearest_by_kl(shares: np.ndarray, floors: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """The shares r between floors and caps with the least KL(r || shares): float64[k].

    The condition of Karush, Kuhn and Tucker: r is t x shares, cut off at floors and caps, and t makes the sum 1.
    """
    low, high = 0.0, 1.0
    while np.clip(high * shares, floors, caps).sum() < 1 and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * shares, floors, caps).sum() < 1 else (low, middle)
    return np.clip(high * shares, floors, caps)


def round_shares(shares: np.ndarray, floors: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Shares of `DIGITS` decimals that sum to 1 between floors and caps, each 0 or at least `LEAST_SHARE`."""
    low, high = np.ceil(floors * UNIT - 1e-4).astype(int), np.floor(caps * UNIT + 1e-4).astype(int)
    units = np.clip(np.round(shares * UNIT).astype(int), low, high)
    rare = (units > 0) & (units < LEAST)
    units[rare] = np.where((units[rare] < LEAST / 2) | (high[rare] < LEAST), 0, LEAST)
    units = np.maximum(units, low)
    rest = UNIT - int(units.sum())
    for index in np.argsort(-units, kind="stable"):
        room = high[index] - units[index] if rest > 0 else max(low[index], LEAST) - units[index]
        if units[index]:
            moved = min(rest, room) if rest > 0 else max(rest, min(room, 0))
            units[index] += moved
            rest -= moved
    return units / UNIT


class _Rosenblatt:
    """The transform of the cube [0, 1]^(k - 1) to the shares between floors and caps, with a constant density.

    Let x_j in [0, w_j] be the shares over their floors, divided by their sum, which is known: then they sum to 1. The
    density of x_j given those before it is h_(j+1)(S - x_j), where S is 1 less those before it, and h_j is the density
    of the sum of uniform numbers in [0, w_j], ..., [0, w_k]. With H_j for its integral,

        h_j(s) = (H_(j+1)(s) - H_(j+1)(s - w_j)) / w_j

    Where the caps bind more than the floors, w_j - x_j takes the place of x_j: sums are then small, where the tables
    are exact.
    """

    def __init__(self, floors: np.ndarray, caps: np.ndarray) -> None:
        self._floors, widths, room = floors, caps - floors, 1 - floors.sum()
        widths = np.minimum(widths, room)
        self._flipped = bool(room > widths.sum() / 2)
        self._whole = widths
        self._total = float(widths.sum() - room if self._flipped else room)
        # Narrow ones first: what comes after them is wide, and smooth.
        self._order = np.argsort(widths, kind="stable")
        self._widths = np.minimum(widths[self._order] / self._total, 1.0)
        self._grid = np.linspace(0.0, 1.0, CELLS + 1)
        self._ends = [float(self._widths[j:].sum()) for j in range(len(widths))]
        self._tables: list[np.ndarray | None] = [None] * len(widths)
        """H_j on the grid; of the last one None: it is s itself, up to w."""
        for j in range(len(widths) - 2, 0, -1):
            self._tables[j] = self._integrated(j)

    def _integrated(self, j: int) -> np.ndarray:
        width = self._widths[j]
        if width < 1e-12:
            return self._integral(j + 1, self._grid)
        density = (self._integral(j + 1, self._grid) - self._integral(j + 1, self._grid - width)) / width
        table = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
        return np.ldexp(table, -np.frexp(table[-1])[1])  # of 200 data sets it would overflow; a power of 2 is exact

    def _integral(self, j: int, sums: np.ndarray) -> np.ndarray:
        """H_j, but for a factor."""
        table = self._tables[j]
        return np.clip(sums, 0.0, self._ends[j]) if table is None else np.interp(sums, self._grid, table)

    def _inverse(self, j: int, values: np.ndarray) -> np.ndarray:
        table = self._tables[j]
        return values if table is None else np.interp(values, table, self._grid)

    def shares(self, points: np.ndarray) -> np.ndarray:
        """float64[n, k] of float64[n, k - 1]."""
        left, found = np.ones(len(points)), np.empty((len(points), len(self._widths)))
        for j, width in enumerate(self._widths[:-1]):
            turned = 1 - points[:, j] if self._flipped else points[:, j]
            high, low = self._integral(j + 1, left), self._integral(j + 1, left - width)
            rest = np.clip(self._inverse(j + 1, high - turned * (high - low)), left - width, left)
            rest = np.clip(rest, 0.0, self._ends[j + 1])
            found[:, j] = left - rest
            left = rest
        found[:, -1] = left
        over = np.empty_like(found)
        over[:, self._order] = found * self._total
        return self._floors + (self._whole - over if self._flipped else over)

    def points(self, shares: np.ndarray) -> np.ndarray:
        """float64[n, k - 1] of float64[n, k]; the middle of what cannot vary."""
        over = shares - self._floors
        found = ((self._whole - over) if self._flipped else over)[:, self._order] / self._total
        left, points = np.ones(len(shares)), np.full((len(shares), len(self._widths) - 1), 0.5)
        for j, width in enumerate(self._widths[:-1]):
            high, low = self._integral(j + 1, left), self._integral(j + 1, left - width)
            left = left - found[:, j]
            span, here = high - low, high - self._integral(j + 1, left)
            np.divide(here, span, out=points[:, j], where=span > 1e-300)
        points = np.clip(points, 0.0, 1.0)
        return 1 - points if self._flipped else points


def _helmert(count: int) -> np.ndarray:
    """Orthonormal columns that sum to 0: float64[count, count - 1]."""
    basis = np.zeros((count, count - 1))
    for j in range(1, count):
        basis[:j, j - 1], basis[j, j - 1] = 1 / j, -1.0
        basis[:, j - 1] *= np.sqrt(j / (j + 1))
    return basis


def _compositions(spans: Sequence[range], total: int) -> int:
    """In how many ways numbers of these ranges sum to `total`."""
    ways = np.zeros(total + 1)
    ways[0] = 1
    for span in spans:
        below = np.concatenate([[0.0], np.cumsum(ways)])
        sums = np.arange(total + 1)
        ways = below[np.maximum(sums - span.start + 1, 0)] - below[np.maximum(sums - span.stop + 1, 0)]
    return int(min(ways[total], 2.0**62))


def _rows(spans: Sequence[range], total: int) -> list[tuple[int, ...]]:
    """The numbers of these ranges that sum to `total`, in order."""
    ends = [(sum(span[0] for span in spans[j:]), sum(span[-1] for span in spans[j:])) for j in range(len(spans))]
    rows: list[tuple[tuple[int, ...], int]] = [((), total)]
    for j, span in enumerate(spans):
        low, high = ends[j + 1] if j + 1 < len(spans) else (0, 0)
        rows = [((*row, n), left - n) for (row, left), n in product(rows, span) if low <= left - n <= high]
    return [row for row, _ in rows]
