"""One trial: a training of its own in a process of its own, whose reports come as they are made.

`run` is what a Ray task executes. The training is the command `train`, alone or through the launcher, so a trial is a
run as any other: its directory can be looked at, continued, evaluated and exported.

From the parameters of a trial to the Config that it trains.
"""

import math
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from roxxel_dist.config import FIELD_TYPES, SECTIONS, Config
from roxxel_dist.data.file_lock import holder
from roxxel_dist.run_directory import LOCK, is_held
from roxxel_dist.sweep.execution.metrics import Report, RunReader
from roxxel_dist.sweep.execution.outcome import disk_full, failure, machines_fault, unreported
from roxxel_dist.sweep.execution.process import (
    POLL_S,
    ROXXEL,
    TrialProcess,
    environment,
    launch_command,
    rank_count,
)
from roxxel_dist.sweep.wandb_bridge.program import ProgramReader, has_ended, note_end, prepare
from roxxel_dist.train.checkpoint.metadata import read_cursor
from roxxel_dist.train.config import SHARE_COMPILATION, TRIAL

HEADS = ("n_heads", "head_size")
LOCK_LIMIT_S = 30.0


def config_of(base: Mapping[str, Any], params: Mapping[str, Any], swept: Collection[str] | None = None) -> Any:
    """The checked `Config` of a trial.

    Where a sweep varies the width or the heads of a model, the `n_heads` and `head_size` of the base, which were chosen
    for its width, give way: those that the sweep does not give are derived, such that n_heads x head_size is dim and
    kv_heads divides n_heads. W&B's runs are written offline where the base does not say otherwise.

    Args:
        base: fields of a Config, flat or in sections; the others have their defaults.
        params: of the trial, fields too. A mapping for a field that holds one (`model_args`) goes into the base's.
        swept: the names of all parameters of the sweep; by default those of `params`.

    Raises:
        ValueError: no such field (names the nearest one), or a value breaks its rule (names field, value and rule).
    """
    known, told = flat(base), flat(params)
    names = set(told) if swept is None else {*told, *swept}
    if names & {"dim", "kv_heads", *HEADS}:
        known = {name: value for name, value in known.items() if name not in HEADS}
    for name, value in told.items():
        both = isinstance(value, Mapping) and isinstance(known.get(name), Mapping)
        known[name] = {**known[name], **value} if both else value
    config = Config.from_dict({"wandb": "offline", **known}, "parameters")
    config.validate()
    return config


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that stand in sections, and those beside them, by their names alone."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        section = name in SECTIONS and (isinstance(value, Mapping) or (value is None and name not in FIELD_TYPES))
        found |= {str(key): one for key, one in (value or {}).items()} if section else {str(name): value}
    return found


Task = Mapping[str, Any]
Event = dict[str, Any]


class Reader(Protocol):
    """Where the reports of a trial are found."""

    @property
    def names(self) -> set[str]:
        """All metrics that came."""
        ...

    def read(self, *, last: bool = False) -> list[Report]:
        """(step, value) for each new value of the metric; NaN for one that is not finite."""
        ...

    def more(self) -> dict[str, Any]:
        """What is kept with a result."""
        ...

    def close(self) -> None:
        """Nothing more is read."""
        ...


def run(task: Task) -> Iterator[Event]:
    """Run a trial to its end, in a process group that dies with this process.

    Yields `{"start": {"pid"}}`, `{"report": {"step", "value"}}` within a fraction of a second of each evaluation, and
    last one of `result`, `fail` (its own fault: kind, reason, log), `lost` (a machine's: it can go on from its
    checkpoint) and `broken` (the disk is full: no trial can go on). A run that is finished already yields what it
    reported, and its result, at once. When it is closed, or interrupted, the training is asked to stop, saves, and is
    killed after 15 s.

    Args:
        task: what the controller makes of a trial; plain values. run_dir and log are absolute, other paths count from
            "directory", where it has one, or else from the working directory of this process.
    """
    folder = Path(task["run_dir"])
    if held := wait_until_free(folder):
        yield {"lost": {"reason": held}}
        return
    reader: Reader = ProgramReader(folder, task["metric"]) if task["program"] else RunReader(folder, task["metric"])
    try:
        yield from _finished(task, folder, reader) if _is_finished(task, folder) else _train(task, folder, reader)
    finally:
        reader.close()


def _is_finished(task: Task, folder: Path) -> bool:
    return has_ended(folder) if task["program"] else bool(read_cursor(folder).get("finished"))


def _finished(task: Task, folder: Path, reader: Reader) -> Iterator[Event]:
    """The reports and the result of a run whose end nobody has written down."""
    score = Score(task, reader)
    yield from score.new(last=True)
    yield score.result(None)


def _train(task: Task, folder: Path, reader: Reader) -> Iterator[Event]:
    try:
        command, env = (prepare if task["program"] else _prepare)(task, folder)
    except ValueError as error:
        yield fail(task, "error", str(error))
        return
    if task.get("corpus"):
        from roxxel_dist.sweep.execution.corpus import wait_for_shards  # numpy

        if why := wait_for_shards(task, config_file(task)):
            full = disk_full(why)
            yield {"broken": {"reason": full}} if full else fail(task, "error", why)
            return
    score = Score(task, reader)
    title = f"trial {task['trial']}, attempt {task['attempt']}"
    try:
        child = TrialProcess(command, env, Path(task["log"]), title, task.get("directory"))
    except ChildProcessError as error:
        yield fail(task, "error", f"its program does not start: {error}")
        return
    code, stopped = yield from follow(task, child, score)
    yield _verdict(task, folder, score, code, child.output(), stopped)


def follow(task: Task, child: TrialProcess, score: "Score") -> Generator[Event, None, tuple[int, str | None]]:
    """Yield the start and the reports of a program; returns its exit code, and "time" where its time was over.

    It is ended when its time is over, when the metric is no number, and when this generator is closed or interrupted.
    """
    limit = time.monotonic() + (task.get("max_time_s") or math.inf)
    stopped, code = None, None
    try:
        yield {"start": {"pid": child.pid}}
        while code is None and stopped is None and not score.is_nan:
            code = child.wait(POLL_S)
            yield from score.new()
            stopped = "time" if code is None and time.monotonic() >= limit else None
    finally:
        code = child.end()  # at once where it has ended
    yield from score.new(last=True)
    return code, stopped


class Score:
    """What a trial has reported, and how good it is."""

    def __init__(self, task: Task, reader: Reader) -> None:
        self._task, self._reader = task, reader
        self._began = time.monotonic()
        self.best: float | None = None
        self.is_nan: bool = False
        """Whether the metric came as no finite number."""

    def new(self, *, last: bool = False) -> Iterator[Event]:
        """What was reported since the last call."""
        better = min if self._task["goal"] == "minimize" else max
        for step, value in self._reader.read(last=last):
            if not math.isfinite(value):
                self.is_nan = True
                return
            self.best = value if self.best is None else better(self.best, value)
            yield {"report": {"step": step, "value": value}}

    def result(self, stopped: str | None) -> Event:
        """The result, or a failure where nothing was reported."""
        if self.is_nan:
            return fail(self._task, "nan", f"{self._task['metric']} is not a finite number")
        if self.best is None and stopped == "time":
            reason = f"it reported no {self._task['metric']!r} within its {self._task['max_time_s']:g} s"
            return fail(self._task, stopped, f"{reason}: evaluate earlier (eval_every), or give it more time")
        if self.best is None:
            return fail(self._task, "error", unreported(self._task["metric"], self._reader.names))
        more = {**self._reader.more(), "seconds": round(time.monotonic() - self._began, 3)}
        found: Event = {"value": self.best, "more": more}
        return {"result": {**found, "stopped": stopped} if stopped else found}


def _verdict(task: Task, folder: Path, score: Score, code: int, said: str, stopped: str | None) -> Event:
    if stopped or score.is_nan:
        return score.result(stopped)
    if code == 0:
        note_end(folder) if task["program"] else None
        return score.result(None)
    if reason := machines_fault(code, ours=not task["program"] or rank_count(task) > 1):
        return {"lost": {"reason": reason}}
    if full := disk_full(said):
        return {"broken": {"reason": full}}
    return fail(task, *failure(code, said))


def fail(task: Task, kind: str, reason: str) -> Event:
    """A trial that failed by its own fault."""
    return {"fail": {"kind": kind, "reason": reason, "log": str(task["log"])}}


def wait_until_free(folder: Path) -> str | None:
    """Wait until nobody trains in a run directory any more; after the limit, who does."""
    end = time.monotonic() + LOCK_LIMIT_S
    while is_held(folder, unknown=False):
        if time.monotonic() >= end:
            return (
                f"{holder(folder / LOCK)} holds {folder} for more than {LOCK_LIMIT_S:g} s: wait for its end, or end it"
            )
        time.sleep(POLL_S)
    return None


def config_file(task: Task) -> Path:
    """Where the Config of a trial is written."""
    return Path(task["log"]).with_suffix(".yaml")


def _prepare(task: Task, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that train the Config of a trial; the Config is written beside its log."""
    config = config_of(task["config"], task["params"], (task.get("sweep") or {}).get("names"))
    written = config_file(task)
    written.parent.mkdir(parents=True, exist_ok=True)
    config.save_yaml(written)
    words = ["train", "--config", str(written), "--run_dir", str(folder), "--resume"]
    words += ["--data_path", str(task["data_path"])] if task.get("data_path") else []
    own = {"WANDB_RUN_GROUP": folder.parent.parent.name, SHARE_COMPILATION: "1", TRIAL: "1"}
    own |= task.get("environment") or {}
    return launch_command(task, words, ROXXEL, env=own), environment(own)
