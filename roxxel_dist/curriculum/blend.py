"""Which data set each step, or each row, of a blend reads: exact shares, in an order that looks random, in closed form.

A segment's items (steps or rows) are cut in blocks. At a block's end the count of data set i is
round(C_i x) - round(C_(i-1) x), where x is the number of items so far and C the running sums of the weights: within one
of weight x items. Inside a block the quotas that follow from that are put in a keyed order.
"""

from collections.abc import Sequence

import numpy as np

from roxxel_dist.curriculum.permutation import shuffled_blocks

BLOCK = 64
"""Items a block. More where a weight is below 1/64, so that every data set can come up in every block."""


class Blend:
    """The order of data sets in a segment.

    Args:
        weights: positive, one a data set; they are normalised.
        items: length of the segment in steps or rows, at least 1.
        key: whole numbers >= 0 that make this segment's order its own.
    """

    def __init__(self, weights: Sequence[float], items: int, key: Sequence[int]) -> None:
        share = np.asarray(weights, float) / float(sum(weights))
        self.sets = len(share)
        self.items = items
        self._key = tuple(key)
        self._edges = np.cumsum(share)
        self._edges[-1] = 1.0
        self.block = block_length(share)
        """Items of a block; the last one is longer by what does not fill one."""
        # What does not fill a block lengthens the last one: a block never has fewer items than its rounding needs.
        self._blocks = max(1, items // self.block)

    def counts(self, items: int) -> np.ndarray:
        """int64[sets]: how often each data set is read in the first `items` items."""
        if items >= self.items:
            return quota(self._edges, self.items)
        block = self._block_of(items)
        start = block * self.block
        inside, _ = self._block_order(block)
        return quota(self._edges, start) + np.bincount(inside[: items - start], minlength=self.sets)

    def choose(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(int64[n], int64[n]): the data set of each of the items [first, stop), and how often it was read before."""
        if self.sets == 1:
            return np.zeros(stop - first, np.int64), np.arange(first, stop)
        low, high = self._block_of(first), self._block_of(stop - 1)
        orders = [self._full_blocks(low, min(high + 1, self._blocks - 1))] if low < self._blocks - 1 else []
        if high == self._blocks - 1:
            orders.append(self._block_order(high))
        chosen = np.concatenate([order for order, _ in orders])
        ranks = np.concatenate([rank for _, rank in orders])
        offset = low * self.block
        return chosen[first - offset : stop - offset], ranks[first - offset : stop - offset]

    def _block_of(self, item: int) -> int:
        return min(item // self.block, self._blocks - 1)

    def _block_order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(data sets, ranks) of one block of any length."""
        start = block * self.block
        end = start + self.block if block < self._blocks - 1 else self.items
        return self._arrange(block, 1, end - start, np.array([start]), np.array([end]))

    def _full_blocks(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """(data sets, ranks) of the blocks [low, high), all of the ordinary length."""
        starts = np.arange(low, high) * self.block
        return self._arrange(low, high - low, self.block, starts, starts + self.block)

    def _arrange(
        self, first: int, count: int, length: int, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        before = quota(self._edges, starts)
        quotas = quota(self._edges, ends) - before
        in_order = np.repeat(np.tile(np.arange(self.sets), count), quotas.ravel()).reshape(count, length)
        chosen = np.take_along_axis(in_order, shuffled_blocks(first, count, length, self._key), axis=1)
        ranks = np.empty_like(chosen)
        for which in range(self.sets):
            mine = chosen == which
            ranks[mine] = (np.cumsum(mine, axis=1) - 1 + before[:, which, None])[mine]
        return chosen.ravel(), ranks.ravel()


def quota(edges: np.ndarray, items: int | np.ndarray) -> np.ndarray:
    """int64[..., sets]: counts after `items` items (int64[...]), each within one of its share and all exact in sum."""
    ends = np.floor(np.multiply.outer(np.asarray(items, float), edges) + 0.5).astype(np.int64)
    return np.diff(ends, axis=-1, prepend=0)


def block_length(share: np.ndarray) -> int:
    """Items a block, so that the smallest share comes to at least one: rounding then never takes a count back."""
    length = BLOCK
    while length * share.min() < 1:
        length *= 2
    return length
