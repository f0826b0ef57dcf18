"""The bytes of text that a token stands for, which make losses of different tokenizers comparable."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

MOST_TOGETHER = 8192
"""Texts that are decoded in one call."""


class TextBytes(NamedTuple):
    """Bytes of UTF-8 text of each token of a vocabulary of V ids; special tokens have none."""

    inside: np.ndarray
    """int32[V]: of a token with others before it in its document. A token may be part of a character: its own bytes."""
    first: np.ndarray
    """int32[V]: of the first token of a document. Some tokenizers put a space before a text, which is none of it."""
    end: int
    """The id of end-of-text, which the first token of a document follows; -1 where there is none."""

    def bytes_of(self, ids: np.ndarray, separated: bool) -> int:
        """The bytes of a document's ids [tokens]; where documents are not separated, no token counts as the first."""
        first = self.first[ids[:1]] if separated else self.inside[ids[:1]]
        return int(first.sum()) + int(self.inside[ids[1:]].sum(dtype=np.int64))


def measure_text_bytes(
    decode: Callable[[Sequence[list[int]]], Sequence[str]], size: int, known: Mapping[int, int], end: int
) -> TextBytes:
    """The bytes by which a text grows with each token of a vocabulary of a size.

    `decode` turns lists of ids into texts. `known` are the bytes of ids that are no text alone: 1 of a single byte, 0
    of a special token. `end` is the id of end-of-text, or -1.
    """
    others = [number for number in range(size) if number not in known]
    first, inside = np.zeros(size, np.int32), np.zeros(size, np.int32)
    for number, count in known.items():
        first[number] = inside[number] = count
    alone = _lengths(decode, [[number] for number in others])
    first[others] = alone
    # Any token with text will do before the others, but one that is a word: a decoder may join other signs to it.
    texts = decode([[number] for number in others[:MOST_TOGETHER]])
    before = next(
        (number for number, text in zip(others, texts, strict=False) if text.isascii() and text.isalpha()), None
    )
    if before is None:
        inside[others] = alone
    else:
        pairs = _lengths(decode, [[before, number] for number in others])
        inside[others] = np.maximum(pairs - first[before], 0)
    return TextBytes(inside, first, end)


def _lengths(decode: Callable[[Sequence[list[int]]], Sequence[str]], ids: Sequence[list[int]]) -> np.ndarray:
    """int32[n]: the bytes of each text."""
    pieces = [decode(ids[begin : begin + MOST_TOGETHER]) for begin in range(0, len(ids), MOST_TOGETHER)]
    return np.array([len(text.encode()) for texts in pieces for text in texts], np.int32)
