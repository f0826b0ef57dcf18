"""Lossless conversion of the items of `Roxxel.write` to arrays of one dtype."""

from typing import Any

import numpy as np

from roxxel_dist.data.files.format import DTYPES
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument


def as_array(item: Any, number: int) -> np.ndarray:
    """One document as an array [tokens]: text becomes its UTF-8 bytes (uint8), arrays are unchanged."""
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


def cast_lossless(array: np.ndarray, dtype: np.dtype, vocab_size: int | None, number: int) -> np.ndarray:
    """The same values in `dtype`; ValueError if one would change, or is not an id below `vocab_size`."""
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
