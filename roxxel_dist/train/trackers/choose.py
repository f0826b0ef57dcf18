"""Which trackers a process has."""

import os
from pathlib import Path

from roxxel_dist.cluster.contract import STATUS_ENV
from roxxel_dist.cluster.process import is_primary, process_index
from roxxel_dist.train.log_queue import Tracker
from roxxel_dist.train.trackers.console import ConsoleTracker, TextTracker
from roxxel_dist.train.trackers.table import CsvTracker, JsonlTracker


def trackers_for(run: Path, total_steps: int, restored_step: int) -> list[Tracker]:
    """Rank 0 writes the metrics and talks to the person; every rank has its lines in `logs/rank-N.log`.

    Under the launcher that file is made of what a rank prints, so there every rank prints.

    Args:
        run: the run directory.
        total_steps: of the run.
        restored_step: the step that this process goes on from; later rows of the logs are dropped.
    """
    launched = os.environ.get(STATUS_ENV) == "1"
    trackers: list[Tracker] = []
    if is_primary() or launched:
        trackers.append(ConsoleTracker(total_steps))
    if not launched:
        trackers.append(TextTracker(run / "logs" / f"rank-{process_index()}.log", total_steps))
    if is_primary():
        trackers.append(CsvTracker(run / "training_log.csv", restored_step))
        trackers.append(JsonlTracker(run / "metrics.jsonl", restored_step))
    return trackers
