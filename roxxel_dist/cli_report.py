"""The command that lays runs side by side."""

import dataclasses
import sys

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
            print(json.dumps({"runs": told, "differences": differences(runs), "pictures": pictures}, indent=2))
        else:
            print(table(runs))
            if pictures:
                print("\npictures: " + ", ".join(pictures))
    if missing:
        print(f"roxxel-dist: {missing}", file=sys.stderr, flush=True)
    return 0
