"""The folder of a job in the memory of a host, which lives as long as the job's agent there.

The agent makes it and removes it. If the agent is killed, its guard removes it; if the guard is killed as well, the
keepers of the ranks do. If every process of the user was killed at once, the next job with such a folder on the host
removes it.
"""

import fcntl
import os
import re
import time
from contextlib import suppress

from roxxel_dist.launcher.host.process_tree import remove

SHARED_MEMORY = "/dev/shm"
NAME = re.compile("roxxel-[0-9a-f]{16}")
KEY = "key"
NEW_S = 60.0
"""A younger folder may not be locked yet by the agent that makes it."""


def new_path() -> str | None:
    """A name for a new folder; None where this host has no shared memory that can be written."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    return os.path.join(SHARED_MEMORY, f"roxxel-{os.urandom(8).hex()}")


def create(path: str, key: str) -> None:
    """Make the folder with its key, for this user alone; it counts as used while this process lives. Raises OSError."""
    os.mkdir(path, 0o700)
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept open
    with open(os.open(os.path.join(path, KEY), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)


def make(path: str, key: str) -> str | None:
    """The folder that `create` makes, where no abandoned folders take its room; the path, None where it cannot be."""
    remove_abandoned()
    try:
        create(path, key)
    except OSError:
        return None
    return path


def remove_abandoned() -> None:
    """Remove the folders of this user that no agent uses any more."""
    with suppress(OSError):
        for place in os.scandir(SHARED_MEMORY):
            if NAME.fullmatch(place.name) and place.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_abandoned(place)


def _remove_abandoned(place: "os.DirEntry[str]") -> None:
    state = place.stat(follow_symlinks=False)
    if state.st_uid != os.getuid() or time.time() - state.st_mtime < NEW_S:
        return
    folder = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove([place.path])
    finally:
        os.close(folder)
