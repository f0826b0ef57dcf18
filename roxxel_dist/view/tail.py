"""A growing file of lines, read in portions. No line is read twice."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK_BYTES = 1024
"""Bytes before the place that was read to, by which a file is known again."""


class Tail:
    """The complete lines that were added since the last call of `lines`.

    A file is the same as long as the bytes before the place that was read to are: a copy of it that has grown
    continues, and a file that was cut off, or written again, starts anew.

    Args:
        path: the file, which need not exist.

    Attributes:
        restarted: whether the last call started again: the first call, or another file.
        offset: the bytes that were read.
        size: the bytes of the file at the last call.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.restarted: bool = False
        self.offset: int = 0
        self.size: int = 0
        self._torn, self._mark, self._begun = b"", b"", False

    def lines(self, most: int | None = None) -> list[bytes]:
        """The new lines, without line ends; none if there is no file. `most`: bytes that are read at most."""
        self.restarted = False
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:
            self._begun, self.offset, self.size = False, 0, 0
            return []
        with file:
            self.size = os.fstat(file.fileno()).st_size
            if not self._begun or not self._is_same(file.fileno()):
                self.restarted = self._begun = True
                self._torn, self._mark, self.offset = b"", b"", 0
            wanted = self.size - self.offset
            data = os.pread(file.fileno(), wanted if most is None else min(wanted, most), self.offset)
        self.offset += len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:]
        *lines, self._torn = (self._torn + data).split(b"\n")
        return lines

    def _is_same(self, file: int) -> bool:
        return self.size >= self.offset and os.pread(file, len(self._mark), self.offset - len(self._mark)) == self._mark

    @property
    def unread_bytes(self) -> int:
        """The bytes of the file that were not read yet."""
        return self.size - self.offset

    def end(self, most: int) -> list[dict[str, Any]]:
        """The JSON objects of the last `most` bytes of the file, wherever it was read to."""
        try:
            with self.path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), most, max(0, size - most))
        except OSError:
            return []
        lines = data.split(b"\n")[:-1]
        return json_objects(lines[1:] if size > most else lines)


def json_objects(lines: list[bytes]) -> list[dict[str, Any]]:
    """The JSON objects in lines; other lines are skipped."""
    try:
        rows: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")  # one call is a third of the work
    except (ValueError, RecursionError):
        rows = [json_object(line) for line in lines]
    return [row for row in rows if isinstance(row, dict)]


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if there is no complete one."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None
