"""What a trial reports, read while it runs: from the metrics of its run directory."""

import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from roxxel_dist.place.directory import METRICS, SUMMARY
from roxxel_dist.train.log.csv_jsonl import DIGEST, JsonlReader

Report = tuple[int, float]
SUMMARIZED = {
    "train_loss": operator.itemgetter(-1),
    "tokens": operator.itemgetter(-1),
    "vram_gb": max,
    "ram_gb": max,
    "ms_per_step": median,
    "tokens_per_s": median,
}
"""Metrics that are kept with a result, and which of their values."""


class MetricsTail:
    """Follows `metrics.jsonl` of a run.

    Args:
        run: the run directory; it need not exist yet.
        metric: whose values are wanted.
        weights: of the logged metrics of which it is a mean; empty where it is logged itself.

    Attributes:
        names: of all metrics that came.
        losses: by step, what each of the metrics of `weights` was; its name is that of its data set.
    """

    def __init__(self, run: Path, metric: str, weights: Mapping[str, float] | None = None) -> None:
        self._run, self._metric, self._log = run, metric, JsonlReader(run / METRICS)
        self._weights = weights or {}
        self.losses: dict[int, dict[str, float]] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._reported = -1
        self._first: list[Report] = []
        self.names: set[str] = set()

    def read(self, *, last: bool = False) -> list[Report]:
        """(step, value) for each new value of the metric, in order of steps; one that is not finite is NaN.

        A run evaluates after step 1 too, where all trials are alike. That value is a report only if the next one is of
        step 2, or if there is no other.

        Args:
            last: the run has ended, this is the last call.
        """
        if self._log.replaced():  # a run that goes on cuts its log to its checkpoint
            self._log.restart()
        reports: list[Report] = []
        for row in self._log.objects():
            row.pop(DIGEST, None)  # no metric
            step = int(row.pop("step") or 0)
            reports += self._add(step, row, self._value(step, row))
        if reports and reports[0][0] == 1 and math.isfinite(reports[0][1]):
            self._first = [reports.pop(0)]
        if reports or last:
            counts = not reports or reports[0][0] == 2
            reports, self._first = (self._first if counts else []) + reports, []
        return reports

    def _value(self, step: int, row: Mapping[str, Any]) -> float | None:
        """The metric in a row, NaN where it is not finite; None where the row has it not."""
        wanted = self._weights or {self._metric: 1.0}
        if not wanted.keys() <= row.keys():
            return None
        values = {name: math.nan if row[name] is None else row[name] for name in wanted}
        if not self._weights:
            return values[self._metric]
        self.losses[step] = {name.partition("/")[2]: value for name, value in values.items()}
        return math.fsum(weight * values[name] for name, weight in wanted.items())

    @property
    def problem(self) -> str | None:
        """Why the run has no value that can be relied on; None where it may have one."""
        return None

    def missing(self) -> str:
        """What the run logged instead of the metric, and what to change."""
        logged = f"it logged {', '.join(sorted(self.names))}" if self.names else "it logged nothing"
        if absent := sorted(self._weights.keys() - self.names):
            return f"{logged}, and not {', '.join(absent)}: name those sets in `validation`, or leave out their weights"
        return f"{logged}; name one of those under `metric`, or log {self._metric!r}"

    def _add(self, step: int, row: Mapping[str, Any], value: float | None) -> list[Report]:
        """Keep a row; the report in it, unless its step was reported: a run goes back to its checkpoint."""
        self._rows.setdefault(step, {}).update(row)
        self.names |= {name for name in row if not name.startswith("_")}
        if value is None or step <= self._reported:
            return []
        self._reported = step
        return [(step, value)]

    def summarize(self) -> dict[str, Any]:
        """How far the run came, its last losses, most memory, usual speed and size, where it has them."""
        summary: dict[str, Any] = {"steps": max(self._rows)} if self._rows else {}
        for name, choose in SUMMARIZED.items():
            values = [row[name] for _, row in sorted(self._rows.items()) if isinstance(row.get(name), int | float)]
            summary |= {name: choose(values)} if values else {}
        try:
            written = json.loads((self._run / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return summary
        return summary | {name: written[name] for name in ("parameters", "trainable_parameters") if name in written}

    def close(self) -> None:
        """Close the file."""
        self._log.close()
