"""What the kernel says of processes, of free memory and of the time that this process ran. Standard library alone."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PF_EXITING = 0x4
STATE, PARENT, GROUP, SESSION, FLAGS, STARTED = 0, 1, 2, 3, 6, 19
"""Fields of `stat`; a process started so many clock ticks after the boot."""


def stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the name, which may hold anything. Raises OSError for one that is gone."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # not an object: Ctrl-C in between would warn of it
    try:
        return os.read(file, 4096).rpartition(b")")[2].split()
    finally:
        os.close(file)


def processes() -> Iterator[tuple[int, list[bytes]]]:
    """The processes of this machine, with the fields of their stat, which can be read of a stuck process too."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                yield int(name), stat(int(name))


def start_of(pid: int) -> int | None:
    """The time at which a process of this host began, in clock ticks since the boot; None where none lives."""
    with suppress(OSError):
        fields = stat(pid)
        return int(fields[STARTED]) if fields[STATE] not in b"ZX" else None
    return None


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out, or gone.

    It closes its files before its end can be seen: a reader of its output may be gone earlier.
    """
    try:
        return bool(int(stat(pid)[FLAGS]) & PF_EXITING)
    except OSError:
        return True


def free_bytes() -> int:
    """Bytes of memory that are free for processes of this host, or of the control groups that this one is in."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    root = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    own = root / next((line[4:] for line in lines if line.startswith("0::/")), "")  # of version 2
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            with suppress(OSError, ValueError, KeyError):  # no limit there
                limit = int((group / "memory.max").read_text(encoding="ascii"))
                stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                used = int((group / "memory.current").read_text(encoding="ascii")) - int(stat["inactive_file"])
                free = min(free, limit - used)
    return free


def boot_id() -> str:
    """The kernel's name of its time since the last boot; empty where a container hides /proc/sys."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


GAP_S = 5.0
"""The most that counts between two readings; who measures by this clock reads it more often."""


class AwakeClock:
    """Seconds since it was made, of which at most `GAP_S` count between two readings; for one thread."""

    def __init__(self) -> None:
        self._read, self._awake = time.monotonic(), 0.0

    def now(self) -> float:
        """The seconds that this process ran, as far as its readings tell."""
        now = time.monotonic()
        self._awake += min(now - self._read, GAP_S)
        self._read = now
        return self._awake
