"""What a trial reports, read while it trains: from the metrics of its run directory."""

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from roxxel_dist.run_directory import METRICS, SUMMARY

Report = tuple[int, float]
CHOSEN = {
    "train_loss": operator.itemgetter(-1),
    "tokens": operator.itemgetter(-1),
    "vram_gb": max,
    "ram_gb": max,
    "ms_per_step": median,
    "tokens_per_s": median,
}
"""Metrics that are kept with a result, and which of their values."""


class Tail:
    """Follows a file that grows by lines and may be replaced by another one of its name."""

    def __init__(self, path: Path) -> None:
        self._path, self._torn = path, b""
        self._file: BinaryIO | None = None

    def lines(self) -> Iterator[bytes]:
        """The complete lines that have come since the last call; all of them again where the file was replaced."""
        if self._file is not None and self._replaced(self._file):
            self.close()
        if self._file is None:
            if not self._path.exists():
                return
            self._file, self._torn = self._path.open("rb"), b""
        *lines, self._torn = (self._torn + self._file.read()).split(b"\n")
        yield from lines

    def _replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


class RunReader:
    """Follows `metrics.jsonl` of a run.

    Args:
        run: the run directory; it need not exist yet.
        metric: whose values are wanted.

    Attributes:
        names: of all metrics that came.
    """

    def __init__(self, run: Path, metric: str) -> None:
        self._run, self._metric, self._tail = run, metric, Tail(run / METRICS)
        self._rows: dict[int, dict[str, Any]] = {}
        self._told = -1
        self.names: set[str] = set()

    def read(self, *, last: bool = False) -> list[Report]:
        """(step, value) for each new value of the metric, in order of steps; one that is not finite is NaN.

        Args:
            last: the run has ended, this is the last call.
        """
        found = []
        for line in self._tail.lines():
            row = json.loads(line)
            step = row["step"]
            self._rows[step] = row
            self.names |= row.keys() - {"step"}
            # A run that goes back to its checkpoint writes rows again that were reported.
            if self._metric in row and step > self._told:
                self._told = step
                value = row[self._metric]
                found.append((step, math.nan if value is None else float(value)))
        return found

    def more(self) -> dict[str, Any]:
        """What else is worth knowing of a trial: all of it where the run has it."""
        return more_of(self._rows) | self._parameters()

    def _parameters(self) -> dict[str, int]:
        try:
            summary = json.loads((self._run / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: summary[name] for name in ("parameters", "trainable_parameters") if name in summary}

    def close(self) -> None:
        """Close the file."""
        self._tail.close()


def more_of(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """How far a run came, its last losses, most memory and usual speed, where its rows have them; rows by step."""
    if not rows:
        return {}
    found: dict[str, Any] = {"steps": max(rows)}
    for name, choose in CHOSEN.items():
        known = [rows[step][name] for step in sorted(rows) if isinstance(rows[step].get(name), int | float)]
        found |= {name: choose(known)} if known else {}
    return found
