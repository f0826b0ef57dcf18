"""The data set of each step, or each row, of a blend: exact shares in an order that looks random, in closed form.

Let w_i be the weights, whose sum is 1, and C_i = w_1 + ... + w_i. After x items (steps or rows) of a segment the count
of data set i is

    q_i(x) = round(C_i x) - round(C_(i-1) x)        (C_0 = 0, C_n = 1)

So the counts sum to x exactly, and each is within one of w_i x: two numbers are rounded, each by at most 1/2. This is
cumulative rounding (error diffusion along the data sets), which needs no table of remainders as apportionment does.

From one item to the next q_i may fall: round(C_i x) may stay where round(C_(i-1) x) grows. So items are cut in blocks
of b items, with b w_i >= 1 for every i, and block k gives data set i the quota q_i((k + 1) b) - q_i(k b). It is the
difference of two numbers that are each less than 1 away from b C_i and b C_(i-1), so it is above b w_i - 2 >= -1, and
never negative. The last block also has the items that fill none. A keyed permutation of each block orders its quotas.
Counts before any item are q(k b) and what comes before it in its block: O(b), however far it is.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import floor

import numpy as np

from roxxel_dist.curriculum.permutation import shuffled_blocks

BLOCK = 64
"""Items per block, the b above. More where a weight is below 1/64."""


class Mixture:
    """The order of data sets in a segment of `items` steps or rows, by positive weights, one a data set."""

    def __init__(self, weights: Sequence[float], items: int, key: Sequence[int]) -> None:
        self.cumulative: list[float] = cumulative_weights(weights)
        self.size: int = len(self.cumulative)
        """How many data sets there are."""
        self.items = items
        self.weights: tuple[float, ...] = tuple(weights)
        self._key = tuple(key)
        self.block: int = BLOCK
        """Items of a block; the last one also has the remainder."""
        while self.block * min(weights) / sum(weights) < 1:  # the smallest share is an item: then no quota is negative
            self.block *= 2
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
        # round(C_i (k + 1) b) - round(C_i k b): data set i has the places from its predecessor's end to its own.
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
