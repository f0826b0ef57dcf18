"""The index (`.idx`) of a Megatron data set, whose tokens are in the `.bin` beside it.

It holds, little-endian: the 9 bytes "MMIDIDX", NUL, NUL; the version (uint64, 1); the dtype's number (uint8); how many
sequences and how many document indices (uint64 each); the sequences' lengths in tokens (int32) and first bytes (int64);
and, from 0 to the number of sequences, the sequence that each document begins with and the end (int64). This follows
the public description of `IndexedDataset` in Megatron-Core. Its floats (numbers 6 and 7, which have changed places over
time) are no tokens and are refused.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_index(index: Path, table: memoryview, path: Path, size: int) -> tuple[np.dtype, int, Callable[[], np.ndarray]]:
    """Check an index in O(1).

    Args:
        index: the file, for messages.
        table: its mapped bytes.
        path: the `.bin` beside it.
        size: the bytes that the `.bin` has.

    Returns:
        (dtype of the tokens, number of documents, what computes their ends: int64 [documents], in tokens). The last
        checks the whole index, and raises ValueError where it is damaged.

    Raises:
        ValueError: it is no whole index, or that of other tokens. The message names the file.
    """
    dtype, sequences, indices = _read_head(index, table)
    check_whole_elements(path, size, dtype, "the file")
    lengths = np.ndarray(sequences, "<i4", table, INDEX_HEAD.size)
    pointers = np.ndarray(sequences, "<i8", table, INDEX_HEAD.size + 4 * sequences)
    begins = np.ndarray(indices, "<i8", table, INDEX_HEAD.size + 12 * sequences)
    last = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if int(pointers[0]) or last != size:
        raise ValueError(
            f"{path}: the file has {size} bytes, and the sequences of {index.name} reach from byte "
            f"{pointers[0]} to {last}: one of the two was cut short or belongs to another. Write the pair again"
        )
    if int(begins[0]) or int(begins[-1]) != sequences or indices < 2:
        raise ValueError(
            f"{index}: the document indices run from {begins[0]} to {begins[-1]}, and have to from 0 to the "
            f"{sequences} sequences. Write the pair again"
        )
    return dtype, indices - 1, lambda: _document_ends(index, lengths, pointers, begins, dtype)


def _read_head(index: Path, table: memoryview) -> tuple[np.dtype, int, int]:
    """(dtype, sequences, document indices)."""
    if len(table) < INDEX_HEAD.size:
        raise ValueError(f"{index}: {len(table)} bytes are too few for a Megatron index. Write the pair again")
    magic, version, code, sequences, indices = INDEX_HEAD.unpack_from(table)
    if magic != INDEX_MAGIC or version != 1:
        raise ValueError(
            f"{index}: not a Megatron index of version 1 (it begins with {magic!r}, version {version}). "
            "Write the pair again, or take the .idx away where the .bin is plain tokens"
        )
    if code not in INDEX_DTYPES:
        raise ValueError(f"{index}: dtype number {code}; tokens are integers (1 to 5, or 8). Write the pair again")
    expected = INDEX_HEAD.size + 12 * sequences + 8 * indices
    # A kind of data set with pictures has one more byte a sequence; it means nothing for text.
    if len(table) not in (expected, expected + sequences) or not sequences or not indices:
        raise ValueError(
            f"{index}: {len(table)} bytes where {sequences} sequences and {indices} document indices take {expected}: "
            "it was cut short or is damaged. Write the pair again"
        )
    return np.dtype(INDEX_DTYPES[code]), sequences, indices


def _document_ends(
    index: Path, lengths: np.ndarray, pointers: np.ndarray, begins: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    sequence_ends = np.cumsum(lengths, dtype=np.int64)
    if (lengths < 0).any() or not np.array_equal(pointers[1:], sequence_ends[:-1] * dtype.itemsize):
        raise ValueError(f"{index}: the sequences do not follow each other without gaps. Write the pair again")
    if (np.diff(begins) < 0).any():
        raise ValueError(f"{index}: the document indices fall. Write the pair again")
    ends = np.concatenate([[0], sequence_ends])[begins[1:]].astype(np.int64)
    ends.flags.writeable = False
    return ends


def check_whole_elements(path: Path, size: int, dtype: np.dtype, what: str) -> None:
    """Raises ValueError where so many bytes are no whole number of tokens."""
    if size % dtype.itemsize:
        raise ValueError(
            f"{path}: {what} has {size} bytes, which is no multiple of the {dtype.itemsize} bytes of {dtype}: it was "
            "cut short or has another dtype. Write it again, or give the right dtype"
        )
