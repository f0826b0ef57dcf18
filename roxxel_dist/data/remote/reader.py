"""Windows of tokens from the mapped cache."""

from collections.abc import Sequence

import numpy as np

from roxxel_dist.data.reader import WindowReader
from roxxel_dist.data.remote.fetch import Fetcher


class RemoteReader(WindowReader):
    """Copies windows as `WindowReader`, after fetching their blocks into the cache.

    `arrays` are parts of the maps of the fetcher's shards, one for each, and `first_tokens` the numbers of the shards'
    first tokens in the data set, int64 [shards].
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], firsts: Sequence[int], name: object, fetcher: Fetcher,
        first_tokens: np.ndarray,
    ) -> None:  # fmt: skip
        super().__init__(arrays, firsts, name)
        self._fetcher, self._first_tokens = fetcher, first_tokens

    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """The windows of `length` tokens from `offsets` on, int64 [R]: a fresh array [R, length] of `dtype`."""
        if not len(offsets):
            return super().read(offsets, length, dtype)
        numbers, first, stop = self._cells(offsets, length)
        most = self._fetcher.cache.capacity // 4
        size = int((self._fetcher.cell_bytes(numbers) * (stop - first)).sum())
        if size > most and len(offsets) > 1:  # so that a small cache does not need to hold all of them at once
            parts = np.array_split(offsets, min(len(offsets), -(-size // max(1, most))))
            return np.concatenate([self.read(part, length, dtype) for part in parts])
        read = super().read
        return self._fetcher.read(numbers, first, stop, lambda: read(offsets, length, dtype))

    def fetch(self, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Fetch the blocks of some windows into the cache, with `documents` also their document ends."""
        if not len(offsets):
            return
        cells = [self._cells(offsets, length)]
        for number in np.unique(cells[0][0]).tolist() if documents else ():
            shard, starts = self._fetcher.shards[number], offsets[cells[0][0] == number] - self._first_tokens[number]
            parts = shard.end_cells(starts, starts + length)
            cells.append((np.full(len(parts), number), parts, parts + 1))
        numbers, first, stop = map(np.concatenate, zip(*cells, strict=True))
        self._fetcher.fetch(numbers, first, stop, urgent=False)

    def _cells(self, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, first block, end) of each window: int64 [R] each."""
        numbers = self.locate(offsets, length)
        size, starts = self._fetcher.cell_bytes(numbers), offsets - self._first_tokens[numbers]
        width = self.dtype.itemsize
        return numbers, starts * width // size, -(-(starts + length) * width // size)
