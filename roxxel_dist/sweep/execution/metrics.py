"""What a trial reports, read while it trains: from the metrics of its run directory."""

import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from roxxel_dist.run_directory import METRICS, SUMMARY
from roxxel_dist.train.loggers.csv_jsonl import JsonlReader

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


class RunReader:
    """Follows `metrics.jsonl` of a run.

    Args:
        run: the run directory; it need not exist yet.
        metric: whose values are wanted.

    Attributes:
        names: of all metrics that came.
    """

    def __init__(self, run: Path, metric: str) -> None:
        self._run, self._metric, self._log = run, metric, JsonlReader(run / METRICS)
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._told = -1
        self.names: set[str] = set()

    def read(self, *, last: bool = False) -> list[Report]:
        """(step, value) for each new value of the metric, in order of steps; one that is not finite is NaN.

        Args:
            last: the run has ended, this is the last call.
        """
        found = []
        if self._log.replaced():  # a run that goes on cuts its log to its checkpoint
            self._log.restart()
        for row in self._log.objects():
            step = int(row["step"] or 0)
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
        self._log.close()


def more_of(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """How far a run came, its last losses, most memory and usual speed, where its rows have them; rows by step."""
    if not rows:
        return {}
    found: dict[str, Any] = {"steps": max(rows)}
    for name, choose in CHOSEN.items():
        known = [rows[step][name] for step in sorted(rows) if isinstance(rows[step].get(name), int | float)]
        found |= {name: choose(known)} if known else {}
    return found
