"""The metrics on disk: `training_log.csv`, a row a logged step, and `metrics.jsonl`, an object a logged step.

Both are append-only and flushed at every row. A resumed run first drops a torn last line and the rows after the step it
was restored to, so there is one row a logged step however often a run was killed.
"""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from roxxel_dist.process.durable import put_back, write_file
from roxxel_dist.process.exit_codes import UserError

COLUMNS = (
    "step", "train_loss", "val_loss", "train_bal", "val_bal", "ms_per_step",
    "tokens_per_s", "phase", "tokens", "lr", "grad_norm",
)  # fmt: skip
"""The first columns of `training_log.csv`."""
DIGEST = "digest"
"""The one value of a row of `metrics.jsonl` that is no number."""


class JsonlTracker:
    """Continues a JSON-lines file behind `restored_step`: every metric, and the running digest; what is not finite is
    null, JSON has no NaN."""

    durable = True

    def __init__(self, path: Path, restored_step: float = 0) -> None:
        self._path, self._digest = path, ""
        self._file: TextIO = self._continue(restored_step)

    def rewind(self, step: float) -> None:
        """Drop the rows after `step`."""
        self._put_back()
        self._file.close()
        self._file = self._continue(step)

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._put_back()
        line = self._line(row)  # it may replace the file
        self._file.write(line)
        self._file.flush()

    def digest(self, text: str) -> None:
        """The running digest of the row that comes next."""
        self._digest = text

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, row: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in row.items()}
        if self._digest:
            values[DIGEST] = self._digest
        return json.dumps(values) + "\n"

    def _put_back(self) -> None:
        """Write the file again where a cleaner has deleted it: while it is open its rows can be read."""
        if put_back(self._path, self._file.fileno()):
            self._file.close()
            self._file = self._continue(math.inf)

    def _continue(self, last_step: float) -> TextIO:
        """The file, at its end."""
        keep_rows(self._path, last_step, lambda line: json.loads(line)["step"])
        return self._path.open("a+", encoding="utf-8")


class CsvTracker(JsonlTracker):
    """Continues a table, behind `restored_step`; infinite keeps all rows.

    The first columns of a new table are given; the others are the metrics as they first come.
    """

    def __init__(self, path: Path, restored_step: float = math.inf, columns: Sequence[str] = COLUMNS) -> None:
        self._leading, self._columns = list(columns), list[str]()
        super().__init__(path, restored_step)

    def _line(self, row: Mapping[str, Any]) -> str:
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        return _lines([[row.get(name, "") for name in self._columns]])

    def _continue(self, last_step: float) -> TextIO:
        keep_rows(self._path, last_step, lambda line: int(line.split(",", 1)[0]), header=True)
        file = self._path.open("a+", encoding="utf-8", newline="")
        file.seek(0)
        self._columns = next(csv.reader(file), [])
        file.seek(0, os.SEEK_END)
        return file

    def _widen(self, new: list[str]) -> None:
        """Rewrite the table with more columns, empty so far; a kill leaves the old file or the new one."""
        self._file.seek(0)
        rows = list(csv.reader(self._file))[1:]
        columns = self._columns or self._leading
        columns = [*columns, *(name for name in new if name not in columns)]
        write_file(self._path, _lines([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]))
        self.rewind(math.inf)


def _lines(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


MARK_BYTES = 1024
"""Bytes before the place that was read to, by which a file is known again."""


class Tail:
    """A growing file of lines, read in portions: each complete line once.

    A file is the same as long as the bytes before the place that was read to are: a copy of it that has grown
    continues, and a file that was cut off, or written again, starts anew.

    Args:
        path: the file, which need not exist.

    Attributes:
        restarted: whether the last call started again: the first call, or another file.
        size: the bytes of the file at the last call.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.restarted: bool = False
        self.size: int = 0
        self._offset, self._torn, self._mark, self._begun, self._count = 0, b"", b"", False, 0

    def objects(self, most: int | None = None) -> list[dict[str, Any]]:
        """The JSON objects of the new lines; other lines are skipped, and a file that cannot be read has none. `most`:
        bytes that are read at most."""
        try:
            return json_objects(self._lines(most))
        except OSError:
            self._begun, self._offset, self.size = False, 0, 0
            return []

    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects of the new lines; none where there is no file.

        Raises:
            UserError: a line is no object.
            UnreadableLogError: the file cannot be read.
        """
        with _readable(self.path):
            lines = self._lines() if self.path.exists() else []
        rows = json_objects(lines)
        if len(rows) != len(lines):
            first = self._count - len(lines) + 1
            number, line = next((at, line) for at, line in enumerate(lines, first) if len(json_objects([line])) != 1)
            shown = line[:60].decode("utf-8", "replace")
            raise UserError(f"{self.path}, line {number}: {shown!r} is no JSON object: take the line out")
        return rows

    def _lines(self, most: int | None = None) -> list[bytes]:
        """The new lines, without line ends. Raises OSError where the file cannot be read."""
        self.restarted = False
        with self.path.open("rb", buffering=0) as file:
            self.size = os.fstat(file.fileno()).st_size
            if not self._begun or not self._is_same(file.fileno()):
                self.restarted = self._begun = True
                self._torn, self._mark, self._offset, self._count = b"", b"", 0, 0
            wanted = self.unread_bytes
            data = os.pread(file.fileno(), wanted if most is None else min(wanted, most), self._offset)
        self._offset += len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:]
        *lines, self._torn = (self._torn + data).split(b"\n")
        self._count += len(lines)
        return lines

    def _is_same(self, file: int) -> bool:
        return (
            self.size >= self._offset and os.pread(file, len(self._mark), self._offset - len(self._mark)) == self._mark
        )

    @property
    def unread_bytes(self) -> int:
        """The bytes of the file that were not read yet."""
        return self.size - self._offset

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
        rows = [row for line in lines for row in _values(line)]
    return [row for row in rows if isinstance(row, dict)]


def _values(line: bytes) -> list[Any]:
    with contextlib.suppress(ValueError, RecursionError):
        return [json.loads(line)]
    return []


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, without what was not finite, and without digests; none where there is no file.

    Raises what `Tail.rows` raises.
    """
    return [
        {name: value for name, value in row.items() if value is not None and name != DIGEST}
        for row in Tail(path).rows()
    ]


def keep_rows(path: Path, last_step: float, step_of: Callable[[str], int], header: bool = False) -> None:
    """Drop from a log the rows after `last_step` and a torn last line, by replacing the file in one move."""
    if not path.exists():
        return
    with _readable(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    head, rows = (lines[:1], lines[1:]) if header else ([], lines)
    kept = [line for line in rows if line.endswith("\n") and _step(line, step_of) <= last_step]
    if header and not (head and head[0].endswith("\n")):
        head = []
    if head + kept != lines:
        write_file(path, "".join(head + kept))


class UnreadableLogError(UserError, OSError):
    """A log of a run is there, and cannot be read: it is a folder, or belongs to somebody else."""


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises UnreadableLogError for an error of the system."""
    try:
        yield
    except OSError as error:
        raise UnreadableLogError(
            f"{path}: cannot be read ({error.strerror}): move it away, and put the log of the run back if there is one"
        ) from error


def _step(line: str, step_of: Callable[[str], int]) -> float:
    try:
        return step_of(line)
    except (ValueError, KeyError, TypeError):
        return math.nan  # not a row: drop it
