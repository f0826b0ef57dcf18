"""The CPU usage of a host's processes, read from /proc and the control groups at no cost to them."""

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

SHARE = 1 / 200
"""The most of one CPU that the reading may take: with many threads it is done less often."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The CPU usage of a process since its first reading, all its threads together. Every number only grows."""

    pid: int
    time: float
    """When it was read, in seconds of a clock of its host that only grows."""
    cpu_s: float = 0.0
    """CPU time."""
    wait_s: float = 0.0
    """Time in which a thread could run and had no CPU (the kernel's run delay), throttling included."""
    longest_wait_s: float = 0.0
    """The same of the thread that waited longest between two readings: at most the time that has passed."""
    throttled_s: float = 0.0
    """Time in which a control group of the process had used up its quota; summed over CPUs."""


class UsageReader:
    """Reads one process after the other of a rank, mostly the same one."""

    def __init__(self) -> None:
        self._usage = Usage(pid=0, time=0.0)
        self._threads: dict[str, tuple[int, int]] = {}
        self._throttled: float | None = None
        self._next = 0.0

    def read(self, pid: int) -> Usage | None:
        """Its usage until now. None if it is gone, was read a moment ago, or cannot be read."""
        begun, cpu_begun = time.monotonic(), time.thread_time()
        if pid <= 0 or begun < self._next:
            return None
        threads = _threads(pid)
        if not threads:
            return None
        before, known, throttled = self._usage, self._threads, _throttled_s(pid)
        if before.pid != pid:
            self._usage = Usage(pid=pid, time=begun)
        else:  # all time of a new thread counts; that of a thread that has ended is lost
            ran = [run - known.get(thread, (0, 0))[0] for thread, (run, _) in threads.items()]
            waits = [wait - known.get(thread, (0, 0))[1] for thread, (_, wait) in threads.items()]
            more = 0.0 if throttled is None or self._throttled is None else max(0.0, throttled - self._throttled)
            self._usage = Usage(
                pid=pid,
                time=begun,
                cpu_s=before.cpu_s + sum(ran) / 1e9,
                wait_s=before.wait_s + sum(waits) / 1e9,
                longest_wait_s=before.longest_wait_s + min(max(waits) / 1e9, begun - before.time),
                throttled_s=before.throttled_s + more,
            )
        self._threads, self._throttled = threads, throttled
        self._next = begun + (time.thread_time() - cpu_begun) / SHARE
        return self._usage


def _threads(pid: int) -> dict[str, tuple[int, int]]:
    """(nanoseconds on a CPU, nanoseconds in which it waited for one) of each thread."""
    folder, threads = f"/proc/{pid}/task", {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = _words(f"{folder}/{thread}/schedstat")
                threads[thread] = int(ran), int(waited)
    return threads


def _words(path: str) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY)  # no file object: this is done for every thread
    try:
        return os.read(fd, 4096).split()
    finally:
        os.close(fd)


@functools.cache
def _mounts() -> dict[str, tuple[str, Path]]:
    """Where the "cpu" controller of the first version of control groups is mounted, and "" (the second): the group that
    the mount shows, and its folder."""
    mounts: dict[str, tuple[str, Path]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            root, folder = left.split()[3:5]
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2":
                mounts.setdefault("", (root, Path(folder)))
            elif kind == "cgroup" and "cpu" in options.split(","):
                mounts.setdefault("cpu", (root, Path(folder)))
    return mounts


def _throttled_s(pid: int) -> float | None:
    """Seconds for which a group of the process was throttled, or one above it: the most of them. None: no groups."""
    most: float | None = None
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
            _, controllers, group = line.split(":", 2)
            name = "cpu" if "cpu" in controllers.split(",") else controllers
            if name not in _mounts():
                continue
            root, top = _mounts()[name]
            inside = group.removeprefix(root) if root != "/" else group
            here = top / inside.strip("/")
            for folder in (here, *here.parents):
                most = max(most or 0.0, _throttled(folder))
                if folder == top:
                    break
    return most


def _throttled(folder: Path) -> float:
    with contextlib.suppress(OSError):
        words = _words(f"{folder}/cpu.stat")
        values = dict(zip(words[::2], words[1::2], strict=False))
        return int(values.get(b"throttled_usec", 0)) / 1e6 + int(values.get(b"throttled_time", 0)) / 1e9
    return 0.0
