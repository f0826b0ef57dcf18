"""The journal of a study: append-only JSON lines, each kept before anything is done about it, by one writer.

Kept is what is on the disk or, of a study in a bucket, what its store has. There start and report may follow within a
second: a trial that is run again reports them again; and so does one whose result was not sent any more. `History` is
the state of the journal: the trials, what they reported, and how they ended. It is kept up to date line by line, at a
cost that does not grow with the number of trials.
"""

import json
import math
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roxxel_dist.place.directory import JOURNAL
from roxxel_dist.process.durable import FORMAT, FormatError, check_format, sync_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import hold_folder
from roxxel_dist.process.process_stat import AwakeClock
from roxxel_dist.sweep.space.values import from_json, to_json

if TYPE_CHECKING:
    from roxxel_dist.sweep.study.stored_journal import JournalWriter

PARAMS = "params"
"""The key of an event with the parameters of a trial."""
SEARCHING = "searching in"
"""The words for what the holder of a study's lock does, in messages."""
WAIT_S = 30.0
"""Seconds that a start waits for the driver before it, which may be ending its trials."""
AWAITED = {"study", "ask"}
"""Events that the store of a study in a bucket has before anything else happens."""
SOON = {"stop", "pause", "thaw", "result", "fail"}
"""Events that are sent there at once."""
DECIDING = {"ask", "report", "stop", "pause", "thaw", "result", "fail"}
"""Events that decisions follow from."""
State = Literal["done", "stopped", "failed", "paused", "running"]
STATES: tuple[State, ...] = ("done", "stopped", "failed", "paused", "running")
TrialState = Literal[State, "interrupted"]
"""The state for a reader: interrupted if the trial has no end, and no driver that would go on with it."""


@dataclass(kw_only=True)
class Trial:
    """One trial, as the journal has it."""

    number: int
    params: dict[str, Any]
    point: list[float] = field(default_factory=list)
    state: State = "running"
    """Running: it has no end in the journal and is not paused, even if no process runs it at the moment."""
    value: float | None = None
    """The result of a trial that has ended; of a paused one, its best report so far."""
    reports: list[tuple[int, float]] = field(default_factory=list)
    """(step, value), by step; of a step that was run again, the last value."""
    losses: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """The loss of each data set of which a reported value is the mean, by step; empty where it is none."""
    attempts: int = 0
    """The number of its starts."""
    node: str | None = None
    pid: int | None = None
    stop: Mapping[str, Any] | None = None
    """The decision to stop it early, or to pause it last: step, value, rule, reason."""
    kind: str | None = None
    """The kind of its failure: nan, oom, shape, error, time or lost."""
    reason: str | None = None
    log: str | None = None
    seconds: float | None = None
    """Seconds that it ran, from start to end or pause, over all of its slices."""
    pause_seconds: float = 0.0
    """Seconds that the slice had run when its last pause was decided."""
    more: dict[str, Any] = field(default_factory=dict)
    began: float | None = None
    """Unix seconds, as `ended`."""
    ended: float | None = None

    def reported(self, step: int) -> float | None:
        """The value that it has reported for a step; None: nothing."""
        index, is_there = self._index(step)
        return self.reports[index][1] if is_there else None

    def curve(self, metric: str) -> list[tuple[int, Mapping[str, float]]]:
        """(step, the loss of each data set, or the metric under its name) of each report."""
        return [(step, self.losses.get(step, {metric: value})) for step, value in self.reports]

    @property
    def step(self) -> int:
        """The last step that it has reported; 0 before the first report."""
        return self.reports[-1][0] if self.reports else 0

    def report(self, step: int, value: float) -> None:
        """Add a report in its place."""
        index, is_there = self._index(step)
        self.reports[index : index + is_there] = [(step, value)]

    def _index(self, step: int) -> tuple[int, bool]:
        index = bisect_left(self.reports, step, key=itemgetter(0))
        return index, index < len(self.reports) and self.reports[index][0] == step


@dataclass(kw_only=True)
class History:
    """The trials of a study, and what follows from them."""

    trials: dict[int, Trial] = field(default_factory=dict)
    metric: str | None = None
    goal: str = "minimize"
    method: str | None = None
    seed: int | None = None
    failures_in_row: int = 0
    """Trials that failed since the last one that did not, and since the driver started."""
    running: dict[int, Trial] = field(init=False, default_factory=dict)
    """The trials that have not ended, and are not paused."""
    paused: dict[int, Trial] = field(init=False, default_factory=dict)
    best: Trial | None = field(init=False, default=None)
    """The trial with the best value; the first of ties."""
    steps: int = field(init=False, default=0)
    """Steps of all trials together, up to the last report of each."""
    last: tuple[str, int] | None = field(init=False, default=None)
    """Kind and trial of the last event that decisions follow from."""
    _busy_s: float = field(init=False, default=0.0)
    """Seconds that drivers have searched, up to the last line, which was written when its driver's clock was
    `_clock`."""
    _clock: float | None = field(init=False, default=None)
    timed: int = field(init=False, default=0)
    """Ended trials of which it is known how long they took."""
    _seconds: float = field(init=False, default=0.0)
    _counts: Counter[State] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        for trial in self.trials.values():
            self._note(trial)

    @property
    def mean_seconds(self) -> float | None:
        """The mean duration of a trial; None before one has ended."""
        return self._seconds / self.timed if self.timed else None

    def count(self, state: State) -> int:
        """The number of trials in a state."""
        unended: dict[State, dict[int, Trial]] = {"running": self.running, "paused": self.paused}
        return len(unended[state]) if state in unended else self._counts[state]

    @property
    def sign(self) -> float:
        """The factor by which a value is multiplied so that less is better."""
        return 1.0 if self.goal == "minimize" else -1.0

    def best_report(self, number: int) -> float | None:
        """The best value that a trial has reported; None before its first report."""
        choose = min if self.goal == "minimize" else max
        return choose((value for _, value in self.trials[number].reports), default=None)

    def seconds_left(self, count: int | None, workers: int, now: float) -> float | None:
        """Seconds until `count` trials have ended, `workers` at once, if each takes as long as those so far; None if
        that is not known. `now` is in seconds since 1970."""
        mean = self.mean_seconds
        if mean is None or count is None:
            return None
        running = [max(0.0, mean - (now - (trial.began or now))) for trial in list(self.running.values())]
        waiting = max(0, count - len(self.trials)) * mean
        return max([(sum(running) + waiting) / max(1, workers), *running])

    def hours(self, now: float) -> float:
        """The hours for which drivers have searched until now, on the clock of the last line, if one has since then."""
        return (self._busy_s + (0.0 if self._clock is None else max(0.0, now - self._clock))) / 3600

    def apply(self, event: Mapping[str, Any]) -> None:
        """Follow one line of the journal. Raises KeyError where it lacks something, or belongs to nothing before it."""
        # The time for which the driver was awake: the wall clock goes on while a laptop sleeps, and may be set.
        kind, now = event["event"], event.get("awake", event.get("time"))
        if kind != "study" and now is not None and self._clock is not None:
            self._busy_s += max(0.0, now - self._clock)
        self._clock = now
        if kind == "study":
            self.metric, self.goal = event["metric"], event["goal"]
            self.method, self.seed = event["method"], event["seed"]
            self.failures_in_row = 0
            return
        number = event["trial"]
        if kind == "ask":
            self.trials[number] = Trial(number=number, params=from_json(event["params"]), point=event["point"])
        trial = self.trials[number]
        if kind in DECIDING:
            self.last = kind, number
        if kind == "start":
            trial.attempts = event["attempt"] + 1
            trial.node, trial.pid = event["node"], event["pid"]
            trial.began = trial.began or event["time"]
        elif kind == "report":
            before = trial.step
            trial.report(event["step"], event["value"])
            if losses := event.get("losses"):
                trial.losses[event["step"]] = losses
            self.steps += trial.step - before
            if trial.state == "paused":  # it had made this report before it received its pause
                self._pause(trial)
        elif kind in ("stop", "pause", "thaw"):
            self._decide(trial, event)
        elif kind == "result":
            self._end(trial, event)
        elif kind == "fail":
            trial.state, trial.ended, trial.value = "failed", event["time"], None
            trial.kind, trial.reason, trial.log = event["kind"], event["reason"], event["log"]
            self.failures_in_row += 1
        if kind in ("ask", "result", "fail"):
            self._note(trial)

    def _end(self, trial: Trial, event: Mapping[str, Any]) -> None:
        """Follow the result of a trial."""
        if event["seconds"] is not None:
            # If it came to its end before it paused, these seconds are those of the whole slice.
            counted = trial.pause_seconds if trial.state == "paused" else 0.0
            trial.seconds = (trial.seconds or 0.0) - counted + event["seconds"]
        trial.state = "stopped" if event["stopped"] else "done"
        trial.params, trial.value, trial.more = from_json(event["params"]), event["value"], event["more"]
        trial.ended = event["time"]
        self.failures_in_row = 0

    def _decide(self, trial: Trial, event: Mapping[str, Any]) -> None:
        """Follow a scheduler: a trial is to stop, pauses, or goes on."""
        if event["event"] == "thaw":
            trial.state, trial.stop = "running", None
            self.running[trial.number] = self.paused.pop(trial.number)
            return
        trial.stop = {name: event[name] for name in ("step", "value", "rule", "reason")}
        if event["event"] == "pause":
            trial.pause_seconds = event["seconds"] or 0.0
            trial.seconds = (trial.seconds or 0.0) + trial.pause_seconds
            self._pause(trial)

    def _note(self, trial: Trial) -> None:
        """Count a trial that is new, or has ended."""
        if trial.state == "running":
            self.running[trial.number] = trial
            return
        self.running.pop(trial.number, None)
        self.paused.pop(trial.number, None)
        self._counts[trial.state] += 1
        if trial.seconds is not None:
            self.timed, self._seconds = self.timed + 1, self._seconds + trial.seconds
        if trial is self.best and trial.value is None:  # it was paused once, and has failed
            self.best = None
            for other in self.trials.values():
                self._compare(other)
        self._compare(trial)

    def _pause(self, trial: Trial) -> None:
        """Note that a trial is paused, and what it gave so far."""
        trial.state, trial.value = "paused", self.best_report(trial.number)
        self.paused[trial.number] = trial
        self.running.pop(trial.number, None)
        self._compare(trial)

    def _compare(self, trial: Trial) -> None:
        """Whether a trial is the best one."""
        if trial.value is not None:
            best, sign = self.best, self.sign
            if best is None or (sign * trial.value, trial.number) < (sign * (best.value or 0.0), best.number):
                self.best = trial


def read_history(study: Path) -> History:
    """The trials of a study as they are now. Nothing is locked: a line that is being written is passed over. Raises
    ValueError where there is no journal, it is damaged, or a newer version has written it."""
    path = study / JOURNAL
    try:
        lines = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): is {study} the folder of a study?") from error
    return replay(path, without_torn_tail(lines))


def without_torn_tail(data: bytes) -> bytes:
    """The journal without a last line that is torn: not ended, or, after a power cut, not written."""
    data = data[: data.rfind(b"\n") + 1]
    last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :]
    try:
        json.loads(last or b"0")
    except ValueError:
        return data[: len(data) - len(last)]
    return data


def replay(path: Path, data: bytes) -> History:
    """The history of whole lines. Raises ValueError with the line of what cannot be read, or is of another format."""
    history = History()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            event = json.loads(line)
            if event["event"] == "study":
                check_format(event, f"{path}, line {number}")
            history.apply(event)
        except FormatError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: damaged ({type(error).__name__}: {error}). Only the last line of a journal "
                "can be torn: take the file from a copy, or take that line out"
            ) from error
    return history


class Journal:
    """The journal of a study, whose folder is made if missing: held by one controller while the context is open.

    `study` is its folder, of a study in a bucket the copy of it, whose lines go to `stored` too; `log` shows a line to
    a person. Raises ValueError on entry where another controller holds it after `wait_s`, and where it cannot be
    written or read.
    """

    def __init__(
        self, study: Path, log: Callable[[str], None], wait_s: float = WAIT_S, stored: "JournalWriter | None" = None
    ) -> None:
        self._study, self._log, self._wait_s, self._stored = study, log, wait_s, stored
        self.history = History()
        self._clock = AwakeClock()

    @property
    def awake(self) -> float:
        """Seconds for which this driver was awake; to be read every few seconds."""
        return self._clock.now()

    def __enter__(self) -> "Journal":
        with ExitStack() as held:
            held.callback(hold_folder(self._study, SEARCHING, wait_s=self._wait_s, log=self._log))
            path = self._study / JOURNAL
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            held.callback(os.close, self._file)
            data = without_torn_tail(path.read_bytes())
            self.history: History = replay(path, data)
            self._size = len(data)
            os.ftruncate(self._file, self._size)
            sync_folder(self._study)
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def append(self, *events: Mapping[str, Any]) -> None:
        """Write events, in one piece; they are on the disk when this returns. Parameters are written as `to_json` has
        them; of metrics, numbers that JSON has no form for are null.

        Raises OSError where the disk does not take them, and what `JournalWriter.add` raises.
        """
        now = round(time.time(), 3)
        stamp = {"time": now, "awake": round(self.awake, 3)}
        timed = [{"event": event["event"], **stamp, **_as_json(event)} for event in events]
        data = "".join(json.dumps(event, allow_nan=False) + "\n" for event in timed).encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._stored is None:
                os.fdatasync(self._file)
        except OSError as error:
            error.filename = str(self._study / JOURNAL)
            with suppress(OSError):  # a later line must not stand behind half of this one
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        if self._stored is not None:
            kinds = {event["event"] for event in timed}
            self._stored.add(data, soon=bool(kinds & SOON), wait=bool(kinds & AWAITED))
        for event in timed:
            self.history.apply(event)

    def check(self) -> None:
        """Raises what `JournalWriter.check` raises, where the study is in a bucket."""
        if self._stored is not None:
            self._stored.check()


def _as_json(event: Mapping[str, Any]) -> dict[str, Any]:
    form = {"format": FORMAT} if event["event"] == "study" else {}
    return form | {name: to_json(value) if name == PARAMS else _plain(value) for name, value in event.items()}


def _plain(value: Any) -> Any:
    """The same as JSON has it: scalars of numpy as Python's own, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
