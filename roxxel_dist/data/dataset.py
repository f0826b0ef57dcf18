"""`Roxxel`: the shards of a data set as one sequence of tokens and of documents."""

import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from roxxel_dist.data.files.discovery import DataPath, NoShardsError, Target, find_shards, names_objects
from roxxel_dist.data.files.foreign import ForeignFile
from roxxel_dist.data.files.reader import MappedReader, WindowReader
from roxxel_dist.data.files.shard import DEFAULT_BLOCK_SIZE, WriteOptions
from roxxel_dist.data.files.slices import ShardSlice, TokenFile, fingerprints, open_slices, slices_of, split_slice
from roxxel_dist.data.files.writer import write_data_set
from roxxel_dist.data.packing import segments_and_positions
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.fetch import Fetcher
from roxxel_dist.data.remote.open import RemoteReader, open_shards, read_beside
from roxxel_dist.data.remote.shard import RemoteShard
from roxxel_dist.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer
from roxxel_dist.data.units import steps_in_a_pass
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument


class Roxxel:
    """A data set of tokens on disk, mapped and not loaded.

    Args:
        filepath: a `.rox` file, a folder (all `*.rox` in it), a pattern (`wiki_*.rox`), a prefix (`wiki` for
            `wiki_00000.rox` and so on), or a list of those. It need not exist before `write`. Files of other systems
            are read in place and named in the same ways: see `data.files.foreign`. Or the address of shards in an
            object store (`s3://`, `gs://`, `az://`), which are read through a cache: see `data.remote`.
        dtype: of the tokens in headerless `.bin` files; None or "auto": uint16. In other files it must be theirs.
        overwrite: a damaged or empty existing file is not an error, and `write` replaces it.
        remote: the cache of shards in an object store, and the time limit of the store.

    Raises:
        ValueError: the files are not the complete shards of one data set. The message names the file.
        StoreError: the object store fails.
    """

    def __init__(
        self, filepath: DataPath, *, dtype: Any = None, overwrite: bool = False, remote: RemoteConfig | None = None
    ) -> None:
        self.filepath = filepath
        self._dtype = None if isinstance(dtype, str) and dtype == "auto" else dtype
        self._remote_config = remote or RemoteConfig()
        self._is_view = False
        self._closed = False
        self._opened: tuple[ShardSlice, ...] | None = None
        try:
            self._open()
        except ValueError:
            if not overwrite:
                raise

    def _open(self) -> None:
        if names_objects(self.filepath):
            self._forget()
            shards = open_shards(self.filepath, self._remote_config)
            self._opened = slices_of(shards, alone=str(shards[0].path) == str(self.filepath), dtype=self._dtype)
            return
        paths = find_shards(self.filepath)
        self._forget()
        # A single given file is a data set, whatever its number; a pattern with a single match may miss other shards.
        one_file = isinstance(self.filepath, (str, os.PathLike)) and paths == [Path(self.filepath)]
        self._opened = open_slices(paths, alone=one_file, dtype=self._dtype, named=self.filepath) if paths else None

    def _forget(self) -> None:
        self._opened = None
        for name in [name for name in vars(self) if isinstance(getattr(Roxxel, name, None), cached_property)]:
            del vars(self)[name]

    @property
    def _slices(self) -> tuple[ShardSlice, ...]:
        if self._closed:
            raise UserError(f"{self.filepath}: the data set was closed; open it again with Roxxel(...)")
        if self._opened is None:
            one = isinstance(self.filepath, (str, os.PathLike)) and os.path.exists(self.filepath)
            text = self.filepath if one else "TEXT"
            raise NoShardsError(
                f"{self.filepath}: no .rox file there, nor .npy or .bin. Check the path, or build a data set of text: "
                f"`roxxel-dist data build {text} --out DIR`"
            )
        return self._opened

    def _view(self, slices: Iterable[ShardSlice]) -> "Roxxel":
        view = object.__new__(Roxxel)
        vars(view).update(
            filepath=self.filepath, _dtype=self._dtype, _remote_config=self._remote_config, _is_view=True, _closed=False
        )
        view._opened = tuple(slices)
        return view

    # -- properties

    @cached_property
    def shards(self) -> tuple[TokenFile, ...]:
        """The open files, in order: `Shard`s, or `ForeignFile`s of other systems."""
        return tuple(part.shard for part in self._slices)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first token, length) of the readable part of each shard, in tokens from the data set's start."""
        return tuple((part.first + part.low, part.high - part.low) for part in self._slices)

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """int64 [shards]: the number of each file's first token in the data set, readable or not."""
        return np.array([part.first for part in self._slices], np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens in the ranges, separators included."""
        return sum(length for _, length in self.ranges)

    @cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self._slices[0].shard.dtype

    @property
    def guessed_dtype(self) -> np.dtype | None:
        """The dtype, if neither the files nor an argument define it."""
        file = self.shards[0]
        return file.dtype if isinstance(file, ForeignFile) and file.is_headerless and self._dtype is None else None

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it; None if the data has no vocabulary."""
        return self._slices[0].shard.metadata.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer that made the tokens, or None."""
        return self._slices[0].shard.metadata.tokenizer_fingerprint

    def text_scale(self, tokenizer: Tokenizer | None = None) -> float | None:
        """Bytes of text for each byte that the table of the tokenizer counts (`TextBytes`), over the whole files.

        1 where the tokenizer changes no text; `tokenizer` is that of tokens without a file of theirs. None where the
        text is not known: no tokenizer, or one that may change a text, and tokens that `build` has not made.
        """
        sizes = [(one.metadata.text_bytes, one.metadata.counted_bytes) for one in self.shards]
        if all(text and counted for text, counted in sizes):
            return sum(text or 0 for text, _ in sizes) / sum(counted or 0 for _, counted in sizes)
        tokenizer = self.tokenizer or tokenizer
        return 1.0 if tokenizer is not None and tokenizer.is_lossless else None

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that depend only on the contents and the ranges, not on the path or the time."""
        *_, whole = fingerprints((part.shard.metadata.chain, part.low, part.high) for part in self._slices)
        return whole

    # -- documents

    @property
    def documents(self) -> int:
        """The number of documents in the ranges; a document that `split` cuts counts on both sides."""
        return sum(part.documents for part in self._slices)

    def __len__(self) -> int:
        return self.documents

    @cached_property
    def _first_document(self) -> list[int]:
        return list(accumulate((part.documents for part in self._slices), initial=0))

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """Documents without their separators: read-only arrays [tokens] that point into the file."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"document {number} of {count}")
        number %= count
        where = bisect_right(self._first_document, number) - 1
        return self._slices[where].document(number - self._first_document[where])

    def __iter__(self) -> Iterator[np.ndarray]:
        for part in self._slices:
            yield from map(part.document, range(part.documents))

    def read_documents(self) -> Iterator[np.ndarray]:
        """The documents in order, as in iteration, but read into memory instead of views of the mapped files.

        Raises ValueError: a file is truncated. The message names it.
        """
        for part in self._slices:
            yield from part.read_documents()

    # -- windows

    @cached_property
    def _reader(self) -> WindowReader:
        shard = self.shards[0]
        if isinstance(shard, RemoteShard):
            return RemoteReader(self.ranges, self.dtype, shard.path, shard.fetcher, self.first_tokens)
        arrays = [part.shard.tokens[part.low : part.high] for part in self._slices]
        return MappedReader(arrays, [first for first, _ in self.ranges], shard.path)

    @property
    def fetcher(self) -> Fetcher | None:
        """The fetcher of chunks of shards in an object store; None for local files."""
        shard = self.shards[0]
        return shard.fetcher if isinstance(shard, RemoteShard) else None

    def fetch(self, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Fetch the chunks for a `read` of some windows into the cache; does nothing for local files.

        With `documents`, also for `segments`. Raises ValueError: a window is not within one of `ranges`, or the
        checksums of a shard are damaged. StoreError: the object store fails.
        """
        if isinstance(self._reader, RemoteReader):
            self._reader.fetch(np.asarray(offsets, np.int64), length, documents=documents)

    def read(self, offsets: np.ndarray, length: int, dtype: Any = None) -> np.ndarray:
        """Copy one window of contiguous tokens for each row.

        Args:
            offsets: int64 [R], first tokens, counted from the data set's start over all shards.
            length: tokens per window, at least 1.
            dtype: of the result; None: the data set's.

        Returns:
            A fresh array [R, length].

        Raises:
            ValueError: a window is not within one of `ranges`.
        """
        kind = self.dtype if dtype is None else np.dtype(dtype)
        return self._reader.read(np.asarray(offsets, np.int64), length, kind)

    def segments(self, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The document of each token of some windows, and the token's position in it.

        Args:
            offsets: int64 [R], the windows' first tokens, as for `read`.
            length: tokens per window, at least 1.

        Returns:
            Two fresh arrays, int32 [R, length]: the number of the document in its window, from 0, and the token's
            position, from 0 at the document's start. A document that began before the window counts from the window's
            start. A separator belongs to the document it ends. See `data.packing`.

        Raises:
            ValueError: a window is not within one of `ranges`, or the document ends of its file are damaged.
        """
        offsets = np.asarray(offsets, np.int64)
        numbers = self._reader.locate(offsets, length)
        return segments_and_positions(self.shards, numbers, offsets - self.first_tokens[numbers], length)

    @property
    def reads_ahead(self) -> bool:
        """Whether `prefetch` is worth a call: recent batches had to wait for the disk."""
        return self._reader.is_cold

    def prefetch(self, offsets: np.ndarray, length: int) -> None:
        """Ask the kernel to load the pages for a `read` of the same windows. It never changes results.

        Raises ValueError: a window is not within one of `ranges`.
        """
        self._reader.prefetch(np.asarray(offsets, np.int64), length)

    def estimate_steps(self, seq_len: int, batch_size: int) -> int:
        """Number of batches of `batch_size` windows of `seq_len` tokens in one pass over the data set."""
        if seq_len < 1 or batch_size < 1:
            raise UserError(f"seq_len={seq_len}, batch_size={batch_size}: both are at least 1")
        return steps_in_a_pass(self.ranges, seq_len, batch_size)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The `tokenizer.json` beside the shards, or None.

        Raises ValueError: it is not the tokenizer that made the tokens.
        """
        shard = self.shards[0]
        if isinstance(shard, RemoteShard):
            path, data = f"{shard.path.parent}/{TOKENIZER_FILE}", read_beside(shard, TOKENIZER_FILE)
            tokenizer = None if data is None else Tokenizer.parse(path, data)
        else:
            path = Path(str(shard.path.parent)) / TOKENIZER_FILE
            tokenizer = Tokenizer.load(path) if path.exists() else None
        if tokenizer is None:
            return None
        if self.tokenizer_fingerprint not in (None, tokenizer.fingerprint):
            raise UserError(
                f"{path}: its fingerprint is {tokenizer.fingerprint}, the shards beside it were made with "
                f"{self.tokenizer_fingerprint}. Put the right file back or build the data set again"
            )
        return tokenizer

    def split(self, val_fraction: float) -> tuple["Roxxel", "Roxxel"]:
        """Two views of the same files: training part and held-out part.

        The last `val_fraction` of every shard's tokens is held out. The cut is the nearest document end at or before
        that point, unless that would leave less than half of its share to train on (one giant document, say): then the
        document is cut, and counts on both sides. With 0 nothing is held out, and the first view is this object.

        Args:
            val_fraction: at least 0 and less than 1.

        Returns:
            The training part, and the held-out part.

        Raises:
            ValueError: `val_fraction` is out of range.
        """
        if not 0 <= val_fraction < 1:
            share = argument("val_fraction", val_fraction)
            raise UserError(f"{share}: the share that is held out, at least 0 and less than 1")
        pairs = [split_slice(part, val_fraction) for part in self._slices]
        held_out = self._view(second for _, second in pairs)
        return (self._view(first for first, _ in pairs) if val_fraction else self), held_out

    def stream(
        self,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        start_step: int = 0,
        steps: int | None = None,
        passes: int | None = 1,
        **options: Any,
    ) -> Any:
        """Batches of shuffled windows: a `roxxel_dist.input.stream.Stream`, one pass over the data set by default.

        Args:
            seq_len: tokens of a row, the target included.
            batch_size: rows of the global batch.
            seed: of the shuffled order.
            start_step: the first step to read, from 0.
            steps: of the whole stream; overrides `passes`.
            passes: how often this data set is read if `steps` is not given, as `epochs` of a phase; None: the stream
                repeats without end.
            options: `mesh` and `data_sharding` for global `jax.Array`s instead of numpy arrays; `mix_datasets` (by
                name) and `weights` (with "self" for this one) for a blend.

        Returns:
            An iterator of int32[batch_size, seq_len], whose whole state is the integer `step`. Its `len()` is the
            number of remaining steps.

        Raises:
            ValueError: a number breaks its rule, a weight names no data set, or the data cannot fill a batch.
        """
        from roxxel_dist.input.stream import stream_of  # above this layer: only needed for streaming

        return stream_of(self, seq_len, batch_size, seed, start_step, steps, passes, **options)

    # -- writing, checking, closing

    def write(
        self,
        items: Iterable[Any],
        separator: str | bytes | int | float | None = b"\x00",
        block_size: int = DEFAULT_BLOCK_SIZE,
        max_shard_bytes: int | None = None,
        dtype: Any = None,
        append: bool = False,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> None:
        """Write documents to `filepath`, and open them. All of them appear at once, or none.

        Args:
            items: the documents, in any iterable: str, bytes, or 1-D arrays of integers or floats.
            separator: ONE element added after every document: a number, one byte (`b"\\x00"` is token 0), as many bytes
                as an element has, or None for no separator.
            block_size: bytes of tokens per checksum.
            max_shard_bytes: begin a new shard before its tokens exceed this many bytes; a document is never split.
                None: one shard. In a pattern `*` is the shard's number in five digits.
            dtype: None: when appending, that of the data set; else the smallest unsigned dtype for `vocab_size`, else
                that of the first item (uint8 for str and bytes). Items are converted if no value changes.
            append: add shards after the existing ones, which do not change. Otherwise they are replaced.
            vocab_size: ids are below it.
            tokenizer_fingerprint: of the tokenizer that made the ids.

        Raises:
            ValueError: an item does not fit, there are no items, the place cannot be written to, or the appended data
                would differ in dtype, vocabulary or tokenizer. Existing data is unchanged.
        """
        if self._is_view:
            raise UserError(f"{self.filepath}: a part made by split() cannot be written to; write to the data set")
        if names_objects(self.filepath):
            raise UserError(
                f"{self.filepath} is in an object store: write to a local folder, copy it there, as with "
                f"`aws s3 sync`, and write the index: `roxxel-dist data index {self.filepath}`"
            )
        file = self._opened[0].shard if self._opened else None
        if isinstance(file, ForeignFile):
            raise UserError(
                f"{file.path} is a {file.kind} file, which can only be read. Remove it or write to another "
                f"place; `roxxel-dist data build {file.path} --out DIR` turns it into shards"
            )
        options = WriteOptions(
            separator=separator, block_size=block_size, max_shard_bytes=max_shard_bytes, dtype=dtype,
            vocab_size=vocab_size, tokenizer_fingerprint=tokenizer_fingerprint,
        )  # fmt: skip
        if isinstance(items, Roxxel):  # a file that is truncated while it is copied must be an error, not zeros
            items = items.read_documents()
        write_data_set(Target.of_path(self.filepath), items, options, append=append)
        self._closed = False
        self._open()

    def verify(self) -> None:
        """Read every shard whole and compare it with its checksums; files of other systems have none.

        Raises ValueError: the message names the damaged file, block and document.
        """
        for shard in self.shards:
            shard.verify()

    def close(self) -> None:
        """Release the files. They stay mapped while an array or another view of them exists."""
        self._forget()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed or self._opened is None:
            return f"Roxxel({self.filepath!r}: {'closed' if self._closed else 'no file yet'})"
        return f"Roxxel({self.filepath!r}: {self.documents} documents, {self.num_tokens} tokens, {self.dtype})"
