"""The record of a study: append-only JSON lines, each on the disk before anything is done about it, by one writer.

What the journal of a study tells: its trials, what they reported, and how they ended.
"""

import json
import math
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from roxxel_dist.cluster.durable import make_folder, sync_folder
from roxxel_dist.data.file_lock import release_lock, wait_for_lock

JOURNAL = "journal.jsonl"
VERSION = 1
"""Of the journal's form, in its `study` events; those of the first release have none, and are of this one."""
State = Literal["running", "done", "stopped", "failed"]


class NewerError(ValueError):
    """A journal that a later version has written."""


@dataclass(kw_only=True)
class Trial:
    """One trial, as far as the journal tells."""

    number: int
    params: dict[str, Any]
    point: list[float] = field(default_factory=list)
    state: State = "running"
    """Running: it has no end in the journal, also where nobody runs it at the moment."""
    value: float | None = None
    reports: list[tuple[int, float]] = field(default_factory=list)
    """(step, value), by step; of a step that was run again, the last value."""
    attempts: int = 0
    """How often it was started."""
    node: str | None = None
    pid: int | None = None
    stop: Mapping[str, Any] | None = None
    """That it was decided to stop it early: step, value, rule, reason."""
    kind: str | None = None
    """Of a failed one: nan, oom, shape, error, time or lost."""
    reason: str | None = None
    log: str | None = None
    seconds: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    began: float | None = None
    """Unix seconds, as `ended`."""
    ended: float | None = None

    def reported(self, step: int) -> float | None:
        """What it has reported for a step; None: nothing."""
        place = bisect_left(self.reports, (step, -math.inf))
        found = place < len(self.reports) and self.reports[place][0] == step
        return self.reports[place][1] if found else None


@dataclass(kw_only=True)
class History:
    """All trials of a study."""

    trials: dict[int, Trial] = field(default_factory=dict)
    metric: str | None = None
    goal: str = "minimize"
    method: str | None = None
    seed: int | None = None
    failures_in_row: int = 0
    """Trials that failed since the last one that did not, and since the driver started."""

    @property
    def best(self) -> Trial | None:
        """The ended trial with the best value; the first of equals."""
        ended = [trial for trial in self.trials.values() if trial.value is not None]
        choose = min if self.goal == "minimize" else max
        return choose(ended, key=lambda trial: trial.value or 0.0) if ended else None

    def count(self, state: State) -> int:
        """How many trials are in a state."""
        return sum(trial.state == state for trial in self.trials.values())

    def best_report(self, number: int) -> float | None:
        """The best value that a trial has reported; None before its first report."""
        values = [value for _, value in self.trials[number].reports]
        choose = min if self.goal == "minimize" else max
        return choose(values) if values else None

    def take(self, event: Mapping[str, Any]) -> None:
        """Follow one line of the journal. Raises KeyError for one that belongs to nothing before it, NewerError."""
        kind = event["event"]
        if kind == "study":
            if (version := event.get("version", 1)) > VERSION:
                raise NewerError(
                    f"its form is version {version}, and this roxxel-dist reads up to {VERSION}: update it"
                )
            self.metric, self.goal = event["metric"], event["goal"]
            self.method, self.seed = event["method"], event["seed"]
            self.failures_in_row = 0
            return
        number = event["trial"]
        if kind == "ask":
            self.trials[number] = Trial(number=number, params=event["params"], point=event["point"])
            return
        trial = self.trials[number]
        if kind == "start":
            trial.attempts = event["attempt"] + 1
            trial.node, trial.pid = event["node"], event["pid"]
            trial.began = trial.began or event["time"]
        elif kind == "report":
            _put(trial.reports, event["step"], event["value"])
        elif kind == "stop":
            trial.stop = {name: event[name] for name in ("step", "value", "rule", "reason")}
        elif kind == "result":
            trial.state = "stopped" if event["stopped"] else "done"
            trial.params, trial.value, trial.more = event["params"], event["value"], event["more"]
            trial.seconds, trial.ended = event["seconds"], event["time"]
            self.failures_in_row = 0
        elif kind == "fail":
            trial.state, trial.ended = "failed", event["time"]
            trial.kind, trial.reason, trial.log = event["kind"], event["reason"], event["log"]
            self.failures_in_row += 1


def _put(reports: list[tuple[int, float]], step: int, value: float) -> None:
    """Add a report in its place."""
    place = len(reports)
    while place and reports[place - 1][0] >= step:
        place -= 1
    again = place < len(reports) and reports[place][0] == step
    reports[place : place + again] = [(step, value)]


def read_history(study: Path) -> History:
    """The trials of a study as they are now. Nothing is locked: a line that is being written is passed over.

    Raises ValueError where there is no journal, or it is damaged.
    """
    path = study / JOURNAL
    try:
        lines = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): is {study} the folder of a study?") from error
    return replay(path, whole(lines))


def whole(data: bytes) -> bytes:
    """The journal without a last line that is torn: not ended, or, after a power cut, not written."""
    data = data[: data.rfind(b"\n") + 1]
    last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :]
    try:
        json.loads(last or b"0")
    except ValueError:
        return data[: len(data) - len(last)]
    return data


def replay(path: Path, data: bytes) -> History:
    """The history of whole lines. Raises ValueError with the line of what is damaged."""
    history = History()
    for number, event in enumerate(_events(path, data.splitlines()), 1):
        try:
            history.take(event)
        except NewerError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, f"{type(error).__name__}: {error}") from error
    return history


def _events(path: Path, lines: Iterable[bytes]) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise _damaged(path, number, str(error)) from error


def _damaged(path: Path, line: int, why: str) -> ValueError:
    return ValueError(
        f"{path}, line {line}: damaged ({why}). Only the last line of a journal can be torn: "
        "take the file from a copy, or take that line out"
    )


LOCK = ".lock"
WAIT_S = 30.0
"""How long a start waits for the driver before it, which may be ending its trials."""

__all__ = ["History", "Journal", "Trial", "read_history"]


class Journal:
    """The journal of a study, held by one driver while the context is open.

    Args:
        study: the folder; made where it is missing.
        say: shows a line to a person.
        wait_s: how long to wait for a driver that has it.
    """

    def __init__(self, study: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> None:
        self._study, self._say, self._wait_s = study, say, wait_s
        self.history = History()

    def __enter__(self) -> "Journal":
        """Take it, and read it.

        Raises:
            ValueError: another driver holds it, it cannot be written, or it is damaged.
        """
        path = self._study / JOURNAL
        try:
            make_folder(self._study)
            self._lock = wait_for_lock(
                self._study / LOCK,
                lambda holder: f"waiting up to {self._wait_s:g} s for {holder}, which runs {self._study}",
                lambda holder: (
                    f"--study {self._study}: {holder} runs this study, and did not end within {self._wait_s:g} s: "
                    "stop it, or name another folder"
                ),
                limit_s=self._wait_s,
                say=self._say,
            )
        except OSError as error:
            raise ValueError(
                f"--study {self._study}: cannot be written ({error.strerror}): choose another folder, or change its "
                "permissions"
            ) from error
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                data = whole(path.read_bytes())
                self.history: History = replay(path, data)
                self._size = len(data)
                os.ftruncate(self._file, self._size)
                sync_folder(self._study)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            release_lock(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        release_lock(self._lock)

    def append(self, *events: Mapping[str, Any]) -> None:
        """Write events, in one piece; they are on the disk when this returns.

        Numbers that JSON has no form for are written as null. Raises OSError where the disk does not take them.
        """
        now = round(time.time(), 3)
        timed = [{"event": event["event"], "time": now, **finite(event)} for event in events]
        data = "".join(json.dumps(event, allow_nan=False, default=_plain) + "\n" for event in timed).encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):  # a later line must not stand behind half of this one
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        for event in timed:
            self.history.take(event)


def this_driver() -> dict[str, Any]:
    """Who writes, for people."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no form for."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's own."""
    if hasattr(value, "item"):
        return finite(value.item())
    raise TypeError(f"{value!r} cannot stand in a journal")
