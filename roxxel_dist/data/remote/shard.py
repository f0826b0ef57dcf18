"""A shard in an object store: chunks of it are fetched when they are read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from roxxel_dist.data.files.format import HEADER_BYTES, ShardLayout
from roxxel_dist.data.files.shard import DamagedData, Shard
from roxxel_dist.data.remote.index import TABLE_NUMBERS, ShardEntry
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError

CHUNK_BYTES = 1 << 14
"""Bytes of a chunk of tokens, rounded down to whole blocks. The units of a plan are scattered, and 8 windows of 2,049
tokens of 2 bytes are 33 KB: larger chunks would bring more that is not read than is read while the cache is new."""

Place = tuple[int, int]
"""The number of a shard in its data set, and of a chunk in the shard."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A verified part of an object."""

    data: np.ndarray
    """Read-only uint8."""
    damaged: Sequence[int] = ()
    """The blocks of the shard in it that do not match their checksums; of a table, the chunk itself."""


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of a shard, in the order of the file: blocks of tokens, then parts of 64 KiB of its two tables.
    Without an index, which has a digest for each part, a table is one chunk."""

    layout: ShardLayout
    size: int
    """Bytes of a chunk of tokens, whole blocks."""
    numbers: int
    """Numbers of a chunk of a table; the last one may have fewer."""
    tokens: int
    """Chunks of tokens."""
    ends: int
    """Chunks of the document ends."""
    sums: int
    """Chunks of the checksums."""

    @classmethod
    def of_layout(cls, layout: ShardLayout, *, has_index: bool) -> "Chunks":
        """The chunks of a shard with this layout."""
        size = max(1, CHUNK_BYTES // layout.block_size) * layout.block_size
        tokens = -(-layout.metadata.tokens * layout.dtype.itemsize // size)
        tables = (layout.sums_offset - layout.ends_offset, layout.meta_offset - layout.sums_offset)
        numbers = TABLE_NUMBERS if has_index else max(TABLE_NUMBERS, *(table // 8 for table in tables))
        ends, sums = (-(-table // (8 * numbers)) for table in tables)
        return cls(layout=layout, size=size, numbers=numbers, tokens=tokens, ends=ends, sums=sums)

    @property
    def first_sum(self) -> int:
        """The first chunk of the checksums."""
        return self.tokens + self.ends

    def table(self, chunk: int) -> tuple[int, int] | None:
        """The chunks (first, end) of the table that has a chunk; None for a chunk of tokens."""
        if chunk < self.tokens:
            return None
        return (self.tokens, self.first_sum) if chunk < self.first_sum else (self.first_sum, self.first_sum + self.sums)

    def span(self, chunk: int) -> tuple[int, int]:
        """The bytes of the object (first, end) of a chunk."""
        layout, table = self.layout, self.table(chunk)
        if table is None:
            begin, size, end = HEADER_BYTES, self.size, layout.metadata.tokens * layout.dtype.itemsize + HEADER_BYTES
        elif chunk < self.first_sum:
            begin, size, end = layout.ends_offset, 8 * self.numbers, layout.sums_offset
        else:
            begin, size, end = layout.sums_offset, 8 * self.numbers, layout.meta_offset
        number = chunk - table[0] if table else chunk
        return begin + number * size, min(begin + (number + 1) * size, end)

    def blocks(self, chunk: int) -> tuple[int, int]:
        """The blocks (first, end) in a chunk of tokens."""
        start, stop = (at - HEADER_BYTES for at in self.span(chunk))
        return start // self.layout.block_size, -(-stop // self.layout.block_size)

    def sums_of(self, chunk: int) -> range:
        """The chunks that have the checksums of a chunk of tokens."""
        first, stop = self.blocks(chunk)
        return range(self.first_sum + first // self.numbers, self.first_sum + (stop - 1) // self.numbers + 1)


class RemoteTokens:
    """The tokens of a shard, fetched on demand, with the needed part of a numpy array's interface."""

    def __init__(self, shard: "RemoteShard") -> None:
        self._shard = shard
        self.nbytes: int = len(self) * shard.dtype.itemsize

    def __len__(self) -> int:
        return self._shard.metadata.tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        first, stop, step = index.indices(len(self))
        return self._shard.read(first, stop)[::step]


class RemoteEnds:
    """The document ends of a shard, fetched on demand, with the needed part of a numpy array's interface."""

    def __init__(self, shard: "RemoteShard") -> None:
        self._shard = shard

    def __len__(self) -> int:
        return self._shard.metadata.documents

    def searchsorted(self, tokens: Any, side: Literal["right"] = "right") -> Any:
        """The number of documents that end at or before each token."""
        if np.ndim(tokens) == 0:
            counts = [count for target, count, _ in self._shard.entry.cuts if target == tokens]
            return np.int64(counts[0]) if counts else self.searchsorted(np.array([tokens]), side)[0]
        if side != "right":
            raise UserError(f"side is {side!r}: only the documents that end at or before a token are counted")
        values = np.asarray(tokens, np.int64)
        firsts = self._shard.entry.firsts
        if firsts is None:  # without an index the table is one chunk
            firsts = np.zeros(self._shard.chunks.ends, np.int64)
        parts = firsts.searchsorted(values, side="right") - 1
        counts = np.zeros(values.shape, np.int64)
        wanted = np.unique(parts[parts >= 0]).tolist()
        for number, part in zip(wanted, self._shard.read_ends(wanted), strict=True):
            chosen = parts == number
            counts[chosen] = number * self._shard.chunks.numbers + part.searchsorted(values[chosen], side="right")
        return counts

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self[np.arange(*index.indices(len(self)))]
        numbers = np.asarray(index, np.int64)
        if numbers.ndim == 0:
            ends = [end for _, count, end in self._shard.entry.cuts if count and count - 1 == numbers]
            return np.int64(ends[0]) if ends else self[numbers[None]][0]
        result = np.empty(numbers.shape, np.int64)
        if numbers.size and not (-len(self) <= numbers.min() and numbers.max() < len(self)):
            raise IndexError(f"{self._shard.path} has {len(self)} document ends")
        parts, inside = np.divmod(numbers % max(1, len(self)), self._shard.chunks.numbers)
        wanted = np.unique(parts).tolist()
        for number, part in zip(wanted, self._shard.read_ends(wanted), strict=True):
            chosen = parts == number
            result[chosen] = part[inside[chosen]]
        return result

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(self[:], dtype)


@dataclass(frozen=True, eq=False)
class RemoteShard(Shard):
    """A `.rox` object in a bucket. `tokens` and `document_ends` fetch what is read of them; `checksums` is empty."""

    entry: ShardEntry
    chunks: Chunks
    number: int
    """The number of the shard in its data set, in the order of opening."""
    fetcher: Any = field(repr=False)
    """The `fetch.Fetcher` of its data set."""

    @classmethod
    def of_entry(
        cls, url: ObjectUrl, entry: ShardEntry, layout: ShardLayout, number: int, fetcher: Any
    ) -> "RemoteShard":
        """The shard of an entry with this layout."""
        none: Any = np.empty(0, np.uint8)
        chunks = Chunks.of_layout(layout, has_index=entry.sums is not None)
        shard = cls(url, layout, none, none, none, none, entry, chunks, number, fetcher)
        object.__setattr__(shard, "tokens", RemoteTokens(shard))
        object.__setattr__(shard, "document_ends", RemoteEnds(shard))
        return shard

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens `first` to `stop`: a fresh array."""
        tokens = np.empty(max(0, stop - first), self.dtype)
        if len(tokens):
            starts = np.array([first * self.dtype.itemsize])
            self.fetcher.copy(np.array([self.number]), starts, tokens.view(np.uint8)[None])
        return tokens

    def end_chunks(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The chunks to read for the document ends in windows of tokens, int64 [R] each: int64 [N]."""
        firsts, parts = self.entry.firsts, np.arange(self.chunks.ends)
        if firsts is not None and len(parts):
            low, high = (np.maximum(firsts.searchsorted(at, side="right") - 1, 0) for at in (first, stop - 1))
            parts = np.unique(np.concatenate([low, high]))
        return self.chunks.tokens + parts

    def read_ends(self, parts: Iterable[int]) -> list[np.ndarray]:
        """Chunks of the document ends, by number in their table: int64 each."""
        places = [(self.number, self.chunks.tokens + part) for part in parts]
        chunks = self.fetcher.take(places)
        for place in places:
            if chunks[place].damaged:
                raise damage_of(self, place[1], chunks[place].damaged)
        return [chunks[place].data.view("<i8") for place in places]

    def damaged_blocks(self, blocks: np.ndarray) -> list[int]:
        """An empty list for some blocks, int64 [N], ascending: chunks are verified when they are fetched. Raises
        DamagedData: a block is damaged in the bucket."""
        per_chunk, wanted = self.chunks.size // self.layout.block_size, set(blocks.tolist())
        places = [(self.number, chunk) for chunk in np.unique(blocks // per_chunk).tolist()]
        for (_, number), chunk in self.fetcher.take(places).items():
            if damaged := sorted(wanted.intersection(chunk.damaged)):
                raise damage_of(self, number, damaged)
        return []

    def damage(self, damaged: list[int]) -> str:
        """The first of some damaged blocks, its tokens and its documents, in words."""
        try:
            return super().damage(damaged)
        except (OSError, ValueError):  # its document is unknown
            return f"{self.path}: block {damaged[0]} is damaged"

    def verify(self) -> None:
        """Fetch missing chunks, and verify all checksums. Raises ValueError as `Shard.verify`."""
        for blocks in self.pieces():
            self.damaged_blocks(blocks)

    def verify_tables(self) -> None:
        """Does nothing: each part of a table is verified with its digest when it is fetched."""

    def verify_checksums(self) -> None:
        """Does nothing, as `verify_tables`."""

    def verify_document_ends(self) -> None:
        """Does nothing, as `verify_tables`."""


def damage_of(shard: RemoteShard, chunk: int, damaged: Sequence[int]) -> DamagedData:
    """The error that names the first damaged block of a chunk, or the table that the chunk is of."""
    cure = (
        f"does not agree with its checksum, fetched twice. `roxxel-dist data verify {shard.path.parent}` names all "
        f"that is damaged; copy the object again from its source and go on"
    )
    if shard.chunks.table(chunk):
        name = "checksums" if chunk >= shard.chunks.first_sum else "document ends"
        return DamagedData(f"{shard.path}: the table of {name} {cure}")
    return DamagedData(f"{shard.damage(list(damaged))}: it {cure}")
