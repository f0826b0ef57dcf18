"""Counts of what a build leaves out of its texts, and of what its tokenizer changes of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roxxel_dist.data.tokenizer.tokenizer import Tokenizer

SHOWN = 5


class EncodedText(NamedTuple):
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


@dataclass(kw_only=True)
class Tally:
    """Counted while texts are read and encoded."""

    empty: int = 0
    """Texts that are empty or missing."""
    documents: int = 0
    text_bytes: int = 0
    changed: int = 0
    """Documents of which another text comes back."""
    lost: Counter[str] = field(default_factory=Counter[str])
    """The characters that do not come back."""
    added_bytes: int = 0
    """Of characters that come back and were not there."""
    unknown: int = 0
    """Ids of unknown characters or words."""
    ends: int = 0
    """Documents whose letters became the id of end-of-text."""

    def add(self, text_bytes: int, encoded: EncodedText) -> None:
        """Count a document."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.changed += encoded.is_changed
        self.lost.update(encoded.lost or {})
        self.added_bytes += encoded.added_bytes
        self.unknown += encoded.unknown
        self.ends += encoded.ends > 0

    def lines(self) -> list[str]:
        """The lines about what people should know."""
        found: list[str] = []
        if self.empty:
            found.append(f"left out: {self.empty:,} empty or missing texts")
        if self.changed:
            commonest = ", ".join(f"{count:,} x {name!r}" for name, count in self.lost.most_common(SHOWN))
            more = ", ..." if len(self.lost) > SHOWN else ""
            unknown = f", {self.unknown:,} unknown ids" if self.unknown else ""
            found.append(
                f"text that the tokenizer changes: {self.changed:,} of {self.documents:,} documents; "
                f"{size_of(self.lost):,} of {self.text_bytes:,} bytes do not come back"
                f"{f' ({commonest}{more})' if self.lost else ''}, {self.added_bytes:,} others come{unknown}. "
                f"Another tokenizer, such as bpe, keeps all of it"
            )
        if self.ends:
            found.append(
                f"letters of {self.ends:,} of {self.documents:,} documents are the tokenizer's end-of-text: such a "
                "document is read as several. Change these letters, or take a tokenizer with another end-of-text"
            )
        return found


def changes(tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[list[int]]) -> list[EncodedText]:
    """The difference of each text from its ids, with empty `ids`; a decoding, unless the tokenizer is lossless."""
    if tokenizer.is_lossless:
        return [EncodedText(b"")] * len(texts)
    unknown, end = tokenizer.unknown_id, tokenizer.end_id
    found: list[EncodedText] = []
    for text, one, back in zip(texts, ids, tokenizer.decode_batch(ids), strict=True):
        if text == back:
            found.append(EncodedText(b"", ends=one.count(end)))
            continue
        before, after = Counter(text), Counter(back)
        added = size_of(after - before)
        found.append(EncodedText(b"", True, before - after, added, one.count(unknown), one.count(end)))
    return found


def size_of(characters: Mapping[str, int]) -> int:
    """The bytes of some characters, each as often as it counts, in UTF-8."""
    return sum(len(character.encode()) * count for character, count in characters.items())
