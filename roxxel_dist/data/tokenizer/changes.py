"""What a tokenizer changes of a text: what does not come back from its ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from roxxel_dist.data.tokenizer.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """The ids of a text, and how it differs from the text that they stand for."""

    ids: bytes
    """In the smallest dtype that holds the vocabulary."""
    is_changed: bool = False
    """Whether another text comes back."""
    lost: Mapping[str, int] | None = None
    """The characters that do not come back, each as often as it is missing."""
    added_bytes: int = 0
    """Of the characters that come back and are not in the text."""
    unknown: int = 0
    """Ids of unknown characters or words."""
    ends: int = 0
    """Ids of end-of-text, which the letters of the text became."""


def changes(tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[list[int]]) -> list[Encoded]:
    """How the ids of each text differ from it, with empty `ids`. Costs a decoding, unless the tokenizer is lossless."""
    if tokenizer.is_lossless:
        return [Encoded(b"")] * len(texts)
    unknown, end = tokenizer.unknown_id, tokenizer.end_id
    found: list[Encoded] = []
    for text, one, back in zip(texts, ids, tokenizer.decode_batch(ids), strict=True):
        if text == back:
            found.append(Encoded(b"", ends=one.count(end)))
            continue
        before, after = Counter(text), Counter(back)
        added = size_of(after - before)
        found.append(Encoded(b"", True, before - after, added, one.count(unknown), one.count(end)))
    return found


def size_of(characters: Mapping[str, int]) -> int:
    """The bytes of some characters, each as often as it counts, in UTF-8."""
    return sum(len(character.encode()) * count for character, count in characters.items())
