"""The order of the units in a pass: every stretch of it is spread over the whole data set, in closed form.

The n units are cut in S strata of neighbours (stratified sampling), all of one size or one more. The order visits them
round after round. In round t, place s is of the stratum `reversed(s) xor mask(t)`, where `reversed` turns the bits of s
around (the sequence of van der Corput, 1935; the mask is a digital shift, as in randomised quasi-Monte Carlo): each 2^b
places of a round that begin at a multiple of 2^b are of 2^b different parts of the data set. So the count of a part of
share p in any k places is within a few units of p k, where k draws at random miss it by about sqrt(k p (1 - p)).

Within a stratum, units that are neighbours on disk form blocks, and a few blocks at a time are shuffled: a long run
reads S x BLOCKS_TOGETHER stretches of the data set at a time, not all of it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from roxxel_dist.curriculum.permutation import Permutation, digest, mixed

STRATA_BITS, UNITS_A_STRATUM_BITS = 8, 4
"""There are at most 2^8 strata, of at least 2^4 units each (one stratum, if there are fewer units)."""
BLOCKS_TOGETHER = 4


class SpreadOrder:
    """A bijection of [0, n) chosen by `key`, from places in the order to units.

    Args:
        n: how many units, from 1 to 2^50.
        key: whole numbers >= 0. Different keys give unrelated orders.
        block: neighbouring units that are read at about the same time.
    """

    def __init__(self, n: int, key: Sequence[int], block: int) -> None:
        self.n = n
        bits = max(0, min(STRATA_BITS, n.bit_length() - 1 - UNITS_A_STRATUM_BITS))
        self._strata = 1 << bits
        edges = np.arange(self._strata + 1, dtype=np.int64) * n // self._strata
        self._first, self._size = edges[:-1], np.diff(edges)
        self._rounds: int = n // self._strata
        words = np.frombuffer(digest((*key, 2, 0), 8 * (self._strata + 1)), "<u8")
        self._word = words[0]
        # Each stratum is turned by a number of its own, or all would be read at the same place.
        self._turned = (words[1:] % self._size.astype(np.uint64)).astype(np.int64)
        self._longer = np.flatnonzero(self._size > self._rounds)
        places = range(self._strata)
        self._reversed = np.array([int(f"{place:0{bits}b}"[::-1], 2) for place in places], np.int64)
        self._inside = _BlockOrder(self._rounds, key, block)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """The units at these places (integers in [0, n), any shape): int64 of the same shape."""
        turn, slot = np.divmod(index.astype(np.int64).ravel(), self._strata)
        stratum, place = self._reversed[slot] ^ self._mask(turn), turn
        is_last = turn == self._rounds  # the round of the strata that have one unit more
        if is_last.any():
            stratum[is_last] = self._longer[slot[is_last]]
        place[~is_last] = self._inside(turn[~is_last])
        unit = self._first[stratum] + (place + self._turned[stratum]) % self._size[stratum]
        return unit.reshape(index.shape)

    def _mask(self, turn: np.ndarray) -> np.ndarray:
        """A number below the count of strata for each round, int64."""
        return (mixed(self._word, turn) & np.uint64(self._strata - 1)).astype(np.int64)


class _BlockOrder:
    """A bijection of [0, n) that shuffles blocks of neighbours, and then all numbers of a few blocks at a time.

    Numbers that fill no block are shuffled together with the last blocks.
    """

    def __init__(self, n: int, key: Sequence[int], block: int) -> None:
        self._n, self._key, self._block = n, tuple(key), block
        self._blocks: int = n // block
        self._windows: int = max(1, self._blocks // BLOCKS_TOGETHER)
        self._width: int = BLOCKS_TOGETHER * block
        """Numbers of a window; the last one has the rest too."""

    def __call__(self, index: np.ndarray) -> np.ndarray:
        if self._windows == 1:
            return self._shuffle(0)(index)
        result, window = np.empty_like(index), np.minimum(index // self._width, self._windows - 1)
        for number in np.unique(window).tolist():
            here = window == number
            result[here] = self._shuffle(number)(index[here] - number * self._width)
        place, inside = np.divmod(result, self._block)
        place += window * BLOCKS_TOGETHER
        in_block = place < self._blocks
        place[in_block] = self._order(place[in_block])
        return place * self._block + inside

    @property
    def _order(self) -> Permutation:
        return _permutation(self._blocks, (*self._key, 3, 0))

    def _shuffle(self, window: int) -> Permutation:
        size = self._width if window < self._windows - 1 else self._n - window * self._width
        return _permutation(size, (*self._key, 4, window))


# Chunks that follow each other are of the same window.
@lru_cache(maxsize=256)
def _permutation(n: int, key: tuple[int, ...]) -> Permutation:
    return Permutation(n, key)
