"""The metrics on disk: `training_log.csv`, a row a logged step, and `metrics.jsonl`, an object a logged step.

Both are append-only and flushed at every row. A resumed run first drops a torn last line and the rows after the step it
was restored to, so there is one row a logged step however often a run was killed.
"""

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

COLUMNS = ("step", "train_loss", "val_loss", "train_bal", "val_bal", "ms_per_step")
MORE_COLUMNS = ("tokens_per_s", "phase", "tokens", "lr", "grad_norm")


class CsvTracker:
    """Writes `training_log.csv`: the columns above, then what else the first row has."""

    durable = True

    def __init__(self, path: Path, restored_step: int = 0) -> None:
        keep_rows(path, restored_step, lambda line: int(line.split(",", 1)[0]), header=True)
        self._file = path.open("a+", encoding="utf-8", newline="")
        self._file.seek(0)
        self._columns = next(csv.reader(self._file), [])
        self._file.seek(0, os.SEEK_END)

    def row(self, row: Mapping[str, float]) -> None:
        """Append one row; a metric that the first row did not have is left to `metrics.jsonl`."""
        if not self._columns:
            always = (*COLUMNS, *MORE_COLUMNS)
            self._columns = [*always, *(name for name in row if name not in always)]
            self._write(self._columns)
        self._write([row.get(name, "") for name in self._columns])

    def _write(self, cells: list) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._file.write(line.getvalue())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonlTracker:
    """Writes `metrics.jsonl`: every metric of every logged step; what is not finite is null, as JSON has no NaN."""

    durable = True

    def __init__(self, path: Path, restored_step: int = 0) -> None:
        keep_rows(path, restored_step, lambda line: json.loads(line)["step"])
        self._file = path.open("a", encoding="utf-8")

    def row(self, row: Mapping[str, float]) -> None:
        """Append one object."""
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def keep_rows(path: Path, last_step: int, step_of: Callable[[str], int], header: bool = False) -> None:
    """Drop from a log the rows after `last_step` and a torn last line, by replacing the file in one move."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    head, rows = (lines[:1], lines[1:]) if header else ([], lines)
    kept = [line for line in rows if line.endswith("\n") and _step(line, step_of) <= last_step]
    if header and not (head and head[0].endswith("\n")):
        head = []
    if head + kept != lines:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(head + kept), encoding="utf-8")
        os.replace(temporary, path)


def _step(line: str, step_of: Callable[[str], int]) -> float:
    try:
        return step_of(line)
    except (ValueError, KeyError, TypeError):
        return float("inf")  # not a row: drop it
