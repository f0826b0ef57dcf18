"""Rows of several documents: the document of each token, so that attention can stay within a document.

In each row the documents are numbered from 0 in order (`segments`), and the tokens of each are counted from 0
(`positions`). If a row begins inside a document, positions count from the start of the row. A separator belongs to the
document that it ends. A file without document ends is one document.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.files.slices import TokenFile
from roxxel_dist.process.exit_codes import UserError


class Packed(NamedTuple):
    """A batch of rows with several documents: three int32 [B, L] arrays of numpy or jax, with the same placement."""

    tokens: Any
    segments: Any
    """The number of a token's document, from 0 in each row."""
    positions: Any
    """The token's position in its document, from 0 at the start of the document, or of the row if that is later."""


def segments_and_positions(
    files: Sequence[TokenFile], numbers: np.ndarray, offsets: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), int32 [R, length] each: see `Roxxel.segments`. Reads only document ends in the windows.
    `numbers` are the files of the windows, `offsets` the windows' first tokens, counted from the file's first."""
    rows = np.arange(len(offsets)) * length
    begins = [rows]
    for number in np.unique(numbers).tolist():
        chosen = np.flatnonzero(numbers == number)
        row, position = _begins(files[number], offsets[chosen], length)
        begins.append(rows[chosen[row]] + position)
    return _count(np.unique(np.concatenate(begins)), len(offsets), length)


def _count(begins: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), from the sorted starts of rows and documents in the concatenated rows."""
    tokens = np.diff(begins, append=rows * length)
    row, position = np.divmod(begins, length)
    segment = np.arange(len(begins)) - np.searchsorted(begins, row * length)
    segments = np.repeat(segment.astype(np.int32), tokens).reshape(rows, length)
    starts = np.repeat(position.astype(np.int32), tokens).reshape(rows, length)
    return segments, np.arange(length, dtype=np.int32) - starts


def _begins(file: TokenFile, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(window, place in it) of every document that begins inside a window of a file, not at its start. An empty
    document begins at the same place as the next: the place appears twice. Raises ValueError: its document ends are
    damaged."""
    ends = file.document_ends
    first, last = (ends.searchsorted(offsets + at, side="right") for at in (0, length - 1))
    count = np.maximum(last - first, 0)
    window = np.repeat(np.arange(len(offsets)), count)
    # The document ends in each window have consecutive numbers from the first.
    number = np.arange(len(window)) + np.repeat(first - np.cumsum(count) + count, count)
    position = ends[number] - offsets[window]
    if (last < first).any() or (last >= len(ends)).any() or ((position < 1) | (position >= length)).any():
        raise UserError(f"{file.path}: the document ends are damaged. Write the file again from its source")
    return window, position
