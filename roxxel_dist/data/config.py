"""How text becomes tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Used where the data is text; shards bring their own tokenizer."""

    tokenizer_type: Literal["char", "byte", "bpe"] = "bpe"
    """What a token is: a character, a byte, or a byte-pair piece."""
