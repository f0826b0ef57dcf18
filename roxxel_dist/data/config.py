"""How text becomes tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Used where the data is text; shards bring their own tokenizer."""

    tokenizer_type: Literal["char", "byte", "bpe"] = "bpe"
    """What a token is: a character, a byte, or a byte-pair piece."""
    validation: dict[str, str] | None = None
    """Data sets to validate on, name: path; then nothing of the training data is held out."""

    def __post_init__(self) -> None:
        for name, path in (self.validation or {}).items():
            if not (isinstance(name, str) and name and isinstance(path, str)):
                raise ValueError(
                    f"validation: {name!r} is {path!r}: write names and paths, such as {{code: data/code}}"
                )
