"""Where in a file something stands, and what it could have been: for errors that name line and key."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any


class YamlLocator:
    """Tells where in a file something stands."""

    def __init__(self, file: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self._file, self._lines = file, lines

    def error(self, path: Sequence[str], text: str) -> ValueError:
        """An error about a key, with the line of the nearest thing that has one."""
        known = next((path[:end] for end in range(len(path), 0, -1) if tuple(path[:end]) in self._lines), None)
        line = f", line {self._lines[tuple(known)]}" if known is not None else ""
        return ValueError(f"{self._file}{line}: {'.'.join(path)}{': ' if path else ''}{text}")


def nearest(name: Any, names: Sequence[str]) -> str:
    """What to say of a name that is not among those that there are."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def is_amount(value: Any) -> bool:
    """Whether it is a finite number, 0 or more."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
