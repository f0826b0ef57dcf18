"""`timeline.jsonl`: what the time of a run went to, attempt by attempt, and its sums (goodput). No jax.

A row is {"attempt", "activity", "begin" (unix time), "seconds", "steps"}. One is written when an activity other than a
step ends, and one at every logged step for the steps since (`steps`: the first and the last of them, from 1), so that a
kill -9 loses little. Rows of steps have "layout" where devices do not have whole rows of their own. An attempt is a
process that trained in the run directory, from 0; a row "finished" of no length says that the run had no step left. The
file is append-only, also where steps are done a second time.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from roxxel_dist.process.durable import put_back
from roxxel_dist.process.progress import Progress, Record

NAME = "timeline.jsonl"
FINISHED = "finished"
TAIL_BYTES = 4096
KINDS = {"start": "starting", "compile": "compiling", "restore": "restoring", "eval": "evaluating", "save": "saving"}
"""What an activity of the timeline is called; steps are "training" or "repeated"."""
SPENT = ("training", "repeated", "starting", "compiling", "restoring", "evaluating", "saving", "down")
"""The kinds of time in a report, in the order in which they are shown."""


class Timeline:
    """Writes the rows: a tracker, for the logged steps, and the listener of a `Progress`, for all else.

    It begins with "start". Nothing is on disk before `open`, so a run that cannot begin leaves none. A disk that takes
    no more rows ends it, with a line, and not the training. Without a run directory (every rank but the first) it keeps
    nothing.
    """

    durable = True

    def __init__(self, run: Path | None, progress: Progress) -> None:
        self._path = run and run / NAME
        progress.listener = self.receive
        self._file: FileIO | None = None
        self._early: list[dict[str, Any]] | None = []
        self._attempt = 0
        self._activity, self._since = "start", time.monotonic()
        self._first = self._done = 0
        self._stepped = False
        self.layout: str = ""
        """How devices share a batch of the phase, where not each has rows of its own."""

    @staticmethod
    def log(text: str) -> None:
        """Tell people a line; the log puts its own way here."""
        print(text, flush=True)

    def open(self) -> None:
        """The run begins: write the earlier rows, and from now on every new one."""
        early, self._early = self._early, None
        for row in early or ():
            self._write(row)

    def receive(self, record: Record) -> None:
        """The activity of this rank is another one from now on."""
        self._done = record.done
        self._stepped |= record.activity == "step"
        # Nothing that is watched: before the first step it is a part of the start, after the last it is not training.
        activity = record.activity or ("" if self._stepped else "start")
        if activity != self._activity:
            self._end()
            self._activity, self._first = activity, record.entered

    def row(self, row: Mapping[str, Any]) -> None:
        """A step was logged."""
        if self._activity == "step":
            self._done = int(row["step"])
            self._end()

    def mark_finished(self) -> None:
        """The run has no step left: the time until a later start extends it does not count as down."""
        self._activity = FINISHED
        self._since = time.monotonic()
        self._end()
        self._activity = ""

    def close(self) -> None:
        """Write what is under way and close the file."""
        self._end()
        if self._file is not None:
            self._file.close()
        self._path = self._file = None

    def _end(self) -> None:
        """Write the row of the activity until now; of steps, if at least one is done."""
        steps = [self._first, self._done] if self._activity == "step" else None
        now = time.monotonic()
        if self._activity and not (steps and self._done < self._first):
            seconds = now - self._since
            row = {"activity": self._activity, "begin": round(time.time() - seconds, 3), "seconds": round(seconds, 6)}
            of_steps = {"steps": steps} | ({"layout": self.layout} if self.layout else {})
            self._write(row | (of_steps if steps else {}))
        self._since, self._first = now, self._done + 1

    def _write(self, row: dict[str, Any]) -> None:
        if self._early is not None:
            self._early.append(row)
            return
        if self._path is None:
            return
        try:
            file = self._file or self._open(self._path)
            if put_back(self._path, file.fileno()):  # deleted by a cleaner
                file.close()
                file = self._file = self._path.open("a+b", buffering=0)
            line = (json.dumps({"attempt": self._attempt, **row}) + "\n").encode()
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.log(f"{self._path} is not continued ({error.strerror}): `report` will count the time as down")
            self._path = None

    def _open(self, path: Path) -> FileIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        tail = b""
        if path.exists():
            with path.open("rb") as before:
                before.seek(max(0, path.stat().st_size - TAIL_BYTES))
                tail = before.read(TAIL_BYTES)
        self._attempt = max((row["attempt"] + 1 for row in _rows(tail)), default=0)
        # Without a buffer a row is one call, and on a full disk nothing is left to write at the end.
        file = self._file = path.open("a+b", buffering=0)
        if tail and not tail.endswith(b"\n"):  # torn by a kill: what comes is not to be a part of that row
            file.write(b"\n")
        return file


def read_timeline(run: Path) -> list[dict[str, Any]]:
    """The rows of a run, in order, without those that a kill tore; empty where there is no timeline."""
    path = run / NAME
    return _rows(path.read_bytes()) if path.exists() else []


def _rows(lines: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in lines.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows.append({**row, "attempt": int(row["attempt"]), "seconds": float(row["seconds"])})
    return rows


class TimeSpent:
    """The sums of the rows of a `timeline.jsonl`, added one by one.

    Attributes:
        spent: seconds by kind, every one of `SPENT`; empty before the first row.
        attempts: the attempts so far.
        resumes: the first step after each start but the first, and after each time that the run went back.
        last: the last row.
        last_step: the last row of steps.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.attempts: int = 0
        self.resumes: list[int] = []
        self.last: Mapping[str, Any] = {}
        self.last_step: Mapping[str, Any] = {}
        self._highest = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row. Raises KeyError, TypeError or ValueError if it is none, and changes nothing then."""
        attempt, seconds, activity, begin = int(row["attempt"]), float(row["seconds"]), row["activity"], row["begin"]
        first, last = map(int, row["steps"]) if activity == "step" else (0, 0)
        if last < first:
            raise ValueError(f"steps {first} to {last}")
        before, spent = self.last or row, self.spent or dict.fromkeys(SPENT, 0.0)
        if before["attempt"] != attempt and before["activity"] != FINISHED:
            spent["down"] += max(0.0, begin - before["begin"] - before["seconds"])
        if activity == "step":
            again = seconds * max(0, min(last, self._highest) - first + 1) / (last - first + 1)
            spent["repeated"] += again
            spent["training"] += seconds - again
            self._highest = max(self._highest, last)
            if self.last_step and (self.last_step["attempt"] != attempt or first <= self.last_step["steps"][1]):
                self.resumes.append(first)
            self.last_step = row
        elif kind := KINDS.get(activity):
            spent[kind] += seconds
        self.spent, self.last, self.attempts = spent, row, max(self.attempts, attempt + 1)


def time_spent(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by kind, every one of `SPENT`, of the rows of `timeline.jsonl` in order; empty where there are none.

    - "repeated": steps that had been done before, by a process that was killed or before the run went back.
    - "down": from the last row of an attempt to the first of the next, if the run was not finished then. The steps that
      a killed process did not live to log are in it.
    """
    times = TimeSpent()
    for row in rows:
        times.add(row)
    return times.spent
