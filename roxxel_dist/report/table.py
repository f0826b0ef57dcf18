"""Runs as text for people, a column a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roxxel_dist.report.runs import Run, differences
from roxxel_dist.train.goodput import SPENT

UNKNOWN = "-"
LONGEST = 40
"""Characters of a value; the rest is cut off."""
NUMBERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "steps": ("steps", lambda run: f"{run['steps']:,}"),
    "tokens": ("tokens", lambda run: f"{run['tokens']:,}"),
    "train_loss": ("train_loss", lambda run: f"{run['train_loss']:.4f}"),
    "val_loss": ("val_loss", lambda run: f"{run['val_loss']:.4f}"),
    "best_val_loss": ("best val_loss", lambda run: f"{run['best_val_loss']:.4f} (step {run['best_step']:,})"),
    "tokens_per_s": ("tokens/s, median", lambda run: f"{run['tokens_per_s']:,.0f}"),
    "parameters": ("parameters", lambda run: f"{run['parameters']:,}"),
}
"""Of `Run.numbers`: the title of a line, and how it is written."""


def table(runs: Sequence[Run]) -> str:
    """What became of the runs, where their time went, and how their configs differ."""
    found = [run.numbers() for run in runs]
    lines = [["", *(run.name for run in runs)]]
    for key, (title, form) in NUMBERS.items():
        lines.append([title, *(UNKNOWN if run[key] is None else form(run) for run in found)])
    lines.append(["goodput", *(UNKNOWN if run["goodput"] is None else f"{run['goodput']:.1%}" for run in found)])
    for kind in SPENT:
        lines.append([f"  {kind}", *(_share(kind, run["spent"]) for run in found)])
    parts = [_aligned(lines)]
    if others := differences(runs):
        parts.append(_aligned([[name, *map(_short, values)] for name, values in others.items()], "config"))
    elif len(runs) > 1:
        parts.append("config: no field differs")
    return "\n\n".join(parts)


def duration(seconds: float) -> str:
    """Hours, or less where it was less."""
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours >= 10 else f"{hours:.2f} h" if hours >= 1 else f"{hours:.4f} h"


def _share(kind: str, spent: Mapping[str, float]) -> str:
    if not spent:
        return UNKNOWN
    return f"{spent[kind] / (sum(spent.values()) or 1.0):6.1%}  {duration(spent[kind])}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _aligned(lines: Sequence[Sequence[str]], title: str = "") -> str:
    """Columns of one width each; `title` is a line above them."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([f"{title}:", *rows] if title else rows)
