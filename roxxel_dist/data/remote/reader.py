"""Windows of tokens of shards in an object store."""

from collections.abc import Sequence

import numpy as np

from roxxel_dist.data.files.reader import WindowReader
from roxxel_dist.data.remote.fetch import Fetcher


class RemoteReader(WindowReader):
    """Copies windows out of chunks, which are fetched when they are read or before.

    `first_tokens` are the numbers of the shards' first tokens in the data set, int64 [shards].
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        dtype: np.dtype,
        name: object,
        fetcher: Fetcher,
        first_tokens: np.ndarray,
    ) -> None:
        super().__init__([first for first, _ in ranges], [length for _, length in ranges], dtype, name)
        self._fetcher, self._first_tokens = fetcher, first_tokens

    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """The windows of `length` tokens from `offsets` on, int64 [R]: a fresh array [R, length] of `dtype`."""
        numbers = self.locate(offsets, length)
        rows = np.empty((len(offsets), length), self.dtype)
        starts = (offsets - self._first_tokens[numbers]) * self.dtype.itemsize
        self._fetcher.copy(numbers, starts, rows.view(np.uint8))
        return rows.astype(dtype, copy=False)

    def fetch(self, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Fetch the chunks of some windows into the cache, with `documents` also their document ends."""
        numbers = self.locate(offsets, length)
        starts, width = offsets - self._first_tokens[numbers], self.dtype.itemsize
        places = self._fetcher.places(numbers, starts * width, length * width)
        for number in np.unique(numbers).tolist() if documents else ():
            inside = starts[numbers == number]
            ends = self._fetcher.shards[number].end_chunks(inside, inside + length)
            places += [(number, chunk) for chunk in ends.tolist()]
        self._fetcher.fetch(places)
