"""Real ways to take CPU time from a process: a quota of a control group, or competitors on its only core."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 100_000
BUSY = "while True: pass"
GROUPS = Path("/sys/fs/cgroup")


def missing() -> str | None:
    """Why no control group can be made here, or None."""
    for top in (GROUPS / "cpu", GROUPS):
        if (top / "cgroup.procs").exists() and os.access(top / "cgroup.procs", os.W_OK):
            return None
    return "a quota needs the right to write into /sys/fs/cgroup, which root of a machine has"


@contextlib.contextmanager
def group(name: str, cpus: float) -> Iterator[Path]:
    """A control group with so many CPUs (version 1 or 2): the file to which a process writes its number to be in it."""
    first = (GROUPS / "cpu" / "cgroup.procs").exists()
    top = GROUPS / "cpu" if first else GROUPS
    place = top / name
    place.mkdir()
    try:
        if first:
            (place / "cpu.cfs_quota_us").write_text(str(round(cpus * PERIOD_US)))
        else:
            with contextlib.suppress(OSError):
                (top / "cgroup.subtree_control").write_text("+cpu")
            (place / "cpu.max").write_text(f"{round(cpus * PERIOD_US)} {PERIOD_US}")
        yield place / "cgroup.procs"
    finally:
        end = time.monotonic() + 10
        while place.exists():
            with contextlib.suppress(OSError):
                place.rmdir()
            assert time.monotonic() < end, f"{place} is in use"


@contextlib.contextmanager
def quota(pid: int, cpus: float) -> Iterator[None]:
    """A control group of its own for a process, with so many CPUs."""
    first = (GROUPS / "cpu" / "cgroup.procs").exists()
    top = GROUPS / "cpu" if first else GROUPS
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    home = next(path for _, names, path in lines if ("cpu" in names.split(",") if first else not names))
    with group(f"roxxel-test-{pid}", cpus) as processes:
        processes.write_text(str(pid))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the process may be gone
                (top / home.strip("/") / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def competitors(pid: int, core: int, count: int) -> Iterator[None]:
    """Other programs, each in a session of its own, on the core to which all threads of a process are bound."""
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    before = os.sched_getaffinity(pid)
    others = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        for process in (*threads, *(other.pid for other in others)):
            os.sched_setaffinity(process, {core})
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        with contextlib.suppress(OSError):
            for thread in threads:
                os.sched_setaffinity(thread, before)
