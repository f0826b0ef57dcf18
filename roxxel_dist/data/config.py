"""The data sets, and the tokenizer of text."""

from typing import Literal

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import component


@component
class DataConfig:
    """Data sets by name. The tokenizer is for text data; shards have their own."""

    tokenizer_type: Literal["char", "byte", "bpe"] = "bpe"
    """Tokenizer for text, by what a token is: a character, a byte, or a byte-pair piece."""
    data_dtype: Literal["auto", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"] = "auto"
    """Type of the tokens in .bin files without a header; auto: uint16. Other files state their type, which must be the
    same."""
    datasets: dict[str, str] | None = None
    """Data sets by name, for the weights of phases: shards. The data set `self` is that of --data_path; you can also
    name it here."""
    validation: dict[str, str] | None = None
    """Validation data sets, name: path. With these, no training data is held out."""

    def __post_init__(self) -> None:
        for field in ("datasets", "validation"):
            for name, path in (getattr(self, field) or {}).items():
                if not (isinstance(name, str) and name and isinstance(path, str) and path):
                    raise UserError(
                        f"{field}: {name!r} is {path!r}: write names and paths, such as {{code: data/code}}"
                    )
