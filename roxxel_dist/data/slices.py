"""The part of a file that a data set reads, and the check that files are one data set."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roxxel_dist.data.foreign import OLD_MAGIC, ForeignFile, last_bytes, open_foreign
from roxxel_dist.data.format import MAGIC
from roxxel_dist.data.pread import Files
from roxxel_dist.data.reader import Windows, map_files, read_tokens
from roxxel_dist.data.shard import Shard
from roxxel_dist.data.token_types import storage_dtype

LONG = 1 << 13
READ_TOKENS = 1 << 19
"""Tokens that are read at once where documents are copied."""
Io = Literal["mmap", "pread"]
FOREIGN = (".npy", ".bin", ".idx")
TokenFile = Shard | ForeignFile
"""A file of tokens, mapped read-only. Both kinds have `path`, `tokens`, `offset`, `dtype`, `document_ends`, `metadata`
(whose `chain` is the fingerprint of the contents) and `verify()`."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """The tokens `low` to `high` of a shard; the shard's token 0 is token `first` of the data set."""

    shard: TokenFile
    first: int
    low: int
    high: int
    first_document: int
    """The first of the shard's documents that has something in the part, or all of it."""
    last_document: int
    """One past the last."""

    @property
    def documents(self) -> int:
        """How many documents have something in the part."""
        return self.last_document - self.first_document

    def document(self, number: int) -> np.ndarray:
        """What the part holds of its document `number` without the separator: read-only [tokens]."""
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


class Reader:
    """Copies windows of tokens out of the parts of one data set, all of one dtype.

    One index operation copies the windows of a batch, whatever shards they are in.

    Args:
        parts: of one data set.
        io: "mmap" copies from the mapped files, "pread" reads the files.
    """

    def __init__(self, parts: Sequence[Part], io: Io = "mmap") -> None:
        self._path = parts[0].shard.path
        self._dtype = parts[0].shard.dtype
        self._low = np.array([part.first + part.low for part in parts], np.int64)
        self._lows = self._low.tolist()
        self._tokens = [(part.first, part.first + part.high, part.shard.tokens) for part in parts]
        self._last: dict[int, np.ndarray] = {}
        self._files = Files([part.shard.path for part in parts]) if io == "pread" else None
        self._windows = Windows([part.shard.tokens for part in parts])
        starts = self._windows.starts if self._files is None else [part.shard.offset for part in parts]
        bytes_before = np.array([part.first for part in parts], np.int64) * self._dtype.itemsize
        self._shift = np.concatenate([[0], starts - bytes_before])

    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """Copy windows of tokens.

        Args:
            offsets: int64 [R], in tokens of the data set.
            length: tokens a window.
            dtype: of the result.

        Returns:
            A fresh array [R, length].

        Raises:
            ValueError: a window is not within one part, or (read, not mapped) its file was cut short.
        """
        if length >= LONG and dtype != self._dtype and self._files is None:
            return self._convert(offsets, length, dtype)
        numbers, index = self._locate(offsets, length)
        size = length * self._dtype.itemsize
        if self._files is not None:
            rows = self._files.copy(numbers - 1, index, size)
        else:
            rows = self._windows.copy(index, size)
        return rows.view(self._dtype).astype(dtype, copy=False)

    def _convert(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """Long windows one by one, converted straight from the file: a copy of them would not stay in the cache."""
        out = np.empty((len(offsets), length), dtype)
        for row, offset in enumerate(offsets.tolist()):
            number = bisect_right(self._lows, offset) - 1
            first, high, tokens = self._tokens[number]
            if number < 0 or offset + length > high:
                raise self._outside(offset, length)
            out[row] = tokens[offset - first : offset - first + length]
        self._windows.note_waits()
        return out

    @property
    def reads_ahead(self) -> bool:
        """Whether `prefetch` does anything now."""
        return self._files is not None or self._windows.cold

    def prefetch(self, offsets: np.ndarray, length: int) -> None:
        """Prepare for a later `read` of the same windows: see `Roxxel.prefetch`."""
        if not self.reads_ahead:
            return
        numbers, index = self._locate(offsets, length)
        if self._files is not None:
            self._files.ask(numbers - 1, index, length * self._dtype.itemsize)
        else:
            self._windows.ask(index, length * self._dtype.itemsize)

    def _locate(self, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each window the part, counted from 1, and where it begins in bytes, as `Windows` or the file counts."""
        last = self._last.get(length)
        if last is None:
            # One more at the front, for offsets before the first part: no window begins there.
            last = self._last[length] = np.array(
                [np.iinfo(np.int64).min, *(high - length for _, high, _ in self._tokens)]
            )
        numbers = self._low.searchsorted(offsets, side="right")
        wrong = offsets > last[numbers]
        if length < 1 or np.count_nonzero(wrong):
            raise self._outside(int(offsets[np.argmax(wrong)]) if len(offsets) else 0, length)
        return numbers, offsets * self._dtype.itemsize + self._shift[numbers]

    def _outside(self, offset: int, length: int) -> ValueError:
        return ValueError(
            f"a window of {length} tokens at token {offset} is not within one of the {len(self._lows)} ranges from "
            f"{self._path} on; a window has at least 1 token and crosses no shard and no cut of split()"
        )


def split_part(part: Part, val_fraction: float) -> tuple[Part, Part]:
    """The part before and the part behind the cut that holds out the last `val_fraction`; see `Roxxel.split`."""
    length = part.high - part.low
    target = part.high - int(length * val_fraction)
    if target == part.high:
        cut, before, behind = part.high, part.last_document, part.last_document
    else:
        ends = part.shard.document_ends[part.first_document : part.last_document]
        before = behind = part.first_document + int(np.searchsorted(ends, target, side="right"))
        cut = int(part.shard.document_ends[before - 1]) if before > part.first_document else part.low
        if 2 * (cut - part.low) < target - part.low:
            cut, before = target, before + 1
    return replace(part, high=cut, last_document=before), replace(part, low=cut, first_document=behind)


def open_parts(paths: Sequence[Path], *, alone: bool = False, dtype: Any = None) -> tuple[Part, ...]:
    """Open the files of one data set, in their order.

    Args:
        paths: shards, in any order, or files of another system, which know no order: theirs is the one given. At least
            one.
        alone: one file was named, and is a data set whatever its number.
        dtype: of the tokens in headerless files.

    Raises:
        ValueError: one is damaged, missing, doubled or of another data set. The message names it.
    """
    files = _one_data_set(open_files(paths, dtype), alone)
    parts: list[Part] = []
    first = 0
    for shard in files:
        tokens, documents = len(shard.tokens), shard.metadata.documents
        parts.append(Part(shard=shard, first=first, low=0, high=tokens, first_document=0, last_document=documents))
        first += tokens
    return tuple(parts)


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
        mine, its = getattr(shard.metadata, name), getattr(previous.metadata, name)
        if mine != its:
            raise ValueError(f"{shard.path} has {name} {mine}, {previous.path} has {its}: they are not one data set")
    if not shard.follows(previous):
        raise ValueError(
            f"{shard.path} was not written behind {previous.path}: shards of two data sets, or of two versions of one, "
            "are mixed. Name the files of one, or build the data set again"
        )
