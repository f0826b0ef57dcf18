"""A shard in an object store: blocks are fetched into the cache before they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.format import HEADER_BYTES, Layout, block_count
from roxxel_dist.data.remote.cache import BlockCache, CacheFile
from roxxel_dist.data.remote.index import TABLE_BYTES, TABLE_NUMBERS, ShardEntry
from roxxel_dist.data.shard import DamagedData, Shard
from roxxel_dist.objects.url import ObjectUrl

T = TypeVar("T")
KEPT_PARTS = 64
"""Parts of a shard's document ends that a process keeps in memory."""


class Blocks(Protocol):
    """The interface of `fetch.Fetcher`, which fetches cells into the cache."""

    cache: BlockCache

    def read(self, numbers: np.ndarray, first: np.ndarray, stop: np.ndarray, copy: Callable[[], T]) -> T:
        """The result of `copy` while the cells are present."""
        ...

    def forget(self, shard: "RemoteShard", cells: Sequence[int]) -> None:
        """Remove cells from the cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells of a shard, in the order of the file: blocks of tokens, then parts of 64 KiB of its two tables."""

    layout: Layout
    blocks: int
    end_parts: int
    sum_parts: int

    @classmethod
    def of(cls, layout: Layout) -> "Cells":
        """The cells of a shard with this layout."""
        blocks = block_count(layout.metadata.tokens * layout.dtype.itemsize, layout.block_size)
        parts = (layout.sums_offset - layout.ends_offset, layout.meta_offset - layout.sums_offset)
        end_parts, sum_parts = (-(-size // TABLE_BYTES) for size in parts)
        return cls(layout=layout, blocks=blocks, end_parts=end_parts, sum_parts=sum_parts)

    @property
    def count(self) -> int:
        """The number of cells."""
        return self.blocks + self.end_parts + self.sum_parts

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of the object (first, end) of some cells, all of them blocks or all of one table."""
        layout = self.layout
        if first < self.blocks:
            begin, size, end = HEADER_BYTES, layout.block_size, layout.metadata.tokens * layout.dtype.itemsize
            end += HEADER_BYTES
        elif first < self.blocks + self.end_parts:
            begin, size, end = layout.ends_offset, TABLE_BYTES, layout.sums_offset
            first, stop = first - self.blocks, stop - self.blocks
        else:
            begin, size, end = layout.sums_offset, TABLE_BYTES, layout.meta_offset
            first, stop = first - self.blocks - self.end_parts, stop - self.blocks - self.end_parts
        return begin + first * size, min(begin + stop * size, end)

    @property
    def first_sum(self) -> int:
        """The first cell of the table of checksums."""
        return self.blocks + self.end_parts


class RemoteEnds:
    """The document ends of a shard, fetched on demand, with the needed part of a numpy array's interface."""

    def __init__(self, shard: "RemoteShard") -> None:
        self._shard = shard
        self._parts: dict[int, np.ndarray] = {}

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
        if firsts is None:  # without an index the whole table is fetched
            firsts = np.concatenate(
                [part[:1] for part in self._read(range(self._shard.cells.end_parts))] or [values[:0]]
            )
        parts = firsts.searchsorted(values, side="right") - 1
        counts = np.zeros(values.shape, np.int64)
        wanted = np.unique(parts[parts >= 0])
        for number, part in zip(wanted.tolist(), self._read(wanted.tolist()), strict=True):
            chosen = parts == number
            counts[chosen] = number * TABLE_NUMBERS + part.searchsorted(values[chosen], side="right")
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
        parts, inside = np.divmod(numbers % max(1, len(self)), TABLE_NUMBERS)
        wanted = np.unique(parts)
        for number, part in zip(wanted.tolist(), self._read(wanted.tolist()), strict=True):
            chosen = parts == number
            result[chosen] = part[inside[chosen]]
        return result

    def parts_of(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The parts of 64 KiB to read for the document ends in windows of tokens, int64 [R] each: int64 [N]."""
        firsts, last = self._shard.entry.firsts, self._shard.cells.end_parts
        if firsts is None or not last:
            return np.arange(last)
        low, high = (np.maximum(firsts.searchsorted(at, side="right") - 1, 0) for at in (first, stop - 1))
        return np.unique(np.concatenate([low, high]))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(self[:], dtype)

    def _read(self, wanted: Any) -> list[np.ndarray]:
        """Some parts of 64 KiB: int64 each."""
        known = {number: self._parts[number] for number in wanted if number in self._parts}
        missing = [number for number in wanted if number not in known]
        if missing:
            known |= zip(missing, self._shard.read_parts(missing), strict=True)
            self._parts = dict([*self._parts.items(), *known.items()][-KEPT_PARTS:])
        return [known[number] for number in wanted]


@dataclass(frozen=True, eq=False)
class RemoteShard(Shard):
    """One `.rox` object. `tokens` and `checksums` are maps of the cache, which are zero unless fetched: read them with
    `read`, `damaged_blocks` or through the data set."""

    entry: ShardEntry
    cells: Cells
    number: int
    """The number of the shard in its data set, in the order of opening."""
    cache: BlockCache
    file: CacheFile
    memory: np.ndarray
    """uint8 [file.whole]: zeros, and after the first fetch the map of `file`."""
    present: np.ndarray
    """bool [cells]: the cells that are now in the cache."""
    fetcher: Any = field(repr=False)
    """`Blocks`"""

    @classmethod
    def opened(
        cls, url: ObjectUrl, entry: ShardEntry, cells: Cells, number: int, file: CacheFile, mapped: np.ndarray,
        fetcher: Blocks,
    ) -> "RemoteShard":  # fmt: skip
        """The shard whose cache file will be mapped over `mapped`: read-only uint8."""
        layout, data = cells.layout, mapped.data
        shard = cls(
            path=url,
            layout=layout,
            tokens=np.ndarray(layout.metadata.tokens, layout.dtype, data, HEADER_BYTES),
            document_ends=np.empty(0, np.int64),
            checksums=np.ndarray(cells.blocks, "<u8", data, layout.sums_offset),
            _bytes=mapped[: entry.size],
            entry=entry,
            cells=cells,
            number=number,
            cache=fetcher.cache,
            file=file,
            memory=mapped,
            present=np.ndarray(cells.count, bool, data, file.cells_at),
            fetcher=fetcher,
        )
        object.__setattr__(shard, "document_ends", RemoteEnds(shard))
        return shard

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens `first` to `stop`: a fresh array; missing blocks are fetched."""
        size, width = self.layout.block_size, self.dtype.itemsize
        if first >= stop:
            return self.tokens[:0]
        return self._copy(first * width // size, -(-stop * width // size), self.tokens[first:stop].copy)

    def _copy(self, first: int, stop: int, copy: Callable[[], T]) -> T:
        """The result of `copy` while the cells `first` to `stop` are present."""
        return self.fetcher.read(np.array([self.number]), np.array([first]), np.array([stop]), copy)

    def end_cells(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The cells to read for the document ends in windows of tokens, int64 [R] each: int64 [N]."""
        ends: Any = self.document_ends
        return self.cells.blocks + ends.parts_of(first, stop)

    def read_parts(self, parts: list[int]) -> list[np.ndarray]:
        """Parts of 64 KiB of the document ends, by number: int64 [up to 8192] each."""
        ends, data = self.cells.blocks, self._bytes
        cells = np.array(parts, np.int64) + ends

        def copy() -> list[np.ndarray]:
            spans = (self.cells.span(cell, cell + 1) for cell in cells.tolist())
            return [data[low:high].view("<i8").copy() for low, high in spans]

        return self.fetcher.read(np.full(len(cells), self.number), cells, cells + 1, copy)

    def damaged_blocks(self, blocks: np.ndarray) -> list[int]:
        """An empty list for some blocks, int64 [N], ascending: fetched blocks are verified with their checksums.

        Raises:
            DamagedData: a block is damaged, in the object or in the cache.
        """
        if not len(blocks):
            return []
        sums = np.unique(blocks // TABLE_NUMBERS) + self.cells.first_sum
        cells, check = np.concatenate([blocks, sums]), super().damaged_blocks
        damaged = self.fetcher.read(np.full(len(cells), self.number), cells, cells + 1, lambda: check(blocks))
        if damaged:
            self.fetcher.forget(self, damaged)
            raise DamagedData(
                f"{self.damage(damaged)} in the cache of this host, and was not when it was fetched: its disk has "
                f"changed it. It is thrown away; look after the disk of cache_dir {self.cache.user_folder}, and go on"
            )
        return []

    def damage(self, damaged: list[int]) -> str:
        """The first of some damaged blocks, its tokens and its documents, in words."""
        try:
            return super().damage(damaged)
        except (OSError, ValueError):  # its document is unknown
            return f"{self.path}: block {damaged[0]} is damaged"

    def verify(self) -> None:
        """Fetch missing cells, and verify all checksums. Raises ValueError as `Shard.verify`."""
        for blocks in self.pieces():
            self.refuse(self.damaged_blocks(blocks))

    def verify_tables(self) -> None:
        """Does nothing: each part of a table is verified with its digest when it is fetched."""

    def verify_checksums(self) -> None:
        """Nothing, as `verify_tables`."""

    def verify_document_ends(self) -> None:
        """Nothing, as `verify_tables`."""
