"""The task of a trial, and its program: words, environment, and the process, of which nothing outlives this one."""

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.actor import OF_WORKERS
from roxxel_dist.launcher.host.process_tree import SpawnedTree
from roxxel_dist.launcher.job.spec import CONTRACT, Limits


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a trial, and the cluster that has its hosts."""

    hosts: int = 1
    procs_per_host: int = 1
    gpus_per_host: int | None = None
    cpus_per_host: float = 1
    ray_address: str | None = None
    insecure: bool = False

    @property
    def count(self) -> int:
        """The number of processes of a trial."""
        return self.hosts * self.procs_per_host

    @property
    def ranks(self) -> dict[str, Any]:
        """These fields by name, for a task or a program that starts the processes."""
        return {each.name: getattr(self, each.name) for each in fields(Ranks)}


@dataclass(frozen=True, kw_only=True)
class TrialTask(Ranks):
    """The facts that a worker must know of a trial, in plain values; it is sent as a dictionary of these fields."""

    trial: int
    params: Mapping[str, Any]
    """The trial's parameters that `config` does not have yet."""
    attempt: int
    """The number of the attempt, from 0."""
    run_dir: str
    """Absolute, as `log`; both, and the corpus's folder, count from the host's cache where `bucket` is given."""
    log: str
    metric: str
    goal: str
    weights: Mapping[str, float] = field(default_factory=dict)
    """The logged metrics of which `metric` is a mean, with their weights; empty where it is logged itself."""
    config: Mapping[str, Any]
    """The fields of the trial's config; of a program of the user's own, and where a server leads, those that all trials
    share."""
    data_path: str | None
    corpus: Mapping[str, Any] | None = None
    """The "text" of which shards are made first, and the "folder" of the study's shards; None: no shards are made."""
    program: Sequence[str] | None
    """The command of a program of the user's own; None: the trial is a training of a Config."""
    max_time_s: float | None
    directory: str | None = None
    """The folder in which the trial's program runs; None: that of its worker."""
    swept: Sequence[str] = ()
    """The names of all parameters of the sweep."""
    wandb_sweep: str | None = None
    """The sweep of a W&B server that leads it, as entity/project/name."""
    bucket: str | None = None
    """The address of the study, if in a bucket: hosts share no disk."""
    local_dir: str | None = None
    """The folder of this host that has the runs of a study in a bucket."""
    anneal: str | None = None
    """The checkpoint, RUN@STEP, from which the trial is a decay branch."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of the trial's program."""

    @property
    def run_url(self) -> str | None:
        """The address of the run, if the study is in a bucket; else None."""
        return None if self.bucket is None else f"{self.bucket}/trials/{self.trial}"


ROXXEL = (sys.executable, "-u", "-m", "roxxel_dist")
GRACE_S = 12
"""Seconds that a launcher gives its ranks to save: less than what a trial gets to end."""
STOP_LIMIT_S = 15.0
"""Seconds to save, for a program that was asked to stop."""
LOCK_LIMIT_S = 30.0
"""Seconds that a trial waits for another process that trains in its run directory."""
LINGER_S = 5.0
"""Seconds after the end of the program, for processes that it started and left, before they are killed."""
IDENTITY = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
FLUSH_ENV, FLUSH_S = "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", 1.0
"""The W&B client's setting of the seconds between writes of its file: reports of a trial are read there."""
POLL_S = 0.1


def launch_command(
    ranks: Ranks, words: Sequence[str], alone: Sequence[str] = (), *, env: Iterable[str] = ()
) -> list[str]:
    """The command of a trial: its program (`alone` and `words`), or the launcher of its ranks where there are several.

    The launcher starts nothing again: the sweep does, as often as `max_retries` says, and its own restarts would
    multiply with these. Ranks on other hosts have of this process's variables those alone that `env` names.
    """
    if ranks.count == 1:
        return [*alone, *words]
    procs = str(ranks.procs_per_host)
    gpus = ["--gpus-per-host", str(ranks.gpus_per_host)] if ranks.gpus_per_host else []
    dealt = ["--max-restarts", "0", "--grace", str(GRACE_S), *gpus, "--", *words]
    if ranks.hosts == 1:
        return [*ROXXEL, "launch", "local", "--nprocs", procs, *dealt]
    where = ["--address", ranks.ray_address or "auto", "--hosts", str(ranks.hosts), "--procs-per-host", procs]
    where += ["--cpus-per-host", f"{ranks.cpus_per_host:g}"] + ["--insecure"] * ranks.insecure
    where += [word for name in env for word in ("--env", name)]
    return [*ROXXEL, "launch", "ray", *where, *dealt]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process and `more`, without those that identify a launched rank or a W&B run, and without
    those that are for Ray's workers alone; a trial has the worker's devices and its key."""
    dropped = (*CONTRACT, *IDENTITY, *OF_WORKERS)
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**own, "PYTHONUNBUFFERED": "1", **more}


def client_environment(folder: Path) -> dict[str, str]:
    """Variables of a W&B client, whose runs are kept in a folder: it writes its file soon, and not every 15 s; a choice
    of the user's stays."""
    flush_s = os.environ.get(FLUSH_ENV, f"{FLUSH_S:g}")
    return {"WANDB_DIR": str(folder), "WANDB_ERROR_REPORTING": "false", FLUSH_ENV: flush_s}


class TrialProcess:
    """A program, as a process tree that ends with this process; what it writes is appended to a log, below a title.
    Raises ChildProcessError where it cannot be started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        title: str,
        directory: str | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as file:
            file.write(f"--- {title}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(command)}\n".encode())
            file.flush()
            self._begin = file.tell()
            limits = (LINGER_S, Limits().guard_kill_s)
            self._tree = SpawnedTree(command, environment, file.fileno(), directory, *limits)
        self.pid: int = self._tree.keeper
        """The process id of its keeper, the parent of the program."""

    def wait(self, limit_s: float) -> int | None:
        """Wait until nothing is left of it; the exit code (128 + N for signal N), or None after `limit_s` seconds."""
        code = self._tree.code if self._tree.wait(limit_s) else None
        return code if code is None or code >= 0 else 128 - code

    def output(self) -> str:
        """The output of the program until now."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def end(self) -> int:
        """Ask it to stop, so that it saves, and kill its remaining processes after 15 s; returns its exit code."""
        self._tree.end(STOP_LIMIT_S)
        code = self.wait(0)
        assert code is not None
        return code
