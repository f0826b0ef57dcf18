"""From a stream of documents to shards, with one document and no shard in memory."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.files.atomic_dir import FINISH_LIMIT_S, publish, staging, writing
from roxxel_dist.data.files.discovery import Target
from roxxel_dist.data.files.format import MOST_SHARD_BYTES, Metadata, check_range
from roxxel_dist.data.files.shard import DEFAULT_BLOCK_SIZE, ShardSettings, ShardWriter
from roxxel_dist.data.files.slices import TokenFile, open_slices
from roxxel_dist.data.files.token_types import as_array, cast_lossless, separator_value, smallest_dtype, storage_dtype
from roxxel_dist.process.exit_codes import UserError

BUILD_FILE = "build.json"
"""The record of a build beside its shards: inputs and settings."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of `Roxxel.write`; see its arguments."""

    separator: str | bytes | int | float | None = b"\x00"
    block_size: int = DEFAULT_BLOCK_SIZE
    max_shard_bytes: int | None = None
    dtype: Any = None
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.max_shard_bytes is not None:
            check_range("max_shard_bytes", self.max_shard_bytes, MOST_SHARD_BYTES, "bytes of tokens in a shard")
        if self.vocab_size is not None:
            smallest_dtype(self.vocab_size)

    def continuing(self, last: TokenFile) -> "WriteOptions":
        """The same for data appended after `last`, which gives the missing options."""
        metadata = last.metadata
        existing = {
            "dtype": last.dtype,
            "vocab_size": metadata.vocab_size,
            "tokenizer_fingerprint": metadata.tokenizer_fingerprint,
        }
        for name, there in existing.items():
            given = getattr(self, name)
            if given is not None and (storage_dtype(given) if name == "dtype" else given) != there:
                raise UserError(
                    f"{name}={given}: the data set appended to has {there} ({last.path}). "
                    "Append what fits, or write a new data set"
                )
        return replace(self, **existing)


class TextDocument(NamedTuple):
    """A document of a text that its tokenizer may change."""

    tokens: np.ndarray
    text_bytes: int
    """UTF-8 bytes of the text."""
    counted_bytes: int
    """The bytes of the tokens by `TextBytes`."""


def write_shards(
    folder: Path,
    name: Callable[[int], str],
    items: Iterable[Any],
    options: WriteOptions,
    *,
    after: Metadata | None = None,
    finished: Callable[[Path], None] = lambda path: None,
) -> int:
    """Write documents to `folder / name(index)`, with a new shard before `max_shard_bytes` of tokens are exceeded.

    A document is never split: a larger one has a separate shard. No reader may look into the folder. To append, `after`
    is the last existing shard; `finished` is called with each complete shard. Returns the number of shards, 0 if there
    were no items; if an item is refused (ValueError), no shards are left.
    """
    documents = (
        (number, as_array(item[0], number), item[1:]) if isinstance(item, TextDocument)
        else (number, as_array(item, number), ())
        for number, item in enumerate(items)
    )  # fmt: skip
    first = next(documents, None)
    if first is None:
        return 0
    if options.dtype is not None:
        dtype = storage_dtype(options.dtype)
    else:
        dtype = first[1].dtype if options.vocab_size is None else smallest_dtype(options.vocab_size)
    settings = ShardSettings(
        dtype=dtype,
        separator=separator_value(options.separator, dtype),
        block_size=options.block_size,
        vocab_size=options.vocab_size,
        tokenizer_fingerprint=options.tokenizer_fingerprint,
    )
    limit = options.max_shard_bytes
    per_document = settings.separator is not None
    written: list[Path] = []
    writer: ShardWriter | None = None
    try:
        for number, raw, sizes in chain([first], documents):
            document = cast_lossless(raw, dtype, options.vocab_size, number)
            size = (len(document) + per_document) * dtype.itemsize
            if writer is not None and limit is not None and writer.token_bytes + size > limit:
                after = writer.finish()
                writer = None
                finished(written[-1])
            if writer is None:
                path = folder / name(after.index + 1 if after else 0)
                written.append(path)
                writer = ShardWriter(path, settings, after=after)
            writer.add(document, *sizes)
        if writer is not None:
            writer.finish()
            finished(written[-1])
    except BaseException:
        if writer is not None:
            with suppress(OSError):  # report the error that ended the writing
                writer.abort()
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return len(written)


def write_data_set(target: Target, items: Iterable[Any], options: WriteOptions, *, append: bool) -> None:
    """Write documents as the shards of a target: all of them appear at once, or none. Errors as of `Roxxel.write`.

    Numbered shards are a data set of their folder: its lock is held from the first look on. A single file depends on no
    other, so many may be made in one folder at the same time; the lock is held while one takes its place.
    """
    if target.numbered or append:
        with writing(target.folder):
            _write(target, items, options, append)
    else:
        _write(target, items, options, append)


def _write(target: Target, items: Iterable[Any], options: WriteOptions, append: bool) -> None:
    with staging(target.folder, target.name(0)) as staged:
        existing = target.shards()
        after = None
        if append and existing:
            last = open_slices(existing, alone=not target.numbered)[-1].shard
            options, after = options.continuing(last), last.metadata
        if not write_shards(staged, target.name, items, options, after=after) and after is None:
            raise UserError(f"{target.folder / target.name(0)}: there were no items to write; nothing was changed")
        replaced = [] if append else [path.name for path in existing]
        if replaced and target.is_folder:
            replaced.append(BUILD_FILE)  # it describes shards that are no more
        with nullcontext() if target.numbered or append else writing(target.folder, nested=True, wait_s=FINISH_LIMIT_S):
            publish(staged, replaced)
