"""Runs side by side: their numbers, what differs, and pictures, from their folders, also while they train."""

import contextlib
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.place.directory import CONFIG, METRICS, SUMMARY, is_run, no_run
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.exit_codes import UserError, pip_install
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.train.log.csv_jsonl import DIGEST, Tail
from roxxel_dist.train.log.timeline import SPENT, read_timeline, time_spent
from roxxel_dist.utils.display import duration, figure, label

UNKNOWN = "-"
"""The sign for an unknown number, and for a field that a run's config does not have."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, read from disk."""

    name: str
    """Its name among the compared runs."""
    path: Path
    fields: Mapping[str, Any]
    """The fields of its config, and the `data_path` that it reads; empty for a run of a bare `Trainer`."""
    rows: Sequence[Mapping[str, float]]
    """The logged rows, in order; numbers that were not finite are left out."""
    gaps: Mapping[str, Sequence[Mapping[str, float]]]
    """By metric, the rows whose value was not finite."""
    parameters: int | None
    spent: Mapping[str, float]
    """Seconds by kind, from `time_spent`; empty if the run has no timeline."""

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(tokens read, value) of every row that has the metric."""
        return [(row.get("tokens", math.nan), row[metric]) for row in self.rows if metric in row]

    def newest(self, metric: str) -> float | None:
        """The newest value of a metric; NaN if that is not finite, None if there is none."""
        last = next((row for row in reversed(self.rows) if metric in row), None)
        gap = self.gaps.get(metric, [None])[-1]
        if gap is not None and (last is None or gap.get("step", 0) > last.get("step", 0)):
            return math.nan
        return None if last is None else last[metric]

    @property
    def phase_ends(self) -> list[float]:
        """The tokens read at each change of phase, rounded to a logged step."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return [a["tokens"] for a, b in pairs if "tokens" in a and a.get("phase") != b.get("phase")]

    def numbers(self) -> dict[str, Any]:
        """The values of the table, by name: None if unknown, and "spent" as seconds by kind."""
        last = self.rows[-1] if self.rows else {}
        validations = [row for row in self.rows if "val_loss" in row]
        best = min(validations, key=lambda row: row["val_loss"], default={})
        speeds = [row["tokens_per_s"] for row in self.rows if "tokens_per_s" in row]
        total = sum(self.spent.values())
        return {
            "steps": last.get("step"), "tokens": last.get("tokens"),
            **{metric: self.newest(metric) for metric in ("train_loss", "val_loss", "val_bpb")},
            "scalars": {name: self.newest(name) for name in scalar_names(validations[-1] if validations else {})},
            "best_val_loss": best.get("val_loss"), "best_step": best.get("step"),
            "tokens_per_s": statistics.median(speeds) if speeds else None, "parameters": self.parameters,
            "goodput": self.spent["training"] / total if total else None, "spent": dict(self.spent),
        }  # fmt: skip


def scalar_names(losses: Mapping[str, float]) -> list[str]:
    """The numbers of a validation that are of the scalars that a loss function of the user's returns."""
    usual = ("val_loss", "val_bpb", "val_bal")
    return [name for name in losses if name.startswith("val_") and name.partition("/")[0] not in usual]


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in some folders. Raises ValueError if one of them is not a run; the message suggests the closest run."""
    given = list(dict.fromkeys(map(Path, paths)))
    folders = [local_run(path) for path in given]
    for path, folder in zip(given, folders, strict=True):
        if not is_run(folder):
            raise UserError(no_run(folder, absolute(path)))
    names = [path.absolute().name for path in given]
    often = Counter(names)
    return [
        _read(folder, name if often[name] == 1 else str(path))
        for path, folder, name in zip(given, folders, names, strict=True)
    ]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The fields in which the configs of some runs differ: a value for each run, `UNKNOWN` if it has no such field. A
    run of a bare `Trainer` that has no config is not compared."""
    known = [run for run in runs if run.fields]
    names = dict.fromkeys(name for run in known for name in run.fields)
    values = {name: [run.fields.get(name, UNKNOWN) for run in runs] for name in names}
    first = {name: known[0].fields.get(name, UNKNOWN) for name in names}
    return {name: values[name] for name in names if any(run.fields.get(name, UNKNOWN) != first[name] for run in known)}


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a run's config, and the `data_path` that it reads; empty for a run of a bare `Trainer`."""
    config = load_yaml(folder / CONFIG) if (folder / CONFIG).exists() else {}
    record = config.pop(RECORD, None) or {}
    if "data_path" in record:
        config["data_path"] = record["data_path"]
    return config


def _read(folder: Path, name: str) -> Run:
    parameters = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be incomplete during a write
        parameters = int(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["parameters"])
    rows, gaps = _read_rows(folder / METRICS)
    spent = time_spent(read_timeline(folder))
    fields = read_fields(folder)
    return Run(name=name, path=folder, fields=fields, rows=rows, gaps=gaps, parameters=parameters, spent=spent)


def _read_rows(path: Path) -> tuple[list[dict[str, float]], dict[str, list[dict[str, float]]]]:
    """(the rows of a log without values that were not finite, by metric the rows in which it was not)."""
    rows, gaps = list[dict[str, float]](), dict[str, list[dict[str, float]]]()
    most = sys.float_info.max
    for row in Tail(path).rows():
        row.pop(DIGEST, None)
        numbers = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        rows.append({name: value for name, value in numbers.items() if value is not None and abs(value) <= most})
        for name in numbers:
            if name not in rows[-1]:
                gaps.setdefault(name, []).append(rows[-1])
    return rows, gaps


def no_pictures() -> str:
    """The message where matplotlib is missing."""
    return f"no pictures: they need matplotlib: {pip_install('plot')}"


COLOURS = ("#2a9d5c", "#a8d5ba", "#9aa0a6", "#f2b134", "#4f86c6", "#8e6bbf", "#d98cb3", "#c8423b")
"""The colours of the kinds of time, in the order of `SPENT`."""


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw the charts of some runs into a folder, which is created; returns the PNG files.

    Raises ImportError if matplotlib is not installed.
    """
    pictures = []
    if trained := [run for run in runs if run.points("train_loss")]:
        pictures.append(folder / "loss.png")
        draw_losses(trained, pictures[-1])
    if timed := [run for run in runs if sum(run.spent.values()) > 0]:
        pictures.append(folder / "goodput.png")
        _draw_goodput(timed, pictures[-1])
    return pictures


def draw_losses(runs: Sequence[Run], picture: Path) -> None:
    """Loss over tokens: a colour for each run, points for validation, a dotted line at the start of a phase. A cross at
    the lower edge is a loss that is not finite. Raises ImportError if matplotlib is not installed."""
    with figure(picture, inches=(9, 5)) as axes:
        for number, run in enumerate(runs):
            colour = f"C{number % 10}"
            axes.plot(
                *zip(*run.points("train_loss"), strict=True), color=colour, lw=1, alpha=0.7, label=label(run.name)
            )
            if validations := run.points("val_loss"):
                style: dict[str, Any] = {"lw": 1.3, "ls": "--", "marker": "o", "ms": 3.5}
                axes.plot(
                    *zip(*validations, strict=True), color=colour, label=label(f"{run.name}, validation"), **style
                )
            for metric, marker in (("train_loss", "x"), ("val_loss", "X")):
                if places := [row["tokens"] for row in run.gaps.get(metric, ()) if "tokens" in row]:
                    name, low = label(f"{run.name}, {metric} not finite: {len(places)}"), [0.02] * len(places)
                    style = {"color": "red", "ls": "", "marker": marker, "label": name}
                    axes.plot(places, low, transform=axes.get_xaxis_transform(), **style)
            for tokens in run.phase_ends:
                axes.axvline(tokens, color=colour, ls=":", lw=1)
        # The unit of a user's loss is unknown; a run of a bare Trainer does not say which loss it has.
        in_nats = all(run.fields and run.fields.get("loss") is None for run in runs)
        axes.set(xlabel="tokens", ylabel="loss (nats a token)" if in_nats else "loss")
        axes.legend(fontsize=8)


def _draw_goodput(runs: Sequence[Run], picture: Path) -> None:
    """How each run spent its time, a bar for each run."""
    totals = [sum(run.spent.values()) for run in runs]
    places, left = list(range(len(runs))), [0.0] * len(runs)
    with figure(picture, inches=(9, 1.6 + 0.45 * len(runs))) as axes:
        for kind, colour in zip(SPENT, COLOURS, strict=True):
            widths = [100 * run.spent[kind] / total for run, total in zip(runs, totals, strict=True)]
            if any(widths):
                axes.barh(places, widths, left=left, color=colour, label=kind, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.grid(visible=False)
        axes.set_yticks(
            places, [f"{label(run.name)}\n{duration(total)}" for run, total in zip(runs, totals, strict=True)]
        )
        axes.invert_yaxis()
        axes.set(xlabel="% of the time", xlim=(0, 100))
        axes.figure.legend(loc="outside upper center", ncols=4, fontsize=8)
