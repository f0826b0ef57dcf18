"""The folder of this user for what launchers keep, and names that one process alone has."""

import errno
import fcntl
import os
from pathlib import Path


def state_dir() -> Path:
    """The folder of this user's links to the records of jobs. Raises FileNotFoundError where this user has no home."""
    for state in (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")):
        if os.path.isabs(state):
            return Path(state, "roxxel-dist", "jobs")
    raise FileNotFoundError(errno.ENOENT, "no home directory: set HOME or XDG_STATE_HOME")


def claim(name: str) -> bool:
    """Take a name for the life of this process: the lock of a file that no other user can reach.

    Such as the id of a run before its first line, or a request that is made once. If the file cannot be made, the name
    counts as taken by this process. Files that are old are removed with old links (`index.forget`).
    """
    try:
        state_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(state_dir() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # a file system without locks
        os.close(lock)
    return True
