"""The slices of shards that a data set reads, and the check that files are one data set."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.data.files.discovery import BUILD_FILE, ENDING, build_record, unfinished_copies
from roxxel_dist.data.files.foreign import NPY_MAGIC, OLD_MAGIC, OTHER_DTYPE, ForeignFile, last_bytes, open_foreign
from roxxel_dist.data.files.format import MAGIC, Metadata, storage_dtype
from roxxel_dist.data.files.magic import refuse_known
from roxxel_dist.data.files.reader import map_files, read_tokens
from roxxel_dist.data.files.shard import Shard, check_ends
from roxxel_dist.process.exit_codes import UserError

READ_TOKENS = 1 << 19
"""Tokens that are read at a time while documents are copied."""
FOREIGN = (".npy", ".bin", ".idx")
TokenFile = Shard | ForeignFile
"""A file of tokens, mapped read-only. Both kinds have `path`, `tokens`, `offset`, `dtype`, `document_ends`, `metadata`
(whose `chain` is the fingerprint of the contents) and `verify()`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardSlice:
    """The tokens `low` to `high` of a shard; the shard's token 0 is token `first` of the data set."""

    shard: TokenFile
    first: int
    low: int
    high: int
    first_document: int
    """The first of the shard's documents that is at least partly in the slice."""
    last_document: int
    """One past the last."""

    @property
    def documents(self) -> int:
        """The number of documents that are at least partly in the slice."""
        return self.last_document - self.first_document

    def document(self, number: int) -> np.ndarray:
        """The part of its document `number` in the slice, without the separator: read-only [tokens]."""
        index = self.first_document + number
        ends = self.shard.document_ends
        first = max(int(ends[index - 1]) if index else 0, self.low)
        last = min(int(ends[index]) - self._separators, self.high)
        return self.shard.read(first, max(first, last))

    @property
    def _separators(self) -> int:
        """The number of separator tokens at a document's end."""
        return int(self.shard.metadata.separator is not None)

    def read_documents(self) -> Iterator[np.ndarray]:
        """The documents in order, by read(2) and not from the mapped file: [tokens].

        Raises ValueError, naming the file, if it is truncated.
        """
        shard, dtype, ends = self.shard, self.shard.dtype, self.shard.document_ends
        if not isinstance(shard.path, Path):
            yield from map(self.document, range(self.documents))
            return
        if isinstance(shard, Shard):
            ends = read_tokens(shard.path, ends.dtype, shard.layout.ends_offset, len(ends))
        check_ends(shard.path, ends, len(shard.tokens))
        documents = slice(self.first_document, self.last_document)
        firsts = np.maximum(np.append(0, ends[:-1])[documents], self.low)
        lasts = np.maximum(np.minimum(ends[documents] - self._separators, self.high), firsts)
        done = 0
        while done < len(firsts):
            # Several documents at once: a call for each would take longer than the read itself.
            start = int(firsts[done])
            stop = max(done + 1, int(lasts.searchsorted(start + READ_TOKENS, side="right")))
            tokens = read_tokens(shard.path, dtype, shard.offset + start * dtype.itemsize, int(lasts[stop - 1]) - start)
            for first, last in zip(
                (firsts[done:stop] - start).tolist(), (lasts[done:stop] - start).tolist(), strict=True
            ):
                yield tokens[first:last]
            done = stop


def split_slice(shard_slice: ShardSlice, val_fraction: float) -> tuple[ShardSlice, ShardSlice]:
    """The slices before and after the cut that holds out the last `val_fraction`; see `Roxxel.split`."""
    low, high, all_ends = shard_slice.low, shard_slice.high, shard_slice.shard.document_ends
    target = high - int((high - low) * val_fraction)
    cut, before, behind = high, shard_slice.last_document, shard_slice.last_document
    if target < high:
        count = int(all_ends.searchsorted(target, side="right"))  # in the whole shard, because an index has those cuts
        before = behind = min(max(count, shard_slice.first_document), behind)
        cut = int(all_ends[before - 1]) if before > shard_slice.first_document else low
        if 2 * (cut - low) < target - low:
            cut, before = target, before + 1
    return replace(shard_slice, high=cut, last_document=before), replace(shard_slice, low=cut, first_document=behind)


def open_slices(
    paths: Sequence[Path], *, alone: bool = False, dtype: Any = None, named: object = None
) -> tuple[ShardSlice, ...]:
    """Open the files of one data set as whole slices, in their order; files of other systems in the given order.

    A file named `alone` is a data set whatever its number. Raises ValueError, naming the file, if one is damaged,
    missing, duplicate or of another data set; or if a folder that the user `named` has not all that was built there.
    """
    slices = slices_of(open_files(paths, dtype), alone=alone)
    if isinstance(named, (str, os.PathLike)):
        _check_folder(Path(named), [part.shard for part in slices])
    return slices


def slices_of(files: Sequence[TokenFile], *, alone: bool = False, dtype: Any = None) -> tuple[ShardSlice, ...]:
    """Open files of one data set as whole slices, in their order; raises as `open_slices`."""
    if isinstance(files[0], Shard):
        check_dtype(files[0], dtype)
    slices: list[ShardSlice] = []
    first = 0
    for shard in _one_data_set(files, alone):
        high, documents = len(shard.tokens), shard.metadata.documents
        slices.append(ShardSlice(shard=shard, first=first, low=0, high=high, first_document=0, last_document=documents))
        first += high
    return tuple(slices)


def fingerprints(content: Iterable[tuple[str, int, int]]) -> Iterator[str]:
    """The fingerprint of the first part of a data set, of its first two, and so on; each is (chain, low, high)."""
    digest, between = hashlib.blake2b(b"[", digest_size=16), ""
    for part in content:
        digest.update(f"{between}{json.dumps(part)}".encode())
        (whole := digest.copy()).update(b"]")
        yield whole.hexdigest()
        between = ", "


def check_copied(place: object, record: bytes, shards: Sequence[Metadata], unfinished: Sequence[str] = ()) -> None:
    """Raises ValueError for the shards of a folder, in order, that lack some of the `record` of their build."""
    built = (build_record(record) or {}).get("fingerprint")
    found = list(fingerprints((shard.chain, 0, shard.tokens) for shard in shards))
    if built is not None and built not in found:
        part = f" ({unfinished[0]} is an unfinished copy)" if unfinished else ""
        raise UserError(
            f"{place}: {BUILD_FILE} is of a data set with fingerprint {built}, and the {len(found)} shards here have "
            f"{found[-1]}: a shard at the end is missing{part}, or it is of other shards: copy the folder again"
        )


def _check_folder(folder: Path, shards: Sequence[TokenFile]) -> None:
    """Raises ValueError for the shards of a folder, in their order, that are not all that were built there."""
    record = folder / BUILD_FILE
    # Where there are more of them now, these were whole before.
    if isinstance(shards[0], Shard) and record.is_file() and len(list(folder.glob(f"[!.]*{ENDING}"))) == len(shards):
        check_copied(folder, record.read_bytes(), [shard.metadata for shard in shards], unfinished_copies(folder))


def open_files(paths: Sequence[Path], dtype: Any = None) -> list[TokenFile]:
    """Map token files of any kind, recognized by their last bytes, or else by their endings.

    `dtype` is of the tokens in a headerless `.bin`; in other files it must match the file's dtype. Raises ValueError,
    naming the file, if one is not a complete file of a known kind.
    """
    ends = {path: last_bytes(path, len(MAGIC)) for path in paths}
    rox = [path for path in paths if ends[path] != OLD_MAGIC and (path.suffix not in FOREIGN or ends[path] == MAGIC)]
    mapped = dict(zip(rox, map_files(rox), strict=True)) if rox else {}
    files: list[TokenFile] = []
    for path in paths:
        if path not in mapped:
            files.append(open_foreign(path, dtype))
            continue
        data = mapped[path].data
        if bytes(data[-len(MAGIC) :]) != MAGIC and bytes(data[: len(NPY_MAGIC)]) != NPY_MAGIC:
            refuse_known(path, data)  # with a header of .npy it is a shard whose end is missing
        shard = Shard.of_file(path, mapped[path])
        check_dtype(shard, dtype)
        files.append(shard)
    return files


def check_dtype(shard: Shard, dtype: Any) -> None:
    """Raises ValueError if a shard has another dtype than the one that was given, if one was."""
    if dtype is not None and storage_dtype(dtype) != shard.dtype:
        raise UserError(OTHER_DTYPE.format(path=shard.path, dtype=dtype, there=shard.dtype))


def _one_data_set(files: Sequence[TokenFile], alone: bool) -> Sequence[TokenFile]:
    """The files in their order, if they are one data set."""
    for file in files:
        if _kind(file) != _kind(files[0]):
            raise UserError(
                f"{file.path} is a {_kind(file)} file, {files[0].path} a {_kind(files[0])} file: not one data set. "
                "Name the files of one kind, or turn them into one with `roxxel-dist data build`"
            )
        if file.dtype != files[0].dtype:
            raise UserError(
                f"{file.path} has dtype {file.dtype}, {files[0].path} has {files[0].dtype}: not one data set"
            )
    shards = sorted((file for file in files if isinstance(file, Shard)), key=lambda shard: shard.metadata.index)
    for number, shard in enumerate(shards):
        _check(shard, shards[number - 1] if number else None, alone)
    return shards or files


def _kind(file: TokenFile) -> str:
    return file.kind if isinstance(file, ForeignFile) else MAGIC.decode()


def _check(shard: Shard, previous: Shard | None, alone: bool) -> None:
    index, expected = shard.metadata.index, previous.metadata.index + 1 if previous else 0
    if previous is None:
        if index and not alone:
            raise UserError(f"{shard.path} is shard {index}, and shard 0 is missing. Put it back, or name this file")
        return
    if index < expected:
        raise UserError(f"{shard.path} and {previous.path} are both shard {index}. Remove one")
    if index > expected:
        raise UserError(
            f"{shard.path.parent}: shard {expected} is missing: {shard.path.name} is shard {index}, "
            f"{previous.path.name} is shard {expected - 1}. Put it back"
        )
    for name in ("vocab_size", "tokenizer_fingerprint"):
        value, expected_value = getattr(shard.metadata, name), getattr(previous.metadata, name)
        if value != expected_value:
            raise UserError(
                f"{shard.path} has {name} {value}, {previous.path} has {expected_value}: they are not one data set"
            )
    if not shard.follows(previous):
        raise UserError(
            f"{shard.path} was not written after {previous.path}: shards of two data sets, or of two versions of one, "
            "are mixed. Name the files of one, or build the data set again"
        )
