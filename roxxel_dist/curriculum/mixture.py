"""Which data set each step, or each row, of a blend reads: exact shares, in an order that looks random, in closed form.

A segment's items (steps or rows) are cut in blocks. At a block's end the count of data set i is
round(C_i x) - round(C_(i-1) x), where x is the number of items so far and C the running sums of the weights: within one
of weight x items. Inside a block the quotas that follow from that are put in a keyed order.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import floor

import numpy as np

from roxxel_dist.curriculum.permutation import shuffled_blocks

BLOCK = 64
"""Items a block. More where a weight is below 1/64, so that every data set can come up in every block."""


class Mixture:
    """The order of data sets in a segment of `items` steps or rows, by positive weights, one a data set."""

    def __init__(self, weights: Sequence[float], items: int, key: Sequence[int]) -> None:
        self.cumulative: list[float] = cumulative_weights(weights)
        self.size: int = len(self.cumulative)
        """How many data sets there are."""
        self.items = items
        self.weights: tuple[float, ...] = tuple(weights)
        self._key = tuple(key)
        self.block: int = block_length(min(weights) / sum(weights))
        """Items of a block; the last one also has the remainder."""
        # The remainder makes the last block longer: no block has fewer items than its rounding needs.
        self._blocks = max(1, items // self.block)

    def counts(self, items: int) -> np.ndarray:
        """int64[size]: how often each data set is read in the first `items` items."""
        if items >= self.items:
            return np.array(quota(self.cumulative, self.items))
        return self.choose(items, items + 1)[1]

    def choose(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The data set of each of the items [first, stop), int64, and int64[size]: how often each is before."""
        if self.size == 1:
            return np.zeros(stop - first, np.int64), np.array([first])
        low = self._block_of(first)
        start = low * self.block
        chosen = self._blocks_order(low, self._block_of(stop - 1))
        before = quota(self.cumulative, start) + np.bincount(chosen[: first - start], minlength=self.size)
        return chosen[first - start : stop - start], before

    def _block_of(self, item: int) -> int:
        return min(item // self.block, self._blocks - 1)

    def _blocks_order(self, low: int, high: int) -> np.ndarray:
        """The data sets of the blocks from `low` to `high`, both included."""
        last = self._blocks - 1
        if high < last:
            return self._arrange(low, high + 1 - low, self.block)
        of_last = self._arrange(last, 1, self.items - last * self.block)
        return np.concatenate([self._arrange(low, last - low, self.block), of_last]) if low < last else of_last

    def _arrange(self, first: int, count: int, length: int) -> np.ndarray:
        """The data sets of some neighbouring blocks of one length, one block behind the other."""
        starts = np.arange(first, first + count)[:, None] * self.block
        cumulative = np.array(self.cumulative)
        # Inside the block: data set i has the places from its predecessor's end to its own.
        ends = np.floor((starts + length) * cumulative + 0.5).astype(np.int64)
        ends -= np.floor(starts * cumulative + 0.5).astype(np.int64)
        places = shuffled_blocks(first, count, length, self._key)
        chosen = np.zeros((count, length), np.int64)
        for number in range(self.size - 1):
            chosen += places >= ends[:, number, None]
        return chosen.ravel()


def cumulative_weights(weights: Sequence[float]) -> list[float]:
    """The running sums of the normalised weights."""
    total = float(sum(weights))
    sums = list(accumulate(weight / total for weight in weights))
    sums[-1] = 1.0
    return sums


def quota(cumulative: Sequence[float], items: int) -> list[int]:
    """Counts after `items` items, each within one of its share and all exact in sum."""
    ends = [floor(items * weight + 0.5) for weight in cumulative]
    return [end - before for end, before in zip(ends, [0, *ends], strict=False)]


def block_length(least: float) -> int:
    """Items a block, so that the smallest share comes to at least one: rounding then never takes a count back."""
    length = BLOCK
    while length * least < 1:
        length *= 2
    return length
