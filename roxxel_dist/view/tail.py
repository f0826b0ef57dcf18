"""A growing file of lines, read from its end, and rows at even places of a long file. No line is read twice."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 300, 8 << 10
"""Places of a long file that are searched for a row, and the bytes read at each."""


class Tail:
    """The complete lines that were added since the last call of `lines`.

    Args:
        path: the file, which need not exist.
        limit: bytes at the end that a call reads at most; default: all.

    Attributes:
        restarted: whether the last call started again: the first call, a replaced or truncated file, or more than
            `limit` new bytes.
        start: the byte offset of the last start.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path: Path = path
        self.limit: int | None = limit
        self.restarted: bool = False
        self.start: int = 0
        self._torn, self._offset, self._inode = b"", 0, -1

    def lines(self) -> list[bytes]:
        """The new lines, without line ends; none if there is no file."""
        self.restarted = False
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:
            self._inode = -1
            return []
        with file:
            status = os.fstat(file.fileno())
            size, limit = status.st_size, self.limit or status.st_size
            if status.st_ino != self._inode or size < self._offset or size - self._offset > max(limit, 1):
                self.restarted, self._inode, self._torn = True, status.st_ino, b""
                self._offset = self.start = max(0, size - limit)
            file.seek(self._offset)
            data = file.read(size - self._offset)
        self._offset += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        return lines[1:] if self.restarted and self.start else lines

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects of the new lines; other lines are skipped."""
        return [row for line in self.lines() if (row := json_object(line)) is not None]


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if there is no complete one."""
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def sample(path: Path, end: int, key: str = "", count: int = SAMPLES, size: int = SAMPLE_BYTES) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, in order: the next row with `key` at each of `count` even places before `end`."""
    mark, rows, last = f'"{key}": '.encode() if key else b"", list[dict[str, Any]](), -1
    with path.open("rb", buffering=0) as file:
        for number in range(count):
            place = end * number // count
            data = os.pread(file.fileno(), min(size, end - place), place)
            begin = data.find(b"\n") + 1 if place else 0
            if mark and (found := data.find(mark, begin)) >= 0:
                begin = data.rfind(b"\n", 0, found) + 1
            elif mark:
                continue
            stop = data.find(b"\n", begin)
            if stop < 0 or place + begin <= last:
                continue
            last = place + begin
            rows += [row] if (row := json_object(data[begin:stop])) is not None else []
    return rows
