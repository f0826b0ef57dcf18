"""The slices of shards that a data set reads, and the check that files are one data set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.data.foreign import OLD_MAGIC, ForeignFile, last_bytes, open_foreign
from roxxel_dist.data.format import MAGIC
from roxxel_dist.data.reader import map_files, read_tokens
from roxxel_dist.data.shard import Shard
from roxxel_dist.data.token_types import storage_dtype

READ_TOKENS = 1 << 19
"""Tokens that are read at once where documents are copied."""
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
    """The first of the shard's documents that has something in the slice, or all of it."""
    last_document: int
    """One past the last."""

    @property
    def documents(self) -> int:
        """How many documents have something in the slice."""
        return self.last_document - self.first_document

    def document(self, number: int) -> np.ndarray:
        """What the slice holds of its document `number` without the separator: read-only [tokens]."""
        first, last = self._span(number)
        return self.shard.tokens[first:last]

    def _span(self, number: int) -> tuple[int, int]:
        """The same as the first token and one past the last, in the shard."""
        index = self.first_document + number
        ends = self.shard.document_ends
        end = int(ends[index])
        start = int(ends[index - 1]) if index else 0
        if self.shard.metadata.separator is not None:
            end -= 1
        first = max(start, self.low)
        return first, max(first, min(end, self.high))

    def read_documents(self) -> Iterator[np.ndarray]:
        """All documents, one after another, by read(2) and not from the mapped file: [tokens].

        Raises:
            ValueError: the file is cut short. The message names it.
        """
        ends = np.array(self.shard.document_ends)
        if np.any(np.diff(ends, prepend=0) < 0) or ends[-1:].sum() != len(self.shard.tokens):
            raise ValueError(f"{self.shard.path}: the document ends are damaged, or the file was cut short")
        spans = np.array([self._span(number) for number in range(self.documents)]).reshape(-1, 2)
        done = 0
        while done < len(spans):
            # Some documents at once: a call for each would take longer than what it reads.
            low = int(spans[done, 0])
            stop = max(done + 1, int(np.searchsorted(spans[:, 1], low + READ_TOKENS, side="right")))
            shard, dtype = self.shard, self.shard.dtype
            tokens = read_tokens(shard.path, dtype, shard.offset + low * dtype.itemsize, int(spans[stop - 1, 1]) - low)
            for first, last in (spans[done:stop] - low).tolist():
                yield tokens[first:last]
            done = stop


def split_slice(shard_slice: ShardSlice, val_fraction: float) -> tuple[ShardSlice, ShardSlice]:
    """The slices before and behind the cut that holds out the last `val_fraction`; see `Roxxel.split`."""
    low, high, all_ends = shard_slice.low, shard_slice.high, shard_slice.shard.document_ends
    target = high - int((high - low) * val_fraction)
    cut, before, behind = high, shard_slice.last_document, shard_slice.last_document
    if target < high:
        ends = all_ends[shard_slice.first_document : behind]
        before = behind = shard_slice.first_document + int(np.searchsorted(ends, target, side="right"))
        cut = int(all_ends[before - 1]) if before > shard_slice.first_document else low
        if 2 * (cut - low) < target - low:
            cut, before = target, before + 1
    return replace(shard_slice, high=cut, last_document=before), replace(shard_slice, low=cut, first_document=behind)


def open_slices(paths: Sequence[Path], *, alone: bool = False, dtype: Any = None) -> tuple[ShardSlice, ...]:
    """Open the files of one data set, whole, in their order.

    Args:
        paths: shards, in any order, or files of another system, which know no order: theirs is the one given. At least
            one.
        alone: one file was named, and is a data set whatever its number.
        dtype: of the tokens in headerless files.

    Raises:
        ValueError: one is damaged, missing, doubled or of another data set. The message names it.
    """
    slices: list[ShardSlice] = []
    first = 0
    for shard in _one_data_set(open_files(paths, dtype), alone):
        high, documents = len(shard.tokens), shard.metadata.documents
        slices.append(ShardSlice(shard=shard, first=first, low=0, high=high, first_document=0, last_document=documents))
        first += high
    return tuple(slices)


def open_files(paths: Sequence[Path], dtype: Any = None) -> list[TokenFile]:
    """Map files of tokens, of whatever kind each is.

    Args:
        paths: told apart by their last bytes, or else by their endings.
        dtype: of the tokens in a headerless `.bin`; elsewhere it has to agree with what the file says.

    Raises:
        ValueError: one is not a whole file of a known kind. The message names it.
        FileNotFoundError: there is no such file.
    """
    own = [path for path in paths if not _is_foreign(path)]
    mapped = dict(zip(own, map_files(own), strict=True)) if own else {}
    files: list[TokenFile] = []
    for path in paths:
        if path not in mapped:
            files.append(open_foreign(path, dtype))
            continue
        shard = Shard.of(path, mapped[path])
        if dtype is not None and storage_dtype(dtype) != shard.dtype:
            raise ValueError(f"{path}: dtype={dtype} was given, and the file says {shard.dtype}. Leave dtype out")
        files.append(shard)
    return files


def _is_foreign(path: Path) -> bool:
    ending = last_bytes(path, len(MAGIC))
    return ending == OLD_MAGIC or (path.suffix in FOREIGN and ending != MAGIC)


def _one_data_set(files: list[TokenFile], alone: bool) -> Sequence[TokenFile]:
    """The files in their order, if they are one data set."""
    for file in files:
        if _kind(file) != _kind(files[0]):
            raise ValueError(
                f"{file.path} is a {_kind(file)} file, {files[0].path} a {_kind(files[0])} file: not one data set. "
                "Name the files of one kind, or turn them into one with `roxxel-dist data build`"
            )
        if file.dtype != files[0].dtype:
            raise ValueError(
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
            raise ValueError(f"{shard.path} is shard {index}, and shard 0 is missing. Put it back, or name this file")
        return
    if index < expected:
        raise ValueError(f"{shard.path} and {previous.path} are both shard {index}. Take one away")
    if index > expected:
        raise ValueError(
            f"{shard.path.parent}: shard {expected} is missing: {shard.path.name} is shard {index}, "
            f"{previous.path.name} is shard {expected - 1}. Put it back"
        )
    for name in ("vocab_size", "tokenizer_fingerprint"):
        value, expected_value = getattr(shard.metadata, name), getattr(previous.metadata, name)
        if value != expected_value:
            raise ValueError(
                f"{shard.path} has {name} {value}, {previous.path} has {expected_value}: they are not one data set"
            )
    if not shard.follows(previous):
        raise ValueError(
            f"{shard.path} was not written behind {previous.path}: shards of two data sets, or of two versions of one, "
            "are mixed. Name the files of one, or build the data set again"
        )
