"""Rows that are spread over a whole data set: what a validation reads.

A validation reads few rows of a set that may be large, and whose sources lie one behind the other. So it takes one row
of each of as many stretches of the set as it reads rows, and its mean is that of the whole set.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from roxxel_dist.curriculum.permutation import splitmix64
from roxxel_dist.curriculum.plan import Rows
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.units import Ranges
from roxxel_dist.process.exit_codes import UserError

SHORTEST = 2
"""The fewest tokens of a row: one is predicted from the other."""


class EvenRows:
    """Batches of rows that lie evenly over a data set, the same ones each time: what a `Stream` reads beside a `Plan`.

    The set is cut into W windows of `shape.seq_len` tokens, range by range. The n rows that are read are one of each of
    the n stretches [floor(i W / n), floor((i + 1) W / n)) of windows, at a place in its stretch that a hash of i
    chooses: rows at equal distances would all be beginnings of documents where these have equal lengths. With n = W
    each window is read once. There are at most `steps` batches; the steps and data sets of `shape` are not used. Raises
    UserError: the set has too few tokens for a batch of the shortest rows.
    """

    def __init__(self, ranges: Ranges, shape: Shape, steps: int) -> None:
        length, held = shape.seq_len, sum(tokens for _, tokens in ranges)
        while (fit := _windows(ranges, length) // shape.batch_size) == 0:  # of a small set: shorter rows
            if length == SHORTEST:
                raise UserError(
                    f"{held} tokens are held out, too few for a batch of {shape.batch_size} rows: "
                    f"use a larger val_fraction, a smaller batch_size or more text, or val_fraction 0 for no validation"
                )
            length = max(SHORTEST, length // 2)
        self.datasets: tuple[str, ...] = ("self",)
        self.total_steps: int = min(steps, fit)
        self._ranges = ranges
        self._shape = replace(shape, steps=self.total_steps, seq_len=length, weights=(("self", 1.0),), blend="step")

    def shape_at(self, step: int) -> Shape:
        """The shape of every batch."""
        return self._shape

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, tokens of a row) of every batch."""
        return self._shape.batch_size, self._shape.seq_len

    def datasets_from(self, step: int) -> set[str]:
        """The names of the data sets that are read."""
        return {"self"}

    def copy(self) -> "EvenRows":
        """This one: nothing in it changes."""
        return self

    def rows(self, step: int) -> Rows:
        """The rows of a batch, as `Plan.rows` gives them."""
        size = self._shape.batch_size
        offset = self._offsets[step * size : (step + 1) * size]
        return Rows(np.zeros(size, np.int32), offset, self._shape.seq_len, self._shape.packing == "documents")

    def tokens(self, step: int) -> int:
        """The number of tokens that the batches before `step` have."""
        return step * self._shape.batch_size * self._shape.seq_len

    @cached_property
    def _offsets(self) -> np.ndarray:
        """int64[rows]: the first tokens of all rows, in ascending order."""
        length, count = self._shape.seq_len, self.total_steps * self._shape.batch_size
        windows = _windows(self._ranges, length)
        # Python's numbers: of a large set i x W is beyond int64.
        bounds = np.array([i * windows // count for i in range(count + 1)], np.int64)
        window = bounds[:-1] + (splitmix64(np.uint64(0), np.arange(count)) % np.diff(bounds).astype(np.uint64)).astype(
            np.int64
        )
        before = np.cumsum([0, *(tokens // length for _, tokens in self._ranges)])
        where = np.searchsorted(before, window, side="right") - 1
        starts = np.array([start for start, _ in self._ranges], np.int64)
        return starts[where] + (window - before[where]) * length


def _windows(ranges: Ranges, length: int) -> int:
    return sum(tokens // length for _, tokens in ranges)
