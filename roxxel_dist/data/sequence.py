"""Tokens in parts of files as one sequence: what it is, its documents, and windows copied out of it."""

import hashlib
import json
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import numpy as np

from roxxel_dist.data.packed import Boundaries
from roxxel_dist.data.part import Io, Part, Reader, TokenFile
from roxxel_dist.data.units import steps_in_a_pass


class TokenSequence(ABC):
    """What reads `Roxxel`: all that asks for no more than the open files."""

    io: Io

    @property
    @abstractmethod
    def _parts(self) -> tuple[Part, ...]:
        """What is read of each file, in order."""

    # -- what it is

    @property
    def shards(self) -> tuple[TokenFile, ...]:
        """The open files, in order: `Shard`s, or `ForeignFile`s where another system wrote them."""
        return tuple(part.shard for part in self._parts)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first token, length) of what may be read of each shard, in tokens from the data set's start."""
        return tuple((part.first + part.low, part.high - part.low) for part in self._parts)

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """int64 [shards]: the number of each file's first token in the data set, whether it may be read or not."""
        return np.array([part.first for part in self._parts], np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens in the ranges, separators included."""
        return sum(length for _, length in self.ranges)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self._parts[0].shard.dtype

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it; None where the data has no vocabulary."""
        return self._parts[0].shard.metadata.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer that made the tokens, or None."""
        return self._parts[0].shard.metadata.tokenizer_fingerprint

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that follow from the contents and the ranges alone, not from the path or the time."""
        content = [[part.shard.metadata.chain, part.low, part.high] for part in self._parts]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    # -- documents

    @property
    def documents(self) -> int:
        """How many documents the ranges hold, one cut by `split` counted on both sides."""
        return sum(part.documents for part in self._parts)

    def __len__(self) -> int:
        return self.documents

    @cached_property
    def _first_document(self) -> list[int]:
        return list(accumulate((part.documents for part in self._parts), initial=0))

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """Documents without their separators: read-only arrays [tokens] that point into the file."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"document {number} of {count}")
        number %= count
        where = bisect_right(self._first_document, number) - 1
        return self._parts[where].document(number - self._first_document[where])

    def __iter__(self) -> Iterator[np.ndarray]:
        for part in self._parts:
            yield from map(part.document, range(part.documents))

    def read_documents(self) -> Iterator[np.ndarray]:
        """All documents in order, as iterating gives them, but read into memory and not views of the mapped files.

        Raises:
            ValueError: a file is cut short. The message names it.
        """
        for part in self._parts:
            yield from part.read_documents()

    # -- windows

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._parts, self.io)

    def read(self, offsets: np.ndarray, length: int, dtype: Any = None) -> np.ndarray:
        """Copy one window of contiguous tokens a row.

        Args:
            offsets: int64 [R], first tokens, counted from the data set's start over all shards.
            length: tokens a window, at least 1.
            dtype: of the result; None: the data set's.

        Returns:
            A fresh array [R, length].

        Raises:
            ValueError: a window is not within one of `ranges`, or with `io="pread"` its file was cut short.
        """
        wanted = self.dtype if dtype is None else np.dtype(dtype)
        return self._reader.read(np.asarray(offsets, np.int64), length, wanted)

    @cached_property
    def _boundaries(self) -> Boundaries:
        return Boundaries(self._parts)

    def segments(self, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Which document each token of some windows belongs to, and where in it the token is.

        Args:
            offsets: int64 [R], the windows' first tokens, as for `read`.
            length: tokens a window, at least 1.

        Returns:
            Two fresh arrays, int32 [R, length]: the number of the document in its window, from 0, and the token's
            position, from 0 at the document's start. A document that began before the window counts from the window's
            start. A separator belongs to the document it ends. See `data.packed`.

        Raises:
            ValueError: a window is not within one of `ranges`, or the document ends of its file are damaged.
        """
        return self._boundaries.segments(np.asarray(offsets, np.int64), length)

    @property
    def reads_ahead(self) -> bool:
        """Whether `prefetch` does anything now: with "mmap" only if batches lately had to wait for the disk."""
        return self._reader.reads_ahead

    def prefetch(self, offsets: np.ndarray, length: int) -> None:
        """Prepare for a `read` of the same windows, some batches from now. It never changes what is read.

        With `io="pread"` a few threads read the windows; with "mmap" the kernel is asked for the pages.

        Raises:
            ValueError: a window is not within one of `ranges`.
        """
        self._reader.prefetch(np.asarray(offsets, np.int64), length)

    def estimate_steps(self, seq_len: int, batch_size: int) -> int:
        """Batches of `batch_size` windows of `seq_len` tokens that one pass over the data set yields."""
        if seq_len < 1 or batch_size < 1:
            raise ValueError(f"seq_len={seq_len}, batch_size={batch_size}: both are at least 1")
        return steps_in_a_pass(self.ranges, seq_len, batch_size)
