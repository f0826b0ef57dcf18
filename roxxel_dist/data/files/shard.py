"""A `.rox` file: read in place through a memory map, written in one pass. `format.py` has its layout."""

import os
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from roxxel_dist.data.files.format import (
    HEADER_BYTES,
    LARGEST_BLOCK,
    MOST_SHARD_BYTES,
    Metadata,
    ShardLayout,
    block_count,
    chain_of,
    check_range,
    checksum,
    npy_header,
    offsets,
    pack_end,
    parse,
    smallest_dtype,
    storage_dtype,
)
from roxxel_dist.data.files.reader import map_files
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError

DEFAULT_BLOCK_SIZE = 4096
WRITE_BYTES = 1 << 20
PIECE_TOKENS = 1 << 17
"""Tokens of a document that are copied at a time."""
PIECE_BYTES = 1 << 24
HASHED_BYTES = 1 << 20
"""Bytes of blocks that are copied and hashed without a pause."""


class DamagedData(UserError):
    """The tokens read differ from those written, or are ids that the model does not have."""


@dataclass(frozen=True, eq=False)
class Shard:
    """An open `.rox` file. Opening is O(1): it checks the size, the footer and the metadata, and reads nothing else.

    The file stays mapped as long as this object or an array taken from it lives.
    """

    offset: ClassVar[int] = HEADER_BYTES
    """The byte offset of the tokens in the file."""
    path: Path | ObjectUrl
    layout: ShardLayout
    tokens: np.ndarray
    """The tokens, separators included: read-only [tokens] in the file's dtype."""
    document_ends: np.ndarray
    """The end of each document, exclusive, separator included: read-only int64 [documents], in tokens."""
    checksums: np.ndarray
    """The xxh3-64 of each block of token bytes: read-only uint64 [blocks]."""
    _bytes: np.ndarray = field(repr=False)
    """The whole file: read-only uint8."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Shard":
        """Map a file.

        Raises ValueError: it is not one complete ROXXEL03 file; the message names it. FileNotFoundError: there is no
        such file.
        """
        path = Path(path)
        return cls.of_file(path, map_files([path])[0])

    @classmethod
    def of_file(cls, path: Path, mapped: np.ndarray) -> "Shard":
        """The shard in an already mapped file: read-only uint8 [file size]. Raises ValueError as `open` does."""
        layout = parse(path, mapped.data)
        blocks = block_count(layout.metadata.tokens * layout.dtype.itemsize, layout.block_size)
        return cls(
            path=path,
            layout=layout,
            tokens=np.ndarray(layout.metadata.tokens, layout.dtype, mapped.data, HEADER_BYTES),
            document_ends=np.ndarray(layout.metadata.documents, "<i8", mapped.data, layout.ends_offset),
            checksums=np.ndarray(blocks, "<u8", mapped.data, layout.sums_offset),
            _bytes=mapped,
        )

    @property
    def metadata(self) -> Metadata:
        """The metadata of the file."""
        return self.layout.metadata

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self.layout.dtype

    @property
    def blocks(self) -> int:
        """The number of blocks of tokens, which have a checksum each."""
        return block_count(self.layout.metadata.tokens * self.layout.dtype.itemsize, self.layout.block_size)

    def follows(self, previous: "Shard | None") -> bool:
        """Whether this shard was written directly after `previous` (None: as the first of a data set)."""
        layout, before = self.layout, previous.metadata.chain if previous else ""
        chain = chain_of(before, layout.metadata, layout.dtype, layout.ends_checksum, layout.sums_checksum)
        return chain == layout.metadata.chain

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens `first` to `stop`: read-only [stop - first], in the file."""
        return self.tokens[first:stop]

    def verify(self) -> None:
        """Read the whole file and compare it with its checksums.

        Raises ValueError: something differs; the message names the file and, for tokens, the block and the document.
        """
        self.verify_tables()
        self.refuse(self.damaged_blocks(np.arange(self.blocks)))

    def verify_tables(self) -> None:
        """Check everything except the tokens: size, header, tables, metadata and footer. Raises ValueError as `verify`
        does."""
        size = os.stat(str(self.path)).st_size
        if size != len(self._bytes):
            raise UserError(f"{self.path}: {size} bytes now, {len(self._bytes)} when it was opened. Write it again")
        parse(self.path, self._bytes.data)
        self.verify_checksums()
        self.verify_document_ends()
        ends = self.document_ends
        check_ends(self.path, ends, len(self.tokens))
        if self._bytes[HEADER_BYTES + self.tokens.nbytes : self.layout.ends_offset].any():
            raise self._damaged("the bytes between tokens and document ends are not zero")
        if self.metadata.index == 0 and not self.follows(None):
            raise self._damaged("the chain fingerprint is wrong")

    def verify_checksums(self) -> None:
        """Check the table of checksums itself. Raises ValueError if it is damaged."""
        if checksum(self.checksums.data) != self.layout.sums_checksum:
            raise self._damaged("the table of checksums is damaged")

    def verify_document_ends(self) -> None:
        """Check the table of document ends. Raises ValueError if it is damaged."""
        if checksum(self.document_ends.data) != self.layout.ends_checksum:
            raise self._damaged("the document ends are damaged")

    def _damaged(self, problem: str) -> ValueError:
        return UserError(f"{self.path}: {problem}. Write the file again from its source")

    def pieces(self) -> list[np.ndarray]:
        """The blocks in pieces of about 16 MiB: int64 each."""
        blocks, step = np.arange(self.blocks), max(1, PIECE_BYTES // self.layout.block_size)
        return [blocks[first : first + step] for first in range(0, len(blocks), step)]

    def damaged_blocks(self, blocks: np.ndarray) -> list[int]:
        """The blocks among `blocks`, int64 [N], ascending, that do not match their checksums."""
        size, data = self.layout.block_size, self.tokens.view(np.uint8)
        whole, step = len(data) // size, max(1, HASHED_BYTES // size)
        table = data[: whole * size].reshape(-1, size)
        damaged: list[int] = []
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            # Copy first: while a page is read from disk, numpy lets other threads run, but xxhash does not. Digests
            # stay bytes: conversion to Python numbers would take as long as the checksums.
            rows: Any = np.take(table, part[part < whole], axis=0)
            digests = b"".join(map(xxhash.xxh3_64_digest, rows))
            if part[-1] >= whole:
                digests += xxhash.xxh3_64_digest(data[whole * size :].data)
            damaged += part[np.frombuffer(digests, ">u8") != self.checksums[part]].tolist()
        return damaged

    def refuse(self, damaged: list[int]) -> None:
        """Raise if there is a damaged block: ValueError, naming the first, its tokens and its documents."""
        if damaged:
            blocks = f"{len(damaged)} of {self.blocks} blocks are"
            raise UserError(f"{self.damage(damaged)}; {blocks}. Write the file again from its source")

    def damage(self, damaged: list[int]) -> str:
        """A message about the first damaged block: its tokens and its documents."""
        return describe_damage(self.path, self.layout, self.document_ends, damaged)


def describe_damage(path: object, layout: ShardLayout, ends: np.ndarray, damaged: list[int]) -> str:
    """A message about the first damaged block of a shard: its tokens and its documents."""
    size, width = layout.block_size, layout.dtype.itemsize
    first = damaged[0] * size // width
    last = (min((damaged[0] + 1) * size, layout.metadata.tokens * width) - 1) // width
    low, high = ends.searchsorted(np.array([first, last]), side="right")
    documents = f"document {low}" if low == high else f"documents {low} to {high}"
    return f"{path}: block {damaged[0]} (tokens {first} to {last}, {documents}) is damaged"


def check_ends(path: object, ends: np.ndarray, tokens: int) -> None:
    """Raises ValueError, naming `path`, unless document ends ascend up to the last token."""
    if np.any(np.diff(ends, prepend=0) < 0) or ends[-1:].sum() != tokens:
        raise UserError(f"{path}: the document ends do not cover the tokens. Write the file again from its source")


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of `Roxxel.write`; see its arguments. A shard is written with a dtype, and a separator of it or None."""

    separator: Any = b"\x00"
    block_size: int = DEFAULT_BLOCK_SIZE
    max_shard_bytes: int | None = None
    dtype: Any = None
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, LARGEST_BLOCK, "bytes of a checksum")
        if self.max_shard_bytes is not None:
            check_range("max_shard_bytes", self.max_shard_bytes, MOST_SHARD_BYTES, "bytes of tokens in a shard")
        if self.vocab_size is not None:
            smallest_dtype(self.vocab_size)

    def continue_from(self, last: Metadata, dtype: np.dtype, path: object) -> "WriteOptions":
        """The options for data appended after the shard at `path`, which gives the missing ones."""
        existing = {
            "dtype": dtype,
            "vocab_size": last.vocab_size,
            "tokenizer_fingerprint": last.tokenizer_fingerprint,
        }
        for name, there in existing.items():
            given = getattr(self, name)
            if given is not None and (storage_dtype(given) if name == "dtype" else given) != there:
                raise UserError(
                    f"{name}={given}: the data set appended to has {there} ({path}). "
                    "Append what fits, or write a new data set"
                )
        return replace(self, **existing)


class ShardWriter:
    """Writes one shard at `path`, document by document, in about a megabyte of memory plus 8 bytes per document and
    block. The file is complete only after `finish`: write under a temporary name that no reader opens."""

    def __init__(self, path: Path, settings: WriteOptions, *, after: Metadata | None = None) -> None:
        self.path = path
        self.settings = settings
        self.tokens: int = 0
        self._after = after
        self._text_bytes = self._counted_bytes = 0
        self._ends = array("q")
        self._sums = array("Q")
        self._pending = bytearray()
        self._tail = b""
        if settings.separator is not None:
            self._tail = np.array([settings.separator], settings.dtype).tobytes()
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    @property
    def token_bytes(self) -> int:
        """Bytes of tokens added so far, separators included."""
        return self.tokens * self.settings.dtype.itemsize

    def add(self, document: np.ndarray, text_bytes: int = 0, counted_bytes: int = 0) -> None:
        """Append one document, [tokens] of the shard's dtype, and the separator; see `Metadata` for its bytes."""
        self._text_bytes += text_bytes
        self._counted_bytes += counted_bytes
        for start in range(0, len(document), PIECE_TOKENS):
            self._add(np.ascontiguousarray(document[start : start + PIECE_TOKENS]).data.cast("B"))
        self._add(self._tail)
        self.tokens += len(document) + bool(self._tail)
        self._ends.append(self.tokens)

    def _add(self, piece: bytes | memoryview) -> None:
        self._pending += piece
        if len(self._pending) >= max(WRITE_BYTES, self.settings.block_size):
            self._write_blocks(len(self._pending) // self.settings.block_size * self.settings.block_size)

    def _write_blocks(self, size: int) -> None:
        with memoryview(self._pending) as pending:
            for start in range(0, size, self.settings.block_size):
                self._sums.append(checksum(pending[start : min(start + self.settings.block_size, size)]))
            self._file.write(pending[:size])
        del self._pending[:size]

    def finish(self) -> Metadata:
        """Write the buffered tokens, the tables and the footer, and sync the file to disk."""
        self._write_blocks(len(self._pending))
        dtype, after = self.settings.dtype, self._after
        ends, sums = np.array(self._ends, "<i8"), np.array(self._sums, "<u8")
        ends_offset, sums_offset, meta_offset = offsets(dtype, self.tokens, len(ends), self.settings.block_size)
        self._file.write(bytes(ends_offset - HEADER_BYTES - self.token_bytes))
        self._file.write(ends.tobytes() + sums.tobytes())
        ends_checksum, sums_checksum = checksum(ends.data), checksum(sums.data)
        metadata = Metadata(
            tokens=self.tokens, documents=len(self._ends), vocab_size=self.settings.vocab_size,
            tokenizer_fingerprint=self.settings.tokenizer_fingerprint, separator=self.settings.separator,
            index=after.index + 1 if after else 0, first_token=after.first_token + after.tokens if after else 0,
            first_document=after.first_document + after.documents if after else 0, chain="",
            text_bytes=self._text_bytes or None, counted_bytes=self._counted_bytes if self._text_bytes else None,
        )  # fmt: skip
        chain = chain_of(after.chain if after else "", metadata, dtype, ends_checksum, sums_checksum)
        layout = ShardLayout(
            metadata=replace(metadata, chain=chain), dtype=dtype, block_size=self.settings.block_size,
            ends_offset=ends_offset, sums_offset=sums_offset, meta_offset=meta_offset,
            ends_checksum=ends_checksum, sums_checksum=sums_checksum,
        )  # fmt: skip
        self._file.write(pack_end(layout))
        self._file.seek(0)
        self._file.write(npy_header(dtype, self.tokens))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return layout.metadata

    def abort(self) -> None:
        """Close and remove the unfinished file."""
        try:
            self._file.close()  # flushes its buffer, which raises on a full disk
        finally:
            self.path.unlink(missing_ok=True)
