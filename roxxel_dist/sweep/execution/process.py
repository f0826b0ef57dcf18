"""The process of a trial, seen from the task that started it.

The words that start a trial's program as the ranks that it wants.
"""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.actor import OF_WORKERS
from roxxel_dist.launcher.spec import CONTRACT
from roxxel_dist.sweep.execution import subreaper as leash

ROXXEL = (sys.executable, "-u", "-m", "roxxel_dist")
GRACE_S = 12
"""What a launcher gives its ranks to save: less than what a trial gets to end."""


def count(task: Mapping[str, Any]) -> int:
    """How many processes a trial has."""
    return int(task.get("hosts") or 1) * int(task.get("procs_per_host") or 1)


def with_ranks(
    task: Mapping[str, Any], words: Sequence[str], alone: Sequence[str] = (), *, env: Iterable[str] = ()
) -> list[str]:
    """A program as the ranks of a trial: itself where it is one, through the launcher where there are more.

    Args:
        task: says how many, and where.
        words: of the program, as they stand behind `--` of `launch`.
        alone: go before them where there is no launcher.
        env: names of the variables that the ranks need; on other hosts they have no others of this process.
    """
    if count(task) == 1:
        return [*alone, *words]
    hosts, procs, gpus = int(task.get("hosts") or 1), str(task["procs_per_host"] or 1), task.get("gpus_per_host")
    dealt = ["--grace", str(GRACE_S), *(["--gpus-per-host", str(int(gpus))] if gpus else []), "--", *words]
    if hosts == 1:
        return [*ROXXEL, "launch", "local", "--nprocs", procs, *dealt]
    where = ["--address", task.get("ray_address") or "auto", "--hosts", str(hosts), "--procs-per-host", procs]
    where += ["--cpus-per-host", f"{task.get('cpus_per_host') or 1:g}"] + ["--insecure"] * bool(task.get("insecure"))
    named = [word for name in env for word in ("--env", name)]
    return [*ROXXEL, "launch", "ray", *where, *named, *dealt]


STOP_LIMIT_S = 15.0
"""So long a program that was asked to stop may take to save."""
LOCK_LIMIT_S = 30.0
IDENTITY = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
POLL_S = 0.1


class Child:
    """A program with a process group of its own, that dies with this process.

    Args:
        command: the words of the program.
        environment: all of it, as `environment` makes it.
        log: what it writes is appended here.
        title: a line that goes before it.
        directory: where it runs; that of this process if None.
    """

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
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", leash.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        self.pid: int = self._process.pid
        """Of its process group too."""
        self._pidfd = os.pidfd_open(self.pid)
        self._ended = select.poll()  # select() knows no descriptor above 1,023
        self._ended.register(self._pidfd, select.POLLIN)

    def wait(self, limit_s: float) -> int | None:
        """Its exit code, 128 + N for signal N; None while it runs."""
        if self._process.returncode is None and self._ended.poll(limit_s * 1000):
            code = self._process.wait()
            self._process.returncode = code if code >= 0 else 128 - code  # somebody killed the leash
            self._close()
        return self._process.returncode

    def said(self) -> str:
        """What it has written until now."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def end(self) -> int:
        """Ask it to stop, which lets it save, and kill it after 15 s; returns its exit code."""
        try:
            if self.wait(0) is None:
                self._signal(signal.SIGTERM)
                self.wait(STOP_LIMIT_S)
        finally:  # a second wish to end it does not wait
            if self.wait(0) is None:
                self.kill()
        code = self.wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """End it now, and all that it has started."""
        if stdin := self._process.stdin:
            stdin.close()  # the leash takes this for the death of its parent
        while self.wait(STOP_LIMIT_S) is None:  # stopped itself, perhaps
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        os.killpg(self.pid, number)  # not reaped yet: the number is its own

    def _close(self) -> None:
        os.close(self._pidfd)
        if stdin := self._process.stdin:
            stdin.close()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and `more`, without those by which a launched rank or a W&B run knows who it is.

    Also without those that are for Ray's workers alone; a trial has the worker's devices and its key.
    """
    dropped = (*CONTRACT, *IDENTITY, *OF_WORKERS)
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**own, "PYTHONUNBUFFERED": "1", **more}
