"""The command that lays runs side by side."""

import dataclasses
import math
import sys
from typing import Any

import tyro

from roxxel_dist.config import usage_errors
from roxxel_dist.flags import Switch, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Compare runs: a table, and pictures of their losses and of where their time went. Runs may still be training."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories."""
    out: str = "report"
    """The folder for loss.png and goodput.png."""
    json: Switch = False
    """Print JSON instead of the table."""


def report(words: list[str]) -> int:
    """Compare runs: losses, speed, goodput, configs."""
    args = parse(ReportArgs, words, "report")
    with usage_errors():
        if not args.runs:
            raise ValueError("report needs run directories: name one or more")
        from pathlib import Path

        from roxxel_dist.report.pictures import draw
        from roxxel_dist.report.runs import differences, read_runs
        from roxxel_dist.report.table import table

        runs = read_runs(args.runs)
        pictures, missing = [], ""
        try:
            pictures = [str(path) for path in draw(runs, Path(args.out))]
        except ImportError:
            missing = "no pictures: pip install 'roxxel-dist[plot]' draws them"
        if args.json:
            import json

            told = [{"name": run.name, "path": str(run.path), **run.numbers()} for run in runs]
            whole = {"runs": told, "differences": differences(runs), "pictures": pictures}
            print(json.dumps(_plain(whole), indent=2))
        else:
            print(table(runs))
            if pictures:
                print("\npictures: " + ", ".join(pictures))
    if missing:
        print(f"roxxel-dist: {missing}", file=sys.stderr, flush=True)
    return 0


def _plain(value: Any) -> Any:
    """The same as JSON has it: numbers that are none are null, and a date of somebody's `model_args` is text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
