"""Token files of other systems, read in place as the shards of a data set.

- **ROXXEL02** (`.rox`): blocks of tokens; one int64 end offset a block; a 32-byte footer: the number of blocks, the
  bytes of tokens, the dtype's name (8 bytes, NUL-padded) and "ROXXEL02". Where the documents end was not kept, the end
  of each file is padded to a block, and nothing tells a separator of one byte that was put between wider tokens.
- **npy**: a one-dimensional array.
- **bin**: tokens and nothing else, as nanoGPT writes them. The dtype has to be known: uint16 unless another is given.
- **llm.c** (`.bin`): 1024 bytes of header, which begins with the numbers 20240520, 1 and how many tokens there are
  (int32), and the tokens (uint16).
- **Megatron**: `NAME.bin`, the tokens, and `NAME.idx`, which `data.megatron` describes.

All numbers are little-endian. None of them keeps checksums. A file that does not keep where its documents end is one
document.

The index (`.idx`) of a Megatron data set, whose tokens are in the `.bin` beside it.

It holds, little-endian: the 9 bytes "MMIDIDX", NUL, NUL; the version (uint64, 1); the dtype's number (uint8); how many
sequences and how many document indices (uint64 each); the sequences' lengths in tokens (int32) and first bytes (int64);
and, from 0 to the number of sequences, the sequence that each document begins with and the end (int64). This follows
the public description of `IndexedDataset` in Megatron-Core. Its floats (numbers 6 and 7, which have changed places over
time) are no tokens and are refused.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roxxel_dist.data.format import DTYPES, Metadata
from roxxel_dist.data.reader import map_files
from roxxel_dist.data.token_types import storage_dtype

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


OLD_MAGIC = b"ROXXEL02"
OLD_FOOTER = struct.Struct("<qq8s8s")
DEFAULT_DTYPE = np.dtype("<u2")
NPY_MAGIC = b"\x93NUMPY"
LLMC_MAGIC, LLMC_VERSION = struct.pack("<i", 20240520), 1
LLMC_HEADER_BYTES = 1024
SAMPLED_BLOCKS = 16
SAMPLE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class ForeignFile:
    """One open token file of another system, with what `ShardSlice` asks of a shard.

    Opening is O(1) in the size of the file. It stays mapped as long as this object or an array taken from it lives.
    """

    path: Path
    """The file of the tokens; of a Megatron pair the `.bin`."""
    kind: str
    """What it is, in words."""
    tokens: np.ndarray
    """Read-only [tokens] in the file's dtype."""
    offset: int
    """The file's byte at which the tokens begin."""
    metadata: Metadata
    """As for a shard. `chain` is the fingerprint of the contents: xxh3-128 of the kind, the dtype, the sizes, the first
    and the last 4 KiB and 16 blocks of 4 KiB between them at even distances. A change elsewhere goes unnoticed."""
    _read_ends: Callable[[], np.ndarray] = field(repr=False)
    _sizes: tuple[tuple[Path, int], ...] = field(repr=False)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self.tokens.dtype

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Where each document ends, exclusive: int64 [documents], in tokens. Computed when first asked for.

        Raises:
            ValueError: the index of a Megatron pair does not describe its tokens.
        """
        return self._read_ends()

    def verify(self) -> None:
        """Check what can be checked without checksums: the sizes, and the whole of a Megatron index.

        Raises:
            ValueError: a file has changed its size since it was opened, or the index is damaged.
        """
        for path, size in self._sizes:
            now = path.stat().st_size
            if now != size:
                raise ValueError(f"{path}: {now} bytes now, {size} when it was opened. Open it again, or put it back")
        self._read_ends()


def open_foreign(path: str | os.PathLike[str], dtype: Any = None) -> ForeignFile:
    """Map a token file of another system; see the module for which.

    Args:
        path: a ROXXEL02 file (told by its last bytes), or one that ends in `.npy`, `.bin` or `.idx`.
        dtype: of the tokens in a headerless `.bin`; elsewhere it has to agree with what the file says.

    Raises:
        ValueError: it is not a whole file of its kind. The message names it.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    wanted = None if dtype is None else storage_dtype(dtype)
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
        if not path.exists():
            raise ValueError(f"{path}: missing; {path.stem}.idx beside it is the index of its tokens. Put it back")
    if last_bytes(path, len(OLD_MAGIC)) == OLD_MAGIC:
        opened = _open_old(path)
    elif path.suffix == ".npy":
        opened = _open_npy(path)
    elif path.with_suffix(".idx").exists():
        opened = _open_megatron(path)
    else:
        opened = _open_llmc(path) or _open_bin(path, wanted or DEFAULT_DTYPE)
    if wanted not in (None, opened.dtype):
        raise ValueError(f"{path}: dtype={dtype} was given, and the file says {opened.dtype}. Leave dtype out")
    return opened


def last_bytes(path: Path, count: int) -> bytes:
    """The last `count` bytes of a file, or all of them if it has fewer."""
    with path.open("rb") as file:
        file.seek(-min(count, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read(count)


def _map(path: Path) -> memoryview:
    return map_files([path])[0].data


def _opened(
    kind: str,
    path: Path,
    mapped: memoryview,
    dtype: np.dtype,
    count: int,
    offset: int = 0,
    index: tuple[Path, memoryview] | None = None,
    documents: int = 1,
    read_ends: Callable[[], np.ndarray] | None = None,
) -> ForeignFile:
    ends = np.array([count], np.int64)
    ends.flags.writeable = False
    maps = [mapped] if index is None else [mapped, index[1]]
    sizes = ((path, len(mapped)),) if index is None else ((path, len(mapped)), (index[0], len(index[1])))
    return ForeignFile(
        path=path,
        kind=kind,
        tokens=np.ndarray(count, dtype, mapped, offset),
        offset=offset,
        metadata=Metadata(
            tokens=count,
            documents=documents,
            vocab_size=None,
            tokenizer_fingerprint=None,
            separator=None,
            index=0,
            first_token=0,
            first_document=0,
            chain=_fingerprint(kind, dtype, maps),
        ),
        _read_ends=read_ends or (lambda: ends),
        _sizes=sizes,
    )


def _fingerprint(kind: str, dtype: np.dtype, maps: list[memoryview]) -> str:
    digest = xxhash.xxh3_128(f"{kind} {dtype.str}".encode())
    for mapped in maps:
        digest.update(struct.pack("<q", len(mapped)))
        last = max(0, len(mapped) - SAMPLE_BYTES)
        for number in range(SAMPLED_BLOCKS + 2):
            start = last * number // (SAMPLED_BLOCKS + 1)
            digest.update(mapped[start : start + SAMPLE_BYTES])
    return digest.hexdigest()


def _open_old(path: Path) -> ForeignFile:
    mapped = _map(path)
    if len(mapped) < OLD_FOOTER.size:
        raise ValueError(f"{path}: too short for a ROXXEL02 file. Write it again, or take it away")
    records, raw, name, _ = OLD_FOOTER.unpack(mapped[-OLD_FOOTER.size :])
    dtype = _named_dtype(name)
    if dtype is None:
        raise ValueError(f"{path}: the footer is damaged (dtype {name!r}). Write the file again")
    if min(records, raw) < 0 or raw + 8 * records + OLD_FOOTER.size != len(mapped):
        raise ValueError(
            f"{path}: the file has {len(mapped)} bytes, and its footer speaks of {raw} bytes of tokens and {records} "
            "blocks; bytes are missing or were added. Write the file again"
        )
    check_whole_elements(path, raw, dtype, "the tokens")
    if not raw:
        raise ValueError(f"{path}: the file has no tokens. Take it away")
    end = struct.unpack_from("<q", mapped, len(mapped) - OLD_FOOTER.size - 8)[0] if records else 0
    if end != raw:
        raise ValueError(f"{path}: its last block ends at byte {end} of {raw}: the index is damaged. Write it again")
    return _opened("ROXXEL02", path, mapped, dtype, raw // dtype.itemsize)


def _named_dtype(name: bytes) -> np.dtype | None:
    try:
        dtype = np.dtype(name.rstrip(b"\0").decode("ascii")).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError):  # what numpy raises for names that are none
        return None
    return dtype if dtype.str in DTYPES else None


def _open_npy(path: Path) -> ForeignFile:
    mapped = _map(path)
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = readers[version](file)
        except Exception as error:  # numpy raises many kinds for damaged headers, warnings that are errors among them
            what = " ".join(str(error).split())[:200]
            raise ValueError(f"{path}: not a .npy file of one array ({what}). Write it with numpy.save") from error
        offset = file.tell()
    if len(shape) != 1:
        raise ValueError(f"{path}: an array of shape {shape}; tokens have one dimension: save array.reshape(-1)")
    if dtype.str not in DTYPES:
        raise ValueError(
            f"{path}: dtype {dtype.str}; tokens are little-endian integers or floats of 8 to 64 bits. Convert the array"
        )
    if offset + shape[0] * dtype.itemsize > len(mapped):
        raise ValueError(
            f"{path}: the file has {len(mapped)} bytes where its header speaks of {shape[0]} elements of "
            f"{dtype}: it was cut short. Write it again"
        )
    if not shape[0]:
        raise ValueError(f"{path}: the array is empty. Take the file away")
    return _opened("npy", path, mapped, dtype, shape[0], offset)


def _open_bin(path: Path, dtype: np.dtype) -> ForeignFile:
    mapped = _map(path)
    if mapped[: len(NPY_MAGIC)] == NPY_MAGIC:
        raise ValueError(f"{path}: a .npy file, not a headerless .bin. Name it .npy")
    check_whole_elements(path, len(mapped), dtype, "the file")
    return _opened("bin", path, mapped, dtype, len(mapped) // dtype.itemsize)


def _open_llmc(path: Path) -> ForeignFile | None:
    """None where the file does not begin as llm.c's do."""
    with path.open("rb") as file:
        head = file.read(12)
    if head[:4] != LLMC_MAGIC:
        return None
    mapped = _map(path)
    version, count = struct.unpack("<2i", head[4:]) if len(head) == 12 else (0, 0)
    expected = LLMC_HEADER_BYTES + count * DEFAULT_DTYPE.itemsize
    if version != LLMC_VERSION or count < 1 or len(mapped) != expected:
        raise ValueError(
            f"{path}: {len(mapped)} bytes, and its llm.c header speaks of version {version} and {count} tokens; it has "
            f"to be version {LLMC_VERSION}, at least 1 token and {expected} bytes. Write it again"
        )
    return _opened("llm.c", path, mapped, DEFAULT_DTYPE, count, LLMC_HEADER_BYTES)


def _open_megatron(path: Path) -> ForeignFile:
    index = path.with_suffix(".idx")
    mapped, table = _map(path), _map(index)
    dtype, documents, read_ends = read_index(index, table, path, len(mapped))
    count = len(mapped) // dtype.itemsize
    return _opened(
        "Megatron", path, mapped, dtype, count, index=(index, table), documents=documents, read_ends=read_ends
    )
