"""A validation that was repeated, beside what the run's log says of it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.run_directory import METRICS
from roxxel_dist.train.trackers.table import JsonlReader

VAL, TRAIN, BALANCE = "val_loss", "train_eval_loss", "val_bal"


def logged_losses(run: Path, step: int) -> dict[str, float]:
    """The validation in the log's row of a step, counted from 1; empty where there is none."""
    reader = JsonlReader(run / METRICS)
    try:
        row = next((row for row in reader.rows() if row.get("step") == step), {})
    finally:
        reader.close()
    return {name: value for name, value in row.items() if name in (VAL, TRAIN, BALANCE) or name.startswith(f"{VAL}/")}


def deviations(losses: Mapping[str, float], logged: Mapping[str, float]) -> list[str]:
    """A line for each loss that is not bit for bit what the log says; nothing where all are."""
    lines = []
    for name in dict.fromkeys([*logged, *losses]):
        here, there = losses.get(name), logged.get(name)
        if here is None or there is None:
            lines.append(f"{name}: {_exact(here)} here, {_exact(there)} in the log")
        elif here != there:
            lines.append(f"{name}: {here!r} here, {there!r} in the log, {here - there:+.3g}")
    return lines


def _exact(value: float | None) -> str:
    return "not measured" if value is None else repr(value)


def rows_of(losses: Mapping[str, float], reads: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """{"name", "metric", "loss", "perplexity", "batches", "tokens"} of each data set, and of all of them.

    Args:
        losses: by the names of the log.
        reads: (batches, tokens) by data set, as `Validation` names them: "" is what was held out, and the last one is
            the training data.
    """
    *names, train = reads
    metrics = {name: (f"{VAL}/{name}" if name else VAL, name or "held out", *reads[name]) for name in names}
    found = list(metrics.values())
    if len(names) > 1:
        batches, tokens = (sum(reads[name][i] for name in names) for i in (0, 1))
        found.append((VAL, "all of them", batches, tokens))
    found.append((TRAIN, "training data", *reads[train]))
    return [
        {
            "name": name,
            "metric": metric,
            "loss": losses[metric],
            "perplexity": perplexity(losses[metric]),
            "batches": batches,
            "tokens": tokens,
        }
        for metric, name, batches, tokens in found
    ]


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is no number of 64 bits."""
    return math.exp(loss) if loss < 700 else math.inf


def validation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as lines of text."""
    head = ("data", "loss", "perplexity", "batches", "tokens")
    cells = [
        (row["name"], f"{row['loss']:.6f}", f"{row['perplexity']:,.2f}", f"{row['batches']:,}", f"{row['tokens']:,}")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))])
        for line in [head, *cells]
    )
