"""A launch under measurement: its ranks, everything that belongs to it, and when all of that is gone."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
from hosts import CONTROLLER, Cluster

PYTHON = sys.executable
RANK = ["env", PYTHON, str(HERE / "launch_rank.py")]
"""With `env` in front the launcher takes it for any program, and starts no jax in it."""
BEHIND_A_SHELL = ["bash", "-c", f"{PYTHON} {HERE / 'launch_rank.py'}; true"]
JAX_RANK = [PYTHON, str(HERE / "launch_jax_rank.py")]
TAG = "ROXXEL_BENCHMARK"
START_S = 120.0
GONE_S = 60.0
REST_S = 10.0
SETTLE_S = 0.5
"""Between the last rank's word and the fault: the launcher has nothing left to do for the start."""


class MissedError(Exception):
    """A repetition did not go as it must; the message says how."""


class Ends:
    """Waits for the end of processes without asking for it again and again: the machine is small.

    Args:
        pids: of processes that belong to the benchmark; one that has ended already counts as ended now.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._open: dict[int, int] = {}
        self._poll = select.poll()
        self.last = time.monotonic()
        """When the last one so far ended."""
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._open[fd] = pid
            self._poll.register(fd, select.POLLIN)

    def wait(self, limit_s: float = GONE_S) -> float:
        """When the last of them had ended, by `time.monotonic`. Raises MissedError after `limit_s` seconds."""
        until = time.monotonic() + limit_s
        while self._open:
            ready = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                left = [_words(pid) for pid in self._open.values()]
                self.close()
                raise MissedError(f"still there after {limit_s:g} s: {'; '.join(left)}")
            self.last = time.monotonic()
            for fd, _ in ready:
                self._poll.unregister(fd)
                os.close(fd)
                del self._open[fd]
        return self.last

    def close(self) -> None:
        """Wait no longer."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()


class Job:
    """A program that starts ranks, in a new working directory. Leaving its context ends all of it, whatever happened.

    Args:
        words: what to run.
        ranks: how many will say that they are up.
        cluster: where; on this machine where None.
        also: more programs that belong to it, as (host, words): torchrun wants one on each node.
        env: variables beside those of this process.
        folder: the working directory, where it must be one that is there already.
        remove: take the working directory away at the end.
    """

    def __init__(
        self,
        words: Sequence[object],
        ranks: int,
        cluster: Cluster | None = None,
        *,
        on: str = CONTROLLER,
        also: Sequence[tuple[str, Sequence[object]]] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        remove: bool = True,
    ) -> None:
        self.ranks, self.cluster = ranks, cluster
        self.folder = folder or Path(tempfile.mkdtemp(prefix="roxxel-bench-launch-"))
        self._tag = uuid.uuid4().hex
        self._remove = remove
        self._env = {**(env or {}), TAG: self._tag, "XDG_STATE_HOME": str(self.folder / "state")}
        self.started = time.monotonic()
        self._said = (self.folder / "said.txt").open("w+b")
        self.process = self._start(on, words)
        self.others = [self._start(host, more) for host, more in also]

    def _start(self, on: str, words: Sequence[object]) -> "subprocess.Popen[bytes]":
        if self.cluster is not None:
            said: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": self._said, "stderr": self._said}
            return self.cluster.popen(words, on=on, cwd=self.folder, env=self._env, **said)
        return subprocess.Popen(
            list(map(str, words)),
            cwd=self.folder,
            env=os.environ | self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
        )

    @property
    def said(self) -> str:
        """What the launcher and its like have printed."""
        return (self.folder / "said.txt").read_text(errors="replace")

    def wait_said(self, what: str, ranks: Iterable[int]) -> dict[int, tuple[int, float]]:
        """(pid, time) of the ranks that shall say `what`, when all of them have."""
        files = {rank: self.folder / f"{what}.{rank}" for rank in ranks}
        until = time.monotonic() + START_S
        while not all(file.exists() for file in files.values()):
            if self.process.poll() is not None or time.monotonic() > until:
                raise MissedError(f"the ranks did not say {what!r}: {self.said[-2000:]}")
            time.sleep(0.01)
        words = {rank: file.read_text().split() for rank, file in files.items()}
        return {rank: (int(pid), float(when)) for rank, (pid, when) in words.items()}

    def up(self) -> dict[int, int]:
        """The pid of each rank, when all are up."""
        pids = {rank: pid for rank, (pid, _) in self.wait_said("up", range(self.ranks)).items()}
        time.sleep(SETTLE_S)
        return pids

    def everything(self) -> list[int]:
        """All processes that belong to it, on all hosts: launcher, ssh, agents, guards, ranks, shells."""
        if self.cluster is None:
            return [pid for pid in _processes() if f"{TAG}={self._tag}".encode() in _bytes(pid, "environ").split(b"\0")]
        return [pid for name in (*self.cluster.names, CONTROLLER) for pid in self.cluster.processes(name)]

    def agent(self, host: str | None = None) -> int:
        """The agent of a host; its guard is a child of it and looks the same."""
        pids = self.everything() if self.cluster is None else self.cluster.processes(host or self.cluster.names[0])
        agents = {pid for pid in pids if "-m roxxel_dist.launcher.agent.agent" in _words(pid)}
        (found,) = (pid for pid in agents if _parent(pid) not in agents)
        return found

    def end(self, code: int | None = None, last: str = "") -> float:
        """When the launcher had ended. Raises MissedError where it, or what it said, is not as expected.

        Args:
            code: the exit code that it must have.
            last: what its last line must hold.
        """
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            raise MissedError(f"the launcher is there {GONE_S:g} s later: {self.said[-2000:]}") from None
        when = time.monotonic()
        lines = self.said.splitlines() or [""]
        if code is not None and self.process.returncode != code:
            raise MissedError(f"code {self.process.returncode}, not {code}: {self.said[-2000:]}")
        if last not in lines[-1]:
            raise MissedError(f"its last line is {lines[-1]!r}, not {last!r}")
        return when

    def check_nothing_left(self) -> None:
        """Raises MissedError where any process of it is there still."""
        until = time.monotonic() + REST_S
        while left := self.everything():
            if time.monotonic() > until:
                raise MissedError(f"left over: {'; '.join(map(_words, left))}")
            time.sleep(0.05)

    def close(self) -> None:
        """End all of it."""
        self._said.close()
        for pid in self.everything():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in (self.process, *self.others):
            process.wait()
        if self._remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def local(ranks: int, command: Sequence[object], *options: object) -> list[object]:
    """The words of a launch on this machine, without restarts where `options` do not say otherwise."""
    return [PYTHON, "-m", "roxxel_dist", "launch", "local", "--nprocs", ranks, *_limited(options), "--", *command]


def over_ssh(cluster: Cluster, command: Sequence[object], *options: object) -> list[object]:
    """The words of a launch on all hosts of a cluster."""
    words: list[object] = [PYTHON, "-m", "roxxel_dist", "launch", "ssh", "--hosts", ",".join(cluster.names)]
    return [*words, "--ssh-config", cluster.ssh_config, *_limited(options), "--", *command]


def _limited(options: Sequence[object]) -> Sequence[object]:
    return options if "--max-restarts" in options else [*options, "--max-restarts", 0]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _bytes(pid: int, file: str) -> bytes:
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except OSError:  # it has ended
        return b""


def _words(pid: int) -> str:
    return f"{pid} {_bytes(pid, 'cmdline').decode(errors='replace').replace(chr(0), ' ').strip()}"


def _parent(pid: int) -> int:
    return int(_bytes(pid, "stat").rpartition(b")")[2].split()[1])
