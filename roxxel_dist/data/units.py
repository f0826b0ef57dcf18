"""Units: the pieces in which a data set is shuffled.

A data set is a list of *ranges*, runs of contiguous tokens on disk (a shard, or its training part). A unit is `size`
contiguous tokens of one range; the remainder at a range's end is not in any unit of that size. Units are found in
closed form: the index is one cumulative count per range, whatever the size of the corpus.
"""

from collections.abc import Sequence

import numpy as np

Ranges = Sequence[tuple[int, int]]
"""(first token, number of tokens) of each range, in tokens from the data set's start."""

WINDOWS_A_UNIT = 8
TOLERATED_LOSS = 0.03
SPREAD, APART = 1, 2
"""Orders of a plan. Every stretch of units is spread over the whole data set; with `APART` each data set also begins
its next pass on its own."""


def unit_size(ranges: Ranges, longest: int) -> int:
    """Tokens per unit for windows of at most `longest` tokens.

    A unit of 8 windows can be read by a later phase of longer rows. On a small corpus, or one of many small shards, it
    would leave much unread, so it shrinks until at least 97 % of the tokens that fit in any window are in a unit. It is
    a multiple of `longest`: at least `longest` itself, even if no range has that many tokens.
    """
    lengths = np.array([length for _, length in ranges], np.int64)
    best = int((lengths // longest).sum()) * longest  # the coverage of units of one window
    windows = WINDOWS_A_UNIT
    while windows > 1 and int((lengths // (windows * longest)).sum()) * windows * longest < (1 - TOLERATED_LOSS) * best:
        windows //= 2
    return windows * longest


def rows_in_a_pass(ranges: Ranges, seq_len: int, longest: int | None = None) -> int:
    """Windows of `seq_len` tokens in one pass, if no window is longer than `longest` tokens."""
    unit = unit_size(ranges, longest or seq_len)
    return Units(ranges, unit).count * (unit // seq_len)


def steps_in_a_pass(ranges: Ranges, seq_len: int, batch_size: int) -> int:
    """Batches of `batch_size` windows of `seq_len` tokens in one pass."""
    return rows_in_a_pass(ranges, seq_len) // batch_size


class Units:
    """The units of `size` tokens in some ranges, numbered from 0 in the order of the corpus."""

    def __init__(self, ranges: Ranges, size: int) -> None:
        self.ranges = ranges
        self.size = size
        counts = np.array([length // size for _, length in ranges], np.int64)
        self._before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._starts = np.array([start for start, _ in ranges], np.int64)

    @property
    def count(self) -> int:
        """The number of units."""
        return int(self._before[-1])

    @property
    def tokens(self) -> int:
        """Tokens of all ranges, including the remainders outside units."""
        return sum(length for _, length in self.ranges)

    def start(self, unit: np.ndarray) -> np.ndarray:
        """The first token of each unit: int64 ids of any shape to int64 offsets of the same shape."""
        where = np.searchsorted(self._before, unit, side="right") - 1
        return self._starts[where] + (unit - self._before[where]) * self.size
