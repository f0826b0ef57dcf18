"""Rows of several documents: which token is of which, so that attention can stop where a document ends.

Of each row the documents are numbered from 0 in the order in which they appear (`segments`), and the tokens of each are
counted from 0 (`positions`). A row that begins inside a document counts from its own start there: what came before was
not read. A separator belongs to the document that it ends. A file that does not keep where its documents end is one
document.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.slices import TokenFile


class Packed(NamedTuple):
    """A batch whose rows tell their documents apart: three int32 [B, L], numpy's or jax's, placed alike."""

    tokens: Any
    segments: Any
    """The document that a token is of, from 0 in each row."""
    positions: Any
    """The token's place in its document, from 0 where the document, or else the row, begins."""


def segments_and_positions(
    files: Sequence[TokenFile], numbers: np.ndarray, offsets: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), int32 [R, length] each: see `Roxxel.segments`.

    Only the ends inside the windows are looked up.

    Args:
        files: of one data set.
        numbers: int64 [R], the file that each window is in.
        offsets: int64 [R], the windows' first tokens, counted from their file's.
        length: tokens a window.
    """
    rows = np.arange(len(offsets)) * length
    begins = [rows]
    for number in np.unique(numbers).tolist():
        chosen = np.flatnonzero(numbers == number)
        row, position = _begins(files[number], offsets[chosen], length)
        begins.append(rows[chosen[row]] + position)
    return _count(np.unique(np.concatenate(begins)), len(offsets), length)


def _count(begins: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), from the sorted places where a row or a document begins, the rows laid end to end."""
    tokens = np.diff(begins, append=rows * length)
    row, position = np.divmod(begins, length)
    segment = np.arange(len(begins)) - np.searchsorted(begins, row * length)
    segments = np.repeat(segment.astype(np.int32), tokens).reshape(rows, length)
    starts = np.repeat(position.astype(np.int32), tokens).reshape(rows, length)
    return segments, np.arange(length, dtype=np.int32) - starts


def _begins(file: TokenFile, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(window, place in it) of every document that begins inside a window of a file, not with it.

    A document without a token begins where the next does: the same position comes twice.

    Raises:
        ValueError: its document ends are damaged.
    """
    ends = file.document_ends
    first, last = (ends.searchsorted(offsets + at, side="right") for at in (0, length - 1))
    count = np.maximum(last - first, 0)
    window = np.repeat(np.arange(len(offsets)), count)
    # In each window the numbers of its ends follow each other from the first.
    number = np.arange(len(window)) + np.repeat(first - np.cumsum(count) + count, count)
    position = ends[number] - offsets[window]
    if (last < first).any() or (last >= len(ends)).any() or ((position < 1) | (position >= length)).any():
        raise ValueError(f"{file.path}: the document ends are damaged. Write the file again from its source")
    return window, position
