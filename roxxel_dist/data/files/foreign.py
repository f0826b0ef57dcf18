"""Token files of other systems, read in place as the shards of a data set.

- **ROXXEL02** (`.rox`): blocks of tokens; one int64 end offset a block; a 32-byte footer: the number of blocks, the
  bytes of tokens, the dtype's name (8 bytes, NUL-padded) and "ROXXEL02". Document ends were not saved, the end of each
  file is padded to a block, and a one-byte separator between wider tokens cannot be recognized.
- **npy**: a one-dimensional array.
- **bin**: only tokens, as nanoGPT writes them. The dtype must be known: uint16 unless another is given. Files whose
  first bytes are those of another format (`data.files.magic`), and files that can only be wider numbers, are refused.
- **llm.c** (`.bin`): 1024 bytes of header, which begins with three numbers (int32): 20240520 and 1 for tokens of GPT-2
  (uint16), or 20240801 and 7 for tokens of Llama 3 (uint32); and how many tokens there are.
- **Megatron**: `NAME.bin`, the tokens, and `NAME.idx`: the 9 bytes "MMIDIDX", NUL, NUL; the version (uint64, 1); the
  dtype's number (uint8); how many sequences and how many document indices (uint64 each); the sequences' lengths in
  tokens (int32) and first bytes (int64); and the number of the first sequence of each document, from 0, followed by the
  number of sequences (int64). This follows the public description of `IndexedDataset` in Megatron-Core. Its floats
  (numbers 6 and 7, which have changed places over time) are not tokens and are refused.

All numbers are little-endian. None of the formats has checksums. A file without document ends is one document.
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

from roxxel_dist.data.files.format import DTYPES, Metadata, storage_dtype
from roxxel_dist.data.files.magic import refuse_known, wider_dtype
from roxxel_dist.data.files.reader import map_files
from roxxel_dist.process.exit_codes import UserError

OLD_MAGIC = b"ROXXEL02"
OLD_FOOTER = struct.Struct("<qq8s8s")
DEFAULT_DTYPE = np.dtype("<u2")
NPY_MAGIC = b"\x93NUMPY"
OTHER_DTYPE = "{path}: dtype={dtype} was given, and the file has {there}: leave it out (data_dtype=auto)"
GIVE_THE_DTYPE = "the option data_dtype {0} of train, dtype {0} of data build, Roxxel(PATH, dtype='{0}')"
LLMC_DTYPES = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""By the magic number of llm.c: the version and the dtype."""
LLMC_HEADER_BYTES = 1024
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SAMPLED_BLOCKS = 16
SAMPLE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class ForeignFile:
    """An open token file of another system, with the interface of a shard.

    Opening is O(1) in the size of the file. It stays mapped as long as this object or an array taken from it lives.
    """

    path: Path
    """The file with the tokens; for a Megatron pair, the `.bin`."""
    kind: str
    """The name of its format."""
    tokens: np.ndarray
    """Read-only [tokens] in the file's dtype."""
    offset: int
    """The byte offset of the tokens in the file."""
    metadata: Metadata
    """As for a shard. `chain` is the fingerprint of the contents: xxh3-128 of the kind, the dtype, the sizes, the first
    and the last 4 KiB and 16 evenly spaced blocks of 4 KiB between them. Other changes are not detected."""
    _read_ends: Callable[[], np.ndarray] = field(repr=False)
    _sizes: dict[Path, int] = field(repr=False)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self.tokens.dtype

    @property
    def is_headerless(self) -> bool:
        """Whether the file holds only tokens, and no dtype."""
        return self.kind == "bin"

    @cached_property
    def document_ends(self) -> np.ndarray:
        """The end of each document, exclusive: int64 [documents], in tokens. Computed on first access. Raises
        ValueError: the index of a Megatron pair does not describe its tokens."""
        ends = self._read_ends()
        ends.flags.writeable = False
        return ends

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens `first` to `stop`: read-only [stop - first], in the file."""
        return self.tokens[first:stop]

    def verify(self) -> None:
        """Check the sizes and a whole Megatron index, because there are no checksums.

        Raises ValueError: the size of a file has changed since it was opened, or the index is damaged.
        """
        for path, size in self._sizes.items():
            now = path.stat().st_size
            if now != size:
                raise UserError(f"{path}: {now} bytes now, {size} when it was opened. Open it again, or put it back")
        self._read_ends()


def open_foreign(path: str | os.PathLike[str], dtype: Any = None) -> ForeignFile:
    """Map a token file of another system: a ROXXEL02 file, by its last bytes, or a `.npy`, `.bin` or `.idx`.

    `dtype` is that of the tokens in a headerless `.bin`; in other files it must match the file's. Raises ValueError: it
    is not a complete file of its kind. The message names it. FileNotFoundError: there is no such file.
    """
    path = Path(path)
    given = None if dtype is None else storage_dtype(dtype)
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
        if not path.exists():
            raise UserError(f"{path}: missing; {path.stem}.idx beside it is the index of its tokens. Put it back")
    if last_bytes(path, len(OLD_MAGIC)) == OLD_MAGIC:
        file = _open_old(path)
    elif path.suffix == ".npy":
        file = _open_npy(path)
    elif path.with_suffix(".idx").exists():
        file = _open_megatron(path)
    else:
        file = _open_bin(path, given)
    if given not in (None, file.dtype):
        raise UserError(OTHER_DTYPE.format(path=path, dtype=dtype, there=file.dtype))
    return file


def last_bytes(path: Path, count: int) -> bytes:
    """The last `count` bytes of a file, or all of them if it has fewer."""
    with path.open("rb") as file:
        file.seek(-min(count, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read(count)


def _map(path: Path) -> memoryview:
    return map_files([path])[0].data


def _file(
    kind: str,
    maps: dict[Path, memoryview],
    dtype: np.dtype,
    count: int,
    offset: int = 0,
    documents: int = 1,
    read_ends: Callable[[], np.ndarray] | None = None,
) -> ForeignFile:
    """The open file for the mapped files of a kind; the file with the tokens comes first."""
    path, mapped = next(iter(maps.items()))
    digest = xxhash.xxh3_128(f"{kind} {dtype.str}".encode())
    for data in maps.values():
        digest.update(struct.pack("<q", len(data)))
        last = max(0, len(data) - SAMPLE_BYTES)
        for number in range(SAMPLED_BLOCKS + 2):  # each, even where two are the same: fingerprints are saved in runs
            start = last * number // (SAMPLED_BLOCKS + 1)
            digest.update(data[start : start + SAMPLE_BYTES])
    metadata = Metadata(
        tokens=count, documents=documents, vocab_size=None, tokenizer_fingerprint=None, separator=None, index=0,
        first_token=0, first_document=0, chain=digest.hexdigest(),
    )  # fmt: skip
    read_ends = read_ends or (lambda: np.array([count], np.int64))
    sizes = {path: len(data) for path, data in maps.items()}
    return ForeignFile(path, kind, np.ndarray(count, dtype, mapped, offset), offset, metadata, read_ends, sizes)


def _check_whole_elements(path: Path, size: int, dtype: np.dtype, what: str) -> None:
    if size % dtype.itemsize:
        raise UserError(
            f"{path}: {what} has {size} bytes, which is not a multiple of the {dtype.itemsize} bytes of {dtype}: it "
            "was truncated or has another dtype. Write it again, or give the right one: "
            + GIVE_THE_DTYPE.format("uint8" if size % 2 else "uint16")
        )


def _open_old(path: Path) -> ForeignFile:
    mapped = _map(path)
    if len(mapped) < OLD_FOOTER.size:
        raise UserError(f"{path}: too short for a ROXXEL02 file. Write it again, or remove it")
    records, raw, name, _ = OLD_FOOTER.unpack(mapped[-OLD_FOOTER.size :])
    try:
        dtype = np.dtype(name.rstrip(b"\0").decode("ascii")).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError):  # numpy raises these for unknown dtype names
        dtype = None
    if dtype is None or dtype.str not in DTYPES:
        raise UserError(f"{path}: the footer is damaged (dtype {name!r}). Write the file again")
    if min(records, raw) < 0 or raw + 8 * records + OLD_FOOTER.size != len(mapped):
        raise UserError(
            f"{path}: the file has {len(mapped)} bytes, but its footer says {raw} bytes of tokens and {records} "
            "blocks; bytes are missing or were added. Write the file again"
        )
    _check_whole_elements(path, raw, dtype, "the tokens")
    if not raw:
        raise UserError(f"{path}: the file has no tokens. Remove it")
    end = struct.unpack_from("<q", mapped, len(mapped) - OLD_FOOTER.size - 8)[0] if records else 0
    if end != raw:
        raise UserError(f"{path}: its last block ends at byte {end} of {raw}: the index is damaged. Write it again")
    return _file("ROXXEL02", {path: mapped}, dtype, raw // dtype.itemsize)


def _open_npy(path: Path) -> ForeignFile:
    mapped = _map(path)
    if mapped[: len(NPY_MAGIC)] != NPY_MAGIC:
        refuse_known(path, mapped)
        raise UserError(
            f"{path}: the file has no .npy header. If it has tokens alone, as OLMo writes them, name it "
            f"{path.stem}.bin and give their dtype: {GIVE_THE_DTYPE.format('uint16')}, or uint32"
        )
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = readers[version](file)
        except Exception as error:  # numpy raises many kinds for damaged headers, including warnings as errors
            what = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: not a .npy file of one array ({what}). Write it with numpy.save") from error
        offset = file.tell()
    if len(shape) != 1:
        raise UserError(f"{path}: an array of shape {shape}; tokens have one dimension: save array.reshape(-1)")
    if dtype.str not in DTYPES:
        raise UserError(
            f"{path}: dtype {dtype.str}; tokens are little-endian integers or floats of 8 to 64 bits. Convert the array"
        )
    if offset + shape[0] * dtype.itemsize > len(mapped):
        raise UserError(
            f"{path}: the file has {len(mapped)} bytes, but its header says {shape[0]} elements of "
            f"{dtype}: it was truncated. Write it again"
        )
    if not shape[0]:
        raise UserError(f"{path}: the array is empty. Remove the file")
    return _file("npy", {path: mapped}, dtype, shape[0], offset)


def _open_bin(path: Path, given: np.dtype | None) -> ForeignFile:
    """A file of llm.c, which begins with its magic number, or a file of tokens only, of the dtype `given`."""
    mapped = _map(path)
    magic = int.from_bytes(mapped[:4], "little")
    if magic in LLMC_DTYPES:
        right, dtype = LLMC_DTYPES[magic]
        version, count = struct.unpack_from("<2i", mapped, 4) if len(mapped) >= 12 else (0, 0)
        expected = LLMC_HEADER_BYTES + count * dtype.itemsize
        if version != right or count < 1 or len(mapped) != expected:
            raise UserError(
                f"{path}: {len(mapped)} bytes, but its llm.c header says version {version} and {count} tokens; with "
                f"{magic} it has to be version {right}, at least 1 token and {expected} bytes. Write it again"
            )
        return _file("llm.c", {path: mapped}, dtype, count, LLMC_HEADER_BYTES)
    refuse_known(path, mapped, text=given is None or given.itemsize > 1)
    dtype = given or DEFAULT_DTYPE
    _check_whole_elements(path, len(mapped), dtype, "the file")
    file = _file("bin", {path: mapped}, dtype, len(mapped) // dtype.itemsize)
    if given is None and (wider := _wider(file.tokens)) is not None:
        raise UserError(
            f"{path}: without a header its tokens are read as uint16, and they look like {wider}: of each "
            f"{4 if wider == 'uint64' else 2} numbers only the first varies. Give the dtype: "
            f"{GIVE_THE_DTYPE.format(wider)}; or uint16, if it is that"
        )
    return file


def sample_starts(count: int, length: int) -> list[int]:
    """The starts of the pieces of a sample: the first and the last `length` of `count`, and 16 evenly between them."""
    last = max(0, count - length)
    return sorted({last * number // (SAMPLED_BLOCKS + 1) for number in range(SAMPLED_BLOCKS + 2)})


def _wider(tokens: np.ndarray) -> str | None:
    """The dtype that all pieces of a sample of uint16 tokens agree on, if it is a wider one."""
    if len(tokens) % 2:
        return None
    length = SAMPLE_BYTES // tokens.itemsize
    pieces = [tokens[start // 4 * 4 :][:length] for start in sample_starts(len(tokens), length)]
    found = {wider_dtype(piece) for piece in pieces}
    return "uint32" if found == {"uint32", "uint64"} else found.pop() if len(found) == 1 else None


def _open_megatron(path: Path) -> ForeignFile:
    index = path.with_suffix(".idx")
    mapped, table = _map(path), _map(index)
    if len(table) < INDEX_HEAD.size:
        raise UserError(f"{index}: {len(table)} bytes are too few for a Megatron index. Write the pair again")
    magic, version, code, sequences, indices = INDEX_HEAD.unpack_from(table)
    if magic != INDEX_MAGIC or version != 1:
        raise UserError(
            f"{index}: not a Megatron index of version 1 (it begins with {magic!r}, version {version}). "
            "Write the pair again, or remove the .idx if the .bin holds plain tokens"
        )
    if code not in INDEX_DTYPES:
        raise UserError(f"{index}: dtype number {code}; tokens are integers (1 to 5, or 8). Write the pair again")
    expected = INDEX_HEAD.size + 12 * sequences + 8 * indices
    # Data sets with pictures have one more byte per sequence, which has no meaning for text.
    if len(table) not in (expected, expected + sequences) or not sequences or not indices:
        raise UserError(
            f"{index}: {len(table)} bytes where {sequences} sequences and {indices} document indices take {expected}: "
            "it was truncated or is damaged. Write the pair again"
        )
    dtype = np.dtype(INDEX_DTYPES[code])
    _check_whole_elements(path, len(mapped), dtype, "the file")
    lengths = np.ndarray(sequences, "<i4", table, INDEX_HEAD.size)
    pointers = np.ndarray(sequences, "<i8", table, INDEX_HEAD.size + 4 * sequences)
    begins = np.ndarray(indices, "<i8", table, INDEX_HEAD.size + 12 * sequences)
    last = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if int(pointers[0]) or last != len(mapped):
        raise UserError(
            f"{path}: the file has {len(mapped)} bytes, and the sequences of {index.name} reach from byte "
            f"{pointers[0]} to {last}: one of the two was truncated or belongs to another. Write the pair again"
        )
    if int(begins[0]) or int(begins[-1]) != sequences or indices < 2:
        raise UserError(
            f"{index}: the document indices run from {begins[0]} to {begins[-1]}, and have to from 0 to the "
            f"{sequences} sequences. Write the pair again"
        )

    def read_ends() -> np.ndarray:
        sequence_ends = np.cumsum(lengths, dtype=np.int64)
        if (lengths < 0).any() or not np.array_equal(pointers[1:], sequence_ends[:-1] * dtype.itemsize):
            raise UserError(f"{index}: the sequences do not follow each other without gaps. Write the pair again")
        if (np.diff(begins) < 0).any():
            raise UserError(f"{index}: the document indices fall. Write the pair again")
        return np.concatenate([[0], sequence_ends])[begins[1:]].astype(np.int64)

    count = len(mapped) // dtype.itemsize
    return _file("Megatron", {path: mapped, index: table}, dtype, count, documents=indices - 1, read_ends=read_ends)
