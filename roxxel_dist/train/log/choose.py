"""Which trackers a process has, and a logger for your own training loop, which has some of them."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from roxxel_dist.cluster.distributed import is_primary, process_index
from roxxel_dist.process.exit_codes import STATUS_ENV
from roxxel_dist.train.log.base import LogQueue, Tracker, TrackerSource
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


class Logger:
    """Rank 0 writes `<prefix>_metrics.csv` and `<prefix>_system.log` and speaks; the other ranks stay silent.

    As a context manager it writes the traceback of a crash to the system log, flushed to the disk, before the exception
    goes on.

    Args:
        log_dir: a folder, made if need be; files of an earlier run in it are continued.
        filename_prefix: how the files' names begin.
    """

    def __init__(self, log_dir: str | Path, filename_prefix: str = "train") -> None:
        self._console: list[ConsoleTracker | TextTracker] = []
        trackers: list[Any] = []
        if is_primary():
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._console = [ConsoleTracker(), TextTracker(folder / f"{filename_prefix}_system.log")]
            trackers = [*self._console, CsvTracker(folder / f"{filename_prefix}_metrics.csv", columns=("step",))]
        self._speaks = bool(trackers)
        self._queue = LogQueue(trackers)
        self._status: dict[str, Any] = {"step": 0, "start": 0, "loss": None, "tokens_per_s": None, "eta_s": None}

    def log_message(self, text: str, level: int | None = None) -> None:
        """Say something.

        Args:
            text: one or more lines.
            level: as in Python's `logging`; the line starts with its name from WARNING on.
        """
        name = f"{logging.getLevelName(level)}: " if level is not None and level >= logging.WARNING else ""
        if self._speaks:
            self._queue.text(name + text)

    def log_metrics_summary(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of one step: a row of the table, which gets a column for each new name, and a line.

        Args:
            step: the step.
            metrics: numbers by name; scalars of jax and numpy are fetched.
        """
        row = {name: value if isinstance(value, int | str) else float(value) for name, value in metrics.items()}
        loss = row.get("train_loss", row.get("loss"))
        # Not in place: a thread may read the old one.
        self._status = self._status | {"loss": loss if isinstance(loss, float) else None}
        self._queue.row({"step": int(step), **row})
        self.update_pbar(step)

    def init_pbar(self, total_steps: int, initial_step: int = 0) -> None:
        """Begin the bar, and drop the rows that an earlier process logged after the step that this one resumes from.

        Args:
            total_steps: of the whole run.
            initial_step: steps that are done.
        """
        for console in self._console:
            console.total_steps = total_steps
        self._queue.rewind(initial_step)
        self._status = self._status | {"total": total_steps, "start": initial_step}
        self.update_pbar(initial_step)

    def update_pbar(self, step: int) -> None:
        """Move the bar, if it was begun."""
        if "total" in self._status:
            self._status = self._status | {"step": int(step)}
            self._queue.status(self._status)

    def tracker(self, total_steps: int, restored_step: int) -> Tracker:
        """Takes the rows and lines of a `Trainer` for this logger; the `Trainer` does not close the logger.

        Args:
            total_steps: of the run.
            restored_step: steps that are done; the rows after them are cut.
        """
        self.init_pbar(total_steps, restored_step)
        return _OfTrainer(self, self._queue)

    def close(self) -> None:
        """Write what is left and leave the terminal as it was."""
        self._queue.close()
        self._speaks = False

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._queue.__exit__(kind, error, tb)
        self._speaks = False


class _OfTrainer:
    """Takes the rows and lines of a `Trainer` for a logger, which its maker closes."""

    def __init__(self, logger: Logger, queue: LogQueue) -> None:
        self.text, self._log_metrics = logger.log_message, logger.log_metrics_summary
        self.status, self.rewind = queue.status, queue.rewind

    def row(self, row: Mapping[str, Any]) -> None:
        self._log_metrics(row["step"], row)

    def close(self) -> None:
        """Does nothing: the logger's maker closes it."""
