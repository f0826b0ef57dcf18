"""What the folder of a run says about it, also while it trains."""

import contextlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.config import RECORD, load_yaml
from roxxel_dist.run_directory import CONFIG, METRICS, SUMMARY, is_run, no_run
from roxxel_dist.train.goodput import time_spent
from roxxel_dist.train.timeline import read_timeline
from roxxel_dist.train.trackers.table import JsonlReader

ABSENT = "-"
"""Stands for a field that a run's config does not have."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as it is on disk."""

    name: str
    """What it is called beside others."""
    path: Path
    fields: Mapping[str, Any]
    """Of its config, and the `data_path` that it reads; empty for a run of a bare `Trainer`."""
    rows: Sequence[Mapping[str, float]]
    """What was logged, in order; numbers that were not finite are left out."""
    parameters: int | None
    spent: Mapping[str, float]
    """Seconds by kind, as `time_spent` tells; empty where nothing kept them."""

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(tokens read, value) of every row that has the metric."""
        return [(row.get("tokens", math.nan), row[metric]) for row in self.rows if metric in row]

    @property
    def phase_ends(self) -> list[float]:
        """The tokens read where a phase ended and another began, to a logged step."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return [a["tokens"] for a, b in pairs if "tokens" in a and a.get("phase") != b.get("phase")]

    def numbers(self) -> dict[str, Any]:
        """What the table shows, by name: None where it is not known, and "spent" as seconds by kind."""
        last = self.rows[-1] if self.rows else {}
        judged = [row for row in self.rows if "val_loss" in row]
        best = min(judged, key=lambda row: row["val_loss"], default={})
        speeds = [row["tokens_per_s"] for row in self.rows if "tokens_per_s" in row]
        losses = [row["train_loss"] for row in self.rows if "train_loss" in row]
        total = sum(self.spent.values())
        return {
            "steps": last.get("step"),
            "tokens": last.get("tokens"),
            "train_loss": losses[-1] if losses else None,
            "val_loss": judged[-1]["val_loss"] if judged else None,
            "best_val_loss": best.get("val_loss"),
            "best_step": best.get("step"),
            "tokens_per_s": statistics.median(speeds) if speeds else None,
            "parameters": self.parameters,
            "goodput": self.spent["training"] / total if total else None,
            "spent": dict(self.spent),
        }


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in some folders.

    Raises:
        ValueError: one of them is no run; the message names the nearest that is.
    """
    folders = list(dict.fromkeys(map(Path, paths)))
    for folder in folders:
        if not is_run(folder):
            raise ValueError(no_run(folder))
    names = [folder.absolute().name for folder in folders]
    often = Counter(names)
    return [
        _read(folder, name if often[name] == 1 else str(folder)) for folder, name in zip(folders, names, strict=True)
    ]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The fields in which the configs of some runs differ: a value a run, `ABSENT` where it has no such field."""
    names = dict.fromkeys(name for run in runs for name in run.fields)
    values = {name: [run.fields.get(name, ABSENT) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(one != found[0] for one in found)}


def _read(folder: Path, name: str) -> Run:
    config = load_yaml(folder / CONFIG) if (folder / CONFIG).exists() else {}
    record = config.pop(RECORD, None) or {}
    if "data_path" in record:
        config["data_path"] = record["data_path"]
    reader = JsonlReader(folder / METRICS)
    try:
        rows = list(reader.rows())
    finally:
        reader.close()
    return Run(
        name=name,
        path=folder,
        fields=config,
        rows=rows,
        parameters=_parameters(folder / SUMMARY),
        spent=time_spent(read_timeline(folder)),
    )


def _parameters(summary: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be being written
        return int(json.loads(summary.read_text(encoding="utf-8"))["parameters"])
    return None
