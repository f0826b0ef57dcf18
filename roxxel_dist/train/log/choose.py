"""Which trackers a process has."""

import os
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.cluster.distributed import is_primary, process_index
from roxxel_dist.process.exit_codes import STATUS_ENV
from roxxel_dist.train.log.base import Tracker, TrackerSource
from roxxel_dist.train.log.console import ConsoleTracker, NotebookTracker, TextTracker, in_notebook
from roxxel_dist.train.log.csv_jsonl import CsvTracker, JsonlTracker

TRACKERS: tuple[Callable[[Path, int], Tracker | None], ...] = (
    lambda run, restored_step: CsvTracker(run / "training_log.csv", restored_step),
    lambda run, restored_step: JsonlTracker(run / "metrics.jsonl", restored_step),
)
"""Functions that make the trackers of a run's metrics on rank 0, from the run directory and the step that this process
resumes from (a tracker drops later rows); None if there is nothing to write to. The tracker of W&B has settings, so
the `Experiment` makes it."""


def trackers_for(
    run: Path, total_steps: int, restored_step: int, logger: TrackerSource | None = None, *, own_log: bool = False
) -> list[Tracker]:
    """Rank 0 writes the metrics and talks to the user; every rank has its lines in `logs/rank-N.log`.

    Under the launcher that file is made from the output of a rank, so there every rank prints. With `own_log` a rank
    also writes the file itself, for a run that the launcher's host does not see. Rows after `restored_step`, from which
    this process resumes, are dropped. A `logger` talks to the user instead, and in a notebook a bar and a curve do.
    """
    launched = os.environ.get(STATUS_ENV) == "1"
    trackers: list[Tracker] = []
    if logger is not None and is_primary():
        trackers.append(logger.tracker(total_steps, restored_step))
    elif is_primary() or launched:
        trackers.append(NotebookTracker(total_steps) if in_notebook() else ConsoleTracker(total_steps))
    if not launched or own_log:
        trackers.append(TextTracker(run / "logs" / f"rank-{process_index()}.log", total_steps))
    try:
        for make in TRACKERS if is_primary() else ():
            if (tracker := make(run, restored_step)) is not None:
                trackers.append(tracker)
    except BaseException:  # what is open already is closed, where a log cannot be
        for tracker in trackers:
            tracker.close()
        raise
    return trackers
