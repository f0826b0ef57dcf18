"""What the kernel says of the processes of this machine in /proc/PID/stat. Standard library alone."""

import os
from collections.abc import Iterator
from contextlib import suppress

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
    """Every process of this machine, with the fields of its stat, which can be read of a stuck process too."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                yield int(name), stat(int(name))


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out, or gone.

    It closes its files before its end can be seen: a reader of its output may be gone earlier.
    """
    try:
        return bool(int(stat(pid)[FLAGS]) & PF_EXITING)
    except OSError:
        return True
