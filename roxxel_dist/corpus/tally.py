"""What a build leaves out of its texts, and what its tokenizer changes of them, in numbers."""

from collections import Counter
from dataclasses import dataclass, field

from roxxel_dist.data.tokenizer.changes import Encoded, size_of

SHOWN = 5


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

    def add(self, text_bytes: int, encoded: Encoded) -> None:
        """One document."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.changed += encoded.is_changed
        self.lost.update(encoded.lost or {})
        self.added_bytes += encoded.added_bytes
        self.unknown += encoded.unknown
        self.ends += encoded.ends > 0

    def lines(self) -> list[str]:
        """What people should know, a line each."""
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
