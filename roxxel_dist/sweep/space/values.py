"""Values of parameters: which ones a search keeps as they were written, and their exact forms as text and as JSON.

A value goes into the journal (JSON), the words and the W&B config of a program (YAML), and comes back from the journal.
Only what arrives everywhere as it was is taken; the rest is refused where it is read.
"""

import json
import math
from collections.abc import Mapping
from datetime import date
from typing import Any

from roxxel_dist.process.exit_codes import UserError

FLOAT = "$float"
"""The only key of what JSON has instead of a float that it has no form for: {"$float": "inf"}, "-inf" or "nan"."""
DEEPEST = 20
"""Lists and mappings in each other."""
LONGEST_INTEGER = 4_000
"""Digits of a whole number: Python reads and writes no more than 4,300."""
LONGEST_SHOWN = 60


def check_value(value: Any, depth: int = 0) -> Any:
    """The value, with scalars of numpy as Python's own. Raises UserError where it would arrive as something else; it
    says what the value is, and what to write."""
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if depth > DEEPEST:
        raise UserError(f"a value has more than {DEEPEST} lists and mappings in each other: use fewer")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"the key {key!r} of {excerpt(value)} is no text: write it in quotes")
            if key == FLOAT:
                raise UserError(f"the key {FLOAT} of {excerpt(value)} has a meaning in the journal: use another one")
            _check_text(key)
        return {key: check_value(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [check_value(inner, depth + 1) for inner in value]
    _check_scalar(value)
    return value


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int):
        if value.bit_length() > LONGEST_INTEGER * math.log2(10):
            raise UserError(f"a whole number of more than {LONGEST_INTEGER:,} digits: write it as a text")
    elif isinstance(value, float):
        if math.isnan(value):
            raise UserError("nan cannot be a value, because W&B's client makes null of it: write null, or a text")
    elif value is not None:
        kind, cure = _kind_and_cure(value)
        raise UserError(f"{excerpt(value)} is {kind}: {cure}")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise UserError(f"{excerpt(text)} has a null character, which no word of a command can have: leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{excerpt(text)} has half of a surrogate pair, which is no character: leave it out") from None


def _kind_and_cure(value: Any) -> tuple[str, str]:
    if isinstance(value, date):
        return "a date", "write it in quotes, as a text"
    if isinstance(value, tuple | set | frozenset):
        return "a tuple" if isinstance(value, tuple) else "a set", "write a list, [a, b]"
    kind = "bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
    return kind, "use a number, a text, true, false, null, or lists and mappings of them"


def excerpt(value: Any) -> str:
    """A value for a message, cut off where it is long."""
    try:
        text = str(value) if isinstance(value, date) else repr(value)
    except ValueError:  # a number of too many digits for Python
        text = f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a value with a huge number"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def as_text(value: Any) -> str:
    """A text that is the same for equal values alone: 1, 1.0 and true are three, and so are 0.0 and -0.0."""
    return json.dumps(value, sort_keys=True, default=repr)


def to_json(value: Any) -> Any:
    """A value with a form in JSON for each float; `from_json` gives it back."""
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(float(value))}
    # A server that leads a sweep may give other things.
    return value if isinstance(value, str | int | float) or value is None else str(value)


def from_json(value: Any) -> Any:
    """A value from its form in JSON."""
    if isinstance(value, dict):
        if value.keys() == {FLOAT}:
            return float(value[FLOAT])
        return {key: from_json(inner) for key, inner in value.items()}
    return [from_json(inner) for inner in value] if isinstance(value, list) else value
