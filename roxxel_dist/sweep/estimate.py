"""How long trials would take: a few are looked at, and one may be tried for some steps."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.run_directory import METRICS
from roxxel_dist.train.loggers.csv_jsonl import read_rows

if TYPE_CHECKING:
    from roxxel_dist.estimate import Cost

STEPS = 12
"""Of the trial that is tried; the first two are not counted."""
TRY_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What some steps of a trial showed about this machine."""

    flops_per_s: float
    start_s: float
    """Until the first step was done, compilation included."""


def try_out(config: Any, data_path: str | None, look: "Cost") -> Tried | None:
    """Train a trial for a few steps in a folder that is gone afterwards; None where it does not get there."""
    with tempfile.TemporaryDirectory(prefix=".sweep-", dir=Path.cwd(), ignore_cleanup_errors=True) as place:
        short = type(config).from_dict(
            {**config.to_dict(), "max_steps": min(STEPS, look.steps), "log_every": 1, "eval_every": 10**9,
             "checkpoint_every": 10**9, "wandb": "off", "export_weights": False}
        )  # fmt: skip
        short.save_yaml(Path(place) / "try.yaml")
        words = ["train", "--config", f"{place}/try.yaml", "--run_dir", f"{place}/run"]
        words += [] if data_path is None else ["--data_path", data_path]
        begun = time.monotonic()
        try:
            subprocess.run(
                [sys.executable, "-m", "roxxel_dist", *words], check=True, capture_output=True, timeout=TRY_LIMIT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        whole = time.monotonic() - begun
        rows = read_rows(Path(place) / "run" / METRICS)
        paces = [row["ms_per_step"] / 1e3 for row in rows if "ms_per_step" in row]
    if not paces:
        return None
    pace = statistics.median(paces[2:] or paces)
    return Tried(flops_per_s=look.flops / look.steps / pace, start_s=max(0.0, whole - pace * min(STEPS, look.steps)))


def trial_seconds(looks: Sequence["Cost"], tried: Tried) -> float:
    """How long the trials that were looked at would take, on average."""
    return statistics.fmean(tried.start_s + look.flops / tried.flops_per_s for look in looks)


def hours(seconds: float, trials: int, workers: int) -> float:
    """Of all trials, so many at once."""
    return seconds * -(-trials // workers) / 3600
