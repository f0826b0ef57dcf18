"""Writes a stream of documents as shards, with one document and no shard in memory; no value of a token changes."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.files.atomic_dir import FINISH_LIMIT_S, publish, staging_folder, writing
from roxxel_dist.data.files.discovery import BUILD_FILE, Target
from roxxel_dist.data.files.format import (
    DTYPES,
    Metadata,
    smallest_dtype,
    storage_dtype,
)
from roxxel_dist.data.files.shard import ShardWriter, WriteOptions
from roxxel_dist.data.files.slices import open_slices
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument


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
    options = replace(options, dtype=dtype, separator=separator_value(options.separator, dtype))
    limit, per_document = options.max_shard_bytes, options.separator is not None
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
                writer = ShardWriter(path, options, after=after)
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
    with staging_folder(target.folder, target.name(0)) as staged:
        existing = target.shards()
        after = None
        if append and existing:
            last = open_slices(existing, alone=not target.numbered)[-1].shard
            options, after = options.continue_from(last.metadata, last.dtype, last.path), last.metadata
        if not write_shards(staged, target.name, items, options, after=after) and after is None:
            raise UserError(f"{target.folder / target.name(0)}: there were no items to write; nothing was changed")
        replaced = [] if append else [path.name for path in existing]
        if replaced and target.is_folder:
            replaced.append(BUILD_FILE)  # it describes shards that are no more
        with nullcontext() if target.numbered or append else writing(target.folder, nested=True, wait_s=FINISH_LIMIT_S):
            publish(staged, replaced)


def as_array(item: Any, number: int) -> np.ndarray:
    """A document as an array [tokens]: text becomes its UTF-8 bytes (uint8), arrays are unchanged."""
    if isinstance(item, str):
        item = item.encode()
    if isinstance(item, (bytes, bytearray, memoryview)):
        return np.frombuffer(item, np.uint8)
    array = np.asarray(item)
    if array.ndim != 1:
        raise UserError(f"document {number} has shape {array.shape}: a document is text, bytes or a 1-D array")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise UserError(f"document {number} has dtype {array.dtype}: tokens are integers or floats of 8 to 64 bits")
    return array


def cast_lossless(array: np.ndarray, dtype: np.dtype, vocab_size: int | None, number: int) -> np.ndarray:
    """The values of an array in `dtype`; ValueError if one would change, or is not an id below `vocab_size`."""
    if vocab_size is not None and len(array) and not (array.min() >= 0 and array.max() < vocab_size):
        raise UserError(
            f"document {number} has ids from {array.min()} to {array.max()}: with "
            f"{argument('vocab_size', vocab_size)} they are "
            f"0 to {vocab_size - 1}. Was it made with another tokenizer?"
        )
    if array.dtype == dtype:
        return array
    if len(array) and not _keeps(array, dtype):
        raise UserError(
            f"document {number} ({array.dtype}, {array.min()} to {array.max()}) does not fit {dtype} without loss; "
            "give write() a dtype that holds every document"
        )
    return array.astype(dtype)


def _keeps(array: np.ndarray, dtype: np.dtype) -> bool:
    if dtype.kind == "f" and array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return np.array_equal(array.astype(dtype).astype(array.dtype), array, equal_nan=True)
    low, high = array.min(), array.max()
    if dtype.kind == "f":
        exact = 1 << (np.finfo(dtype).nmant + 1)
        return -exact <= int(low) and int(high) <= exact
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and np.array_equal(np.trunc(array), array)):
        return False
    limits = np.iinfo(dtype)
    return limits.min <= int(low) and int(high) <= limits.max


def separator_value(separator: str | bytes | int | float | None, dtype: np.dtype) -> int | float | None:
    """A separator as ONE element of `dtype`, or None for no separator.

    One byte is that number: `b"\\x00"` is token 0 whatever the dtype. As many bytes as an element has are the element.
    """
    if isinstance(separator, str):
        separator = separator.encode()
    if isinstance(separator, bytes):
        if len(separator) == 1:
            separator = separator[0]
        elif len(separator) == dtype.itemsize:
            return np.frombuffer(separator, dtype)[0].item()
        else:
            raise UserError(
                f"separator={separator!r}: a separator is one element of {dtype}: one byte, {dtype.itemsize} bytes, "
                "a number, or None for no separator"
            )
    if separator is None:
        return None
    value = np.asarray([separator])
    if value.ndim != 1 or value.dtype.kind not in "iuf" or not _keeps(value, dtype):
        raise UserError(f"separator={separator!r} is not an element of {dtype}; give one that is, or None")
    return value.astype(dtype)[0].item()
