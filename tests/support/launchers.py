"""Launchers that begin at once: each is a fork of a server that has imported what a launcher needs, half of its CPU."""

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["roxxel_dist.launcher.control.supervisor", "roxxel_dist.launcher.backends.local"])


class Launcher:
    """A process that runs a job on this machine, used as a `subprocess.Popen` is.

    Args:
        job: the fields of its `JobSpec`; beside them `limits`, as a dictionary, and `hosts`, the names of the agents
            of this machine that stand for several hosts.
        directory: where it runs.
        env: all of its variables.
        stdout: a descriptor; None: a pipe, as stderr has one.
    """

    def __init__(self, job: dict[str, Any], directory: Path, env: Mapping[str, str], stdout: int | None) -> None:
        self.stdout, out = pipe() if stdout is None else (None, Connection(os.dup(stdout), readable=False))
        self.stderr, err = pipe()
        self._process = FORKS.Process(target=_be_launcher, args=(job, str(directory), dict(env), out, err))
        with out, err:
            self._process.start()
        self.pid: int = self._process.ident or 0

    @property
    def returncode(self) -> int | None:
        """Its exit code, or None; of one that was killed the signal's number below 0."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; TimeoutError where it still runs after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the launcher still runs after {timeout} s")
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """What it wrote to its pipes until their end."""
        with ThreadPoolExecutor(2) as threads:
            out, err = threads.map(lambda stream: b"" if stream is None else stream.read(), (self.stdout, self.stderr))
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def pipe() -> tuple[io.BufferedReader, Connection]:
    """Both ends of a pipe: one to read, and one that may be an argument of a process."""
    reads, writes = os.pipe()
    return os.fdopen(reads, "rb"), Connection(writes, readable=False)


def _be_launcher(job: dict[str, Any], directory: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """Be what `python -c` would be with this program."""
    from roxxel_dist.launcher.backends.local import LocalBackend
    from roxxel_dist.launcher.control.supervisor import run
    from roxxel_dist.launcher.job.spec import JobSpec, Limits

    for number, stream in ((1, out), (2, err)):
        with stream:
            os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    hosts = job.pop("hosts", None)

    class Backend(LocalBackend):  # several agents on this machine stand for several hosts
        pass

    Backend.hosts = hosts or LocalBackend.hosts
    spec = JobSpec(**{**job, "limits": Limits(**job["limits"]), "log_dir": Path(job["log_dir"])})
    sys.exit(run(spec, Backend()))
