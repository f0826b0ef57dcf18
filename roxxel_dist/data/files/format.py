"""The layout of one ROXXEL03 file (`.rox`), and the checks that do not read the tokens.

All numbers are little-endian. T tokens of I bytes, D documents, B = ceil(T * I / block_size) blocks:

    0         4096 bytes   .npy header, version 1.0, padded with spaces: a 1-D array of T elements
    4096      T * I bytes  the tokens
    ...       0-7 bytes    zeros up to a multiple of 8
    ends      8 * D bytes  int64: where each document ends, exclusive, in tokens; its separator belongs to it
    sums      8 * B bytes  uint64: xxh3-64 of each block of token bytes; the last block may be shorter
    meta      M bytes      the metadata: a JSON object (see `Metadata`), no time, no path
    footer    96 bytes     T, dtype (8 bytes, NUL-padded), block_size, D, and the offsets `ends`, `sums`, `meta` and
                           M (int64); the xxh3-64 of the document ends, of the checksum table, and of the metadata
                           followed by the footer's first 80 bytes (uint64); the 8 bytes "ROXXEL03"

`np.load(path, mmap_mode="r")` reads the tokens and ignores the rest. Documents have no gaps between them: the first
begins at token 0 and the last ends at token T.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

MAGIC = b"ROXXEL03"
HEADER_BYTES = 4096
FOOTER = struct.Struct("<q8s6q3Q8s")
SIGNED_BYTES = FOOTER.size - 16
REPLACE = (
    "Copy it again from where it is whole; or write it again: `roxxel-dist data build TEXT --out DIR --overwrite`, "
    "in a program Roxxel(PATH, overwrite=True).write(DOCUMENTS)"
)
DTYPES = frozenset({"|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"})


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a shard: the fields of its JSON object, which has exactly these keys, sorted; without the last
    two where they are None."""

    tokens: int
    documents: int
    vocab_size: int | None
    """Ids are below it; None if the data has no vocabulary."""
    tokenizer_fingerprint: str | None
    separator: int | float | None
    """The last element of every document, or None without separators."""
    index: int
    """The shard's number in its data set, from 0."""
    first_token: int
    first_document: int
    """Tokens and documents in the shards before this one."""
    chain: str
    """blake2b-128 in hex of the previous shard's chain and of this shard's checksums and metadata."""
    text_bytes: int | None = None
    """UTF-8 bytes of the documents' texts; None where they are not known, or those of the tokens."""
    counted_bytes: int | None = None
    """The bytes of the same documents by the table of the tokenizer, which may change a text."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        optional = ("text_bytes", "counted_bytes")
        return {name: value for name, value in vars(self).items() if name not in optional or value is not None}


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The byte offsets of the parts of one file, and the checksums in its footer."""

    metadata: Metadata
    dtype: np.dtype
    block_size: int
    ends_offset: int
    sums_offset: int
    meta_offset: int
    ends_checksum: int
    sums_checksum: int


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The xxh3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def block_count(token_bytes: int, block_size: int) -> int:
    """The number of checksums for some bytes of tokens."""
    return -(-token_bytes // block_size)


def npy_header(dtype: np.dtype, tokens: int) -> bytes:
    """The 4096 bytes at the start of the file: the same for every file of this dtype and length."""
    fields = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({tokens},), }}"
    text = fields.ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii")


def offsets(dtype: np.dtype, tokens: int, documents: int, block_size: int) -> tuple[int, int, int]:
    """The offsets of the document ends, the checksums and the metadata. Tables begin on a multiple of 8 bytes."""
    ends = -(-(HEADER_BYTES + tokens * dtype.itemsize) // 8) * 8
    sums = ends + 8 * documents
    return ends, sums, sums + 8 * block_count(tokens * dtype.itemsize, block_size)


def chain_of(previous: str, metadata: Metadata, dtype: np.dtype, ends_checksum: int, sums_checksum: int) -> str:
    """The chain fingerprint of a shard whose predecessor has the chain `previous` ("" for the first)."""
    fields = metadata.to_dict() | {"chain": previous}
    content = [dtype.str, ends_checksum, sums_checksum, fields]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def pack_end(layout: ShardLayout) -> bytes:
    """The metadata and the footer of a file."""
    meta = json.dumps(layout.metadata.to_dict(), sort_keys=True, separators=(",", ":")).encode("ascii")
    numbers = FOOTER.pack(
        layout.metadata.tokens, layout.dtype.str.encode("ascii"), layout.block_size, layout.metadata.documents,
        layout.ends_offset, layout.sums_offset, layout.meta_offset, len(meta), layout.ends_checksum,
        layout.sums_checksum, 0, MAGIC,
    )[:SIGNED_BYTES]  # fmt: skip
    return meta + numbers + struct.pack("<Q", checksum(meta + numbers)) + MAGIC


def parse(path: object, data: bytes | memoryview) -> ShardLayout:
    """Read and check the header, the metadata and the footer of a whole file in memory (a mapped one: O(1)). Raises
    ValueError: the bytes are not one complete ROXXEL03 file. The message names `path`."""
    view = memoryview(data)
    layout = parse_end(path, len(view), view)
    if bytes(view[:HEADER_BYTES]) != npy_header(layout.dtype, layout.metadata.tokens):
        raise UserError(f"{path}: the .npy header is damaged: it does not agree with the footer. {REPLACE}")
    return layout


def parse_end(path: object, size: int, end: bytes | memoryview) -> ShardLayout:
    """Read and check the metadata and the footer of a file of `size` bytes, from its last ones, `end`. Raises
    ValueError: they are not the end of a ROXXEL03 file of that size. The message names `path`."""
    if size < HEADER_BYTES + FOOTER.size:
        raise UserError(
            f"{path}: {size} bytes are too few for a .rox file, which has at least {HEADER_BYTES + FOOTER.size}; "
            f"it was truncated or is not a .rox file. {REPLACE}"
        )
    footer = bytes(end[-FOOTER.size :])
    tokens, name, block_size, documents, ends, sums, meta, meta_length, ends_sum, sums_sum, signature, magic = (
        FOOTER.unpack(footer)
    )
    if magic == b"ROXXEL02":
        raise UserError(f"{path}: a file of the older format ROXXEL02, which is not read here. {REPLACE}")
    if magic != MAGIC:
        raise UserError(
            f"{path}: not a complete .rox file: it does not end in ROXXEL03 (truncated, overwritten, or another "
            f"kind of file). {REPLACE}"
        )
    dtype_name = name.rstrip(b"\0").decode("ascii", "replace")
    if dtype_name not in DTYPES:
        raise UserError(f"{path}: the footer is damaged (dtype {dtype_name!r}). {REPLACE}")
    dtype = np.dtype(dtype_name)
    if block_size < 1 or min(tokens, documents, meta_length) < 0:
        raise UserError(f"{path}: the footer is damaged (a negative size). {REPLACE}")
    expected = offsets(dtype, tokens, documents, block_size)
    expected_size = expected[-1] + meta_length + FOOTER.size
    if (ends, sums, meta, size) != (*expected, expected_size):
        raise UserError(
            f"{path}: the file has {size} bytes, but its footer says {expected_size}; "
            f"bytes are missing or were added. {REPLACE}"
        )
    at = meta - size  # counted from the end
    text = bytes(end[at : at + meta_length])
    if checksum(text + footer[:SIGNED_BYTES]) != signature:
        raise UserError(f"{path}: the footer or the metadata is damaged (its checksum is wrong). {REPLACE}")
    try:
        metadata = Metadata(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: the metadata is not what ROXXEL03 has ({error}). {REPLACE}") from error
    if (metadata.tokens, metadata.documents) != (tokens, documents):
        raise UserError(f"{path}: the metadata and the footer disagree about tokens or documents. {REPLACE}")
    return ShardLayout(
        metadata=metadata, dtype=dtype, block_size=block_size, ends_offset=ends, sums_offset=sums, meta_offset=meta,
        ends_checksum=ends_sum, sums_checksum=sums_sum,
    )  # fmt: skip


MOST_WORKERS = 1024
MOST_SHARD_BYTES = 1 << 50
LARGEST_BLOCK = 1 << 30


def check_range(name: str, value: int, most: int, what: str) -> None:
    """Raises UserError unless a setting is from 1 to `most`; `what` it counts is for the message."""
    if not 1 <= value <= most:
        raise UserError(f"{argument(name, value)}: {what}, from 1 to {most:,}")


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds the ids 0 to `vocab_size - 1`."""
    if not 1 <= vocab_size <= 1 << 32:
        raise UserError(f"{argument('vocab_size', vocab_size)}: the number of token ids, from 1 to 2^32")
    return np.dtype(np.min_scalar_type(vocab_size - 1)).newbyteorder("<")


def storage_dtype(dtype: Any) -> np.dtype:
    """A user's dtype in its on-disk form: little-endian."""
    held = "shards hold integers or floats of 8 to 64 bits, such as uint16"
    try:
        stored = np.dtype(dtype).newbyteorder("<")
    except TypeError as error:
        raise UserError(f"{argument('dtype', dtype)}: no such dtype; {held}") from error
    if stored.str not in DTYPES:
        raise UserError(f"{argument('dtype', dtype)}: {held}")
    return stored
