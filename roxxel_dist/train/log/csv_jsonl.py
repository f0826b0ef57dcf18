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
from typing import Any, BinaryIO, TextIO

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


class JsonlReader:
    """Follows a `metrics.jsonl` that is being written, perhaps by another process; from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path, self._torn, self._lines = path, b"", 0
        self._file: BinaryIO | None = None

    def restart(self) -> None:
        """Read from the beginning again: the file was replaced."""
        self.close()
        self._torn, self._lines = b"", 0

    def replaced(self) -> bool:
        """Whether the file that is being read is no longer the one of that name."""
        if self._file is None:
            return False
        here = os.fstat(self._file.fileno())
        return not (self._path.exists() and os.path.samestat(here, self._path.stat()))

    def rows(self) -> Iterator[dict[str, float]]:
        """The rows that have come since the last call; without what was not finite, and without the digest."""
        for row in self.objects():
            yield {name: value for name, value in row.items() if value is not None and name != DIGEST}

    def objects(self) -> Iterator[dict[str, Any]]:
        """The new rows with the digest, and None for a metric that was not finite. Raises ValueError where a line is no
        row."""
        if self._file is None:
            if not self._path.exists():
                return
            with _readable(self._path):
                self._file = self._path.open("rb")
        *lines, self._torn = (self._torn + self._file.read()).split(b"\n")
        for line in lines:
            self._lines += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                shown = line[:60].decode("utf-8", "replace")
                raise UserError(f"{self._path}, line {self._lines}: {shown!r} is no JSON object: take the line out")
            yield row

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def read_rows(path: Path) -> list[dict[str, float]]:
    """The whole rows of a `metrics.jsonl`, as `JsonlReader.rows` gives them; none where there is no file."""
    reader = JsonlReader(path)
    try:
        return list(reader.rows())
    finally:
        reader.close()


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
