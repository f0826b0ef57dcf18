"""The units that a pass over a data set visits, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roxxel_dist.curriculum.permutation import Permutation


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """An order over some units.

    A pass begins with a pool of all units. An amendment in its midst makes another one, of what the old pool has not
    given out yet, without the units that were taken away, and with the ones that were added. It remembers the old pool,
    not the units, so it stays small; only units that are taken away, or come back, cost memory, 8 bytes for each.
    """

    size: int
    order: Permutation | None
    """Of the positions [0, size); None where the pool is empty."""
    parent: "Pool | None" = None
    taken: int = 0
    """Units that the parent gave out before: its positions below this."""
    holes: np.ndarray = field(default_factory=_none)
    """Sorted places among the parent's rest of units that are no longer there."""
    added: int = 0
    """The first unit of those that were added (for a first pool: 0, all units count as added)."""
    spent: np.ndarray = field(default_factory=_none)
    """Sorted places among the added units of those that this pass has read before they were taken away."""

    @classmethod
    def first(cls, units: int, key: Sequence[int]) -> "Pool":
        """All of so many units."""
        return cls(size=units, order=Permutation(units, key) if units else None)

    def amended(self, used: int, kept: int, units: int, key: Sequence[int], *, known: int = 0) -> "Pool":
        """What is left after `used` units.

        Args:
            used: how many units of this pool were given out.
            kept: units numbered from here on are taken away.
            units: units [kept, units) are added.
            key: of the new order.
            known: of the added units, those below this number were in an earlier pool of this pass.
        """
        positions = self.positions(np.arange(kept, self._stop))
        holes = np.sort(positions[positions >= used]) - used
        returning = np.arange(kept, known)
        spent = np.flatnonzero(self._given_out(returning, used))
        size = self.size - used - len(holes) + units - kept - len(spent)
        order = Permutation(size, key) if size else None
        return Pool(size=size, order=order, parent=self, taken=used, holes=holes, added=kept, spent=spent)

    @property
    def _left(self) -> int:
        """Units that come from the parent."""
        return self.parent.size - self.taken - len(self.holes) if self.parent else 0

    @property
    def _stop(self) -> int:
        """One past the highest unit."""
        return self.added + self.size - self._left + len(self.spent)

    def units(self, position: np.ndarray) -> np.ndarray:
        """The units that stand at these positions of the order: int64 to int64 of the same shape."""
        assert self.order is not None
        place = self.order(position)
        result = self.added + _nth_without(self.spent, place - self._left)
        old = place < self._left
        if self.parent is not None and old.any():
            result[old] = self.parent.units(self.taken + _nth_without(self.holes, place[old]))
        return result

    def positions(self, unit: np.ndarray) -> np.ndarray:
        """Where these units stand in the order: int64, -1 for a unit that is not in the pool."""
        inside = unit - self.added
        new = (unit >= self.added) & (unit < self._stop) & ~np.isin(inside, self.spent)
        place = self._left + inside - np.searchsorted(self.spent, inside)
        if self.parent is not None:
            above = self.parent.positions(unit) - self.taken
            old = (unit < self.added) & (above >= 0) & ~np.isin(above, self.holes)
            place = np.where(old, above - np.searchsorted(self.holes, above), place)
            new = new | old
        result = np.full(unit.shape, -1, np.int64)
        if new.any():
            assert self.order is not None
            result[new] = self.order.inverse(place[new])
        return result

    def _given_out(self, unit: np.ndarray, used: int) -> np.ndarray:
        """Whether this pool, of which `used` units were given out, or one before it has given these units out."""
        position = self.positions(unit)
        given = (position >= 0) & (position < used)
        given[np.isin(unit - self.added, self.spent)] = True
        return given | self.parent._given_out(unit, self.taken) if self.parent is not None else given


def _nth_without(holes: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The n-th (from 0) whole number that is not in the sorted `holes`."""
    return n + np.searchsorted(holes - np.arange(len(holes)), n, side="right")
