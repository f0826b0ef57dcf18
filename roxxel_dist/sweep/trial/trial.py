"""One trial: a run of its own in a process of its own, whose reports come as they are made.

`run` is what a Ray task executes. The training is the command `train`, alone or through the launcher, so a trial is a
run as any other: its directory can be looked at, continued, evaluated and exported. Decision 28.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, read_cursor
from roxxel_dist.place.directory import LOCK, is_held
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.file_lock import holder
from roxxel_dist.process.process_stat import AwakeClock
from roxxel_dist.settings.config import Config, flat_fields
from roxxel_dist.settings.training import SHARE_COMPILATION, TRIAL
from roxxel_dist.sweep.space.trial_phases import flatten_phase_params, is_of_phases, phases_of_trial
from roxxel_dist.sweep.trial.outcome import classify_exit, disk_full
from roxxel_dist.sweep.trial.process import (
    LOCK_LIMIT_S,
    POLL_S,
    ROXXEL,
    TrialProcess,
    TrialTask,
    environment,
    launch_command,
)
from roxxel_dist.sweep.trial.program import ENDED, prepare
from roxxel_dist.sweep.trial.tail import MetricsTail, WandbTail

HEADS = ("n_heads", "head_size")
Event = dict[str, Any]


def config_of(
    base: Mapping[str, Any],
    params: Mapping[str, Any],
    swept: Collection[str] | None = None,
    groups: Mapping[int, Sequence[int]] | None = None,
) -> Any:
    """The checked `Config` of a trial, of the fields of a base, flat or in sections, and of its parameters, fields too.

    A mapping for a field that holds one (`model_args`) goes into the base's. Where a sweep, whose parameters are
    `swept` (by default those of `params`), varies the width or the heads of a model, the `n_heads` and `head_size` of
    the base, which were chosen for its width, give way: those that the sweep does not give are derived, such that
    n_heads x head_size is dim and kv_heads divides n_heads. W&B's runs are written offline where the base does not say
    otherwise. Shares and ends of phases (mixture.1.code, phase_end.1) go into the phases of the base, whose passes are
    then apart; `groups` has the phases with the shares of mixture.P.NAME, by P. Raises ValueError for no such field
    (names the nearest one), and for a value that breaks its rule (names field, value and rule).
    """
    fields, params = flat_fields(base), flat_fields(flatten_phase_params(params), "parameters")
    of_phases = {name: value for name, value in params.items() if is_of_phases(name)}
    params = {name: value for name, value in params.items() if name not in of_phases}
    if of_phases:
        params |= {"phases": phases_of_trial(fields.get("phases"), of_phases, groups), "passes": "apart"}
    if {*params, *(swept or ())} & {"dim", "kv_heads", *HEADS}:
        fields = {name: value for name, value in fields.items() if name not in HEADS}
    for name, value in params.items():
        both = isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)
        fields[name] = {**fields[name], **value} if both else value
    config = Config.from_dict({"wandb": "offline", **fields}, "parameters")
    config.validate()
    return config


def run(fields: Mapping[str, Any]) -> Iterator[Event]:
    """Run a trial, a TrialTask by its fields, to its end, as a process tree that dies with this process.

    Yields `{"start": {"pid"}}`, `{"report": {"step", "value"}}` within a fraction of a second of each evaluation, and
    last one of `result`, `fail` (its own fault: kind, reason, log), `lost` (a machine's fault: it can resume from its
    checkpoint) and `fatal` (the disk is full: no trial can go on). `{"note": {"text"}}` is a line for people. A
    finished run yields its reports and its result at once. When the generator is closed, or interrupted, the training
    is asked to stop, saves, and is killed after 15 s. Relative paths start at the task's "directory", or else at that
    of this process.
    """
    task = TrialTask(**fields)
    folder, own = Path(task.run_dir), bool(task.program)
    if reason := wait_until_free(folder):
        yield {"lost": {"reason": reason}}
        return
    directory = task.directory or os.getcwd()
    tail = MetricsTail(folder, task.metric, task.weights)
    if own:
        tail = WandbTail(folder.absolute(), task.metric, directory)
    objective = Objective(task, tail)
    if (folder / ENDED).exists() if own else read_cursor(folder).get("finished"):  # its end is not yet in the journal
        yield from objective.reports(last=True)
        yield objective.result(None)
        return
    try:
        command, env = (prepare if own else _prepare)(task, folder)
    except ValueError as error:
        yield failure_event(task, "error", str(error))
        return
    if task.corpus is not None:
        from roxxel_dist.sweep.trial.corpus import wait_for_shards  # numpy

        if reason := wait_for_shards(task, config_file(task)):
            yield failure_event(task, "fatal" if disk_full(reason) else "error", disk_full(reason) or reason)
            return
    if task.attempt and not own and task.run_url is None and not any((folder / CHECKPOINTS).glob("*")):
        yield {"note": {"text": f"it starts from step 1 again: there is no checkpoint in {folder / CHECKPOINTS}"}}
    code, output, stopped = yield from follow(task, command, env, objective)
    if code == 0 and own and not (stopped or objective.is_over):
        write_file(folder / ENDED, '{"exit_code": 0}\n')
    if code == 0 or stopped or objective.is_over:
        yield objective.result(stopped)
    else:
        yield failure_event(task, *classify_exit(code, output, ours=not own or task.count > 1))


def follow(
    task: TrialTask,
    command: list[str],
    env: Mapping[str, str],
    objective: "Objective",
    look: Callable[[], Event | None] = lambda: None,
) -> Generator[Event, None, tuple[int, str, str | None]]:
    """Run a program; yield its start, its reports, and what `look` has to say while it runs; return (exit code, output,
    "time" where its time was over). It is ended when its time is over, when the metric is no number or comes from
    several runs, and when this generator is closed or interrupted."""
    limit = time.monotonic() + (task.max_time_s or math.inf)
    title = f"trial {task.trial}, attempt {task.attempt}"
    try:
        process = TrialProcess(command, env, Path(task.log), title, task.directory)
    except ChildProcessError as error:
        return 1, f"its program {command[0]!r} does not start: {error}", None
    stopped, code = None, None
    try:
        yield {"start": {"pid": process.pid}}
        while code is None and stopped is None and not objective.is_over:
            code = process.wait(POLL_S)
            yield from objective.reports()
            if event := look():
                yield event
            stopped = "time" if code is None and time.monotonic() >= limit else None
    finally:
        code = process.end()  # at once where it has ended
    yield from objective.reports(last=True)
    return code, process.output(), stopped


class Objective:
    """The reports of a trial; `best` is the best value, None before the first, and `is_nan` says whether the metric
    came as no finite number."""

    def __init__(self, task: TrialTask, tail: MetricsTail) -> None:
        self._task = task
        self.tail: MetricsTail = tail
        self._began = time.monotonic()
        self.best: float | None = None
        self.is_nan: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the trial has failed, whatever comes now."""
        return self.is_nan or self.tail.problem is not None

    def reports(self, *, last: bool = False) -> Iterator[Event]:
        """The reports since the last call."""
        better = min if self._task.goal == "minimize" else max
        for step, value in self.tail.read(last=last):
            if not math.isfinite(value):
                self.is_nan = True
                return
            self.best = value if self.best is None else better(self.best, value)
            of_sets = {"losses": self.tail.losses[step]} if step in self.tail.losses else {}
            yield {"report": {"step": step, "value": value, **of_sets}}

    def result(self, stopped: str | None) -> Event:
        """The result, or a failure where nothing was reported."""
        metric = self._task.metric
        if self.tail.problem is not None:
            return failure_event(self._task, "error", self.tail.problem)
        if self.is_nan:
            return failure_event(self._task, "nan", f"{metric} is not a finite number")
        if self.best is None and stopped == "time":
            reason = f"it reported no {metric!r} within its {self._task.max_time_s:g} s"
            return failure_event(self._task, "time", f"{reason}: evaluate earlier (eval_every), or give it more time")
        if self.best is None:
            reason = f"the trial ended and never reported {metric!r}: {self.tail.missing_message()}"
            return failure_event(self._task, "error", reason)
        more = {**self.tail.summarize(), "seconds": round(time.monotonic() - self._began, 3)}
        return {"result": {"value": self.best, "more": more, **({"stopped": stopped} if stopped else {})}}


def failure_event(task: TrialTask, kind: str, reason: str) -> Event:
    """The end of a trial that failed, by its own fault or (lost, fatal) by no fault of its own."""
    if kind in ("lost", "fatal"):
        return {kind: {"reason": reason}}
    return {"fail": {"kind": kind, "reason": reason, "log": task.log}}


def wait_until_free(folder: Path) -> str | None:
    """Wait until no process trains in a run directory; after the limit, returns the reason that names the process."""
    clock = AwakeClock()
    while is_held(folder, unknown=False):
        if clock.now() >= LOCK_LIMIT_S:
            return (
                f"{holder(folder / LOCK)} holds {folder} for more than {LOCK_LIMIT_S:g} s: wait for its end, or end it"
            )
        time.sleep(POLL_S)
    return None


def config_file(task: TrialTask) -> Path:
    """The file with the Config of a trial."""
    return Path(task.log).with_suffix(".yaml")


def _prepare(task: TrialTask, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that train the Config of a trial; the Config is written beside its log."""
    config = config_of(task.config, task.params, task.swept)
    file = config_file(task)
    file.parent.mkdir(parents=True, exist_ok=True)
    config.save_yaml(file)
    words = ["train", "--config", str(file), "--run_dir", task.run_url or str(folder), "--resume"]
    words += ["--local_dir", task.local_dir] if task.local_dir else []
    words += ["--data_path", task.data_path] if task.data_path else []
    words += ["--anneal", task.anneal] if task.anneal else []
    own = {"WANDB_RUN_GROUP": folder.parent.parent.name, SHARE_COMPILATION: "1", TRIAL: "1", **task.environment}
    return launch_command(task, words, ROXXEL, env=own), environment(own)
