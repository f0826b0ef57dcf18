"""One process trains in a run directory: it holds a lock (flock) on the file `.lock` in it. Standard library alone."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.data.commit import make_folder

LOCK = ".lock"
HELD: set[Path] = set()
"""The run directories that this process holds; the kernel would refuse it a second lock on a file as it does others."""


def hold(run: Path) -> Callable[[], None]:
    """Hold a run directory, made where it is missing, for this process; returns what lets it go.

    Where this process holds it already, that lock stays, and what is returned does nothing.

    Raises:
        ValueError: another process holds it, or it cannot be written.
    """
    run = run.absolute()
    if run in HELD:
        return lambda: None
    try:
        make_folder(run)
        lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"the run directory {run} cannot be written ({error.strerror}): choose another folder, or change its "
            f"permissions"
        ) from error
    if not take_lock(lock):
        os.close(lock)
        raise ValueError(f"another process is training in {run}: wait for its end, or name another folder")
    HELD.add(run)

    def let_go() -> None:
        if run in HELD:
            HELD.remove(run)
            os.close(lock)

    return let_go


def take_lock(lock: int) -> bool:
    """Take the lock (flock) of an open file; false where another process has it."""
    for _ in range(2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # perhaps it was somebody who only looked, with `is_held`
        except OSError:
            return True  # a file system without locks
        else:
            return True
    return False
