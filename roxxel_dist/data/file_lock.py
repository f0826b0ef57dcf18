"""Locks of files (flock), on one host and on several that share a disk. Standard library alone.

Always on a regular file that is open for writing: NFS keeps the lock of a folder, or an exclusive one of a file that is
open to read, to one host. The file says who holds the lock, for people.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.1

_unlocked: set[Path] = set()
"""Folders of which was said that they have no locks."""


def say(line: str) -> None:
    """Show a line to a person."""
    print(f"roxxel-dist: {line}", file=sys.stderr, flush=True)


def take_lock(path: Path, say: Callable[[str], None] = say) -> int | None:
    """The descriptor that holds the lock of a file; None where another has it. File and folder are made if missing.

    Where the file system has no locks, that is said once, and the lock counts as held. Whoever holds it may remove the
    file. Raises OSError where the file cannot be made or written.
    """
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a folder that its maker has taken away again
            path.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            if not _lock(lock, path, say):
                os.close(lock)
                return None
            if is_lock_of(lock, path):  # else who held it has removed the file: this lock is on nothing
                owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
                with suppress(OSError):  # a full disk
                    if os.pread(lock, len(owner) + 1, 0) != owner:
                        os.ftruncate(lock, 0)
                        os.pwrite(lock, owner, 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def wait_for_lock(
    path: Path,
    waiting: Callable[[str], str],
    failed: Callable[[str], str],
    *,
    limit_s: float,
    silent_s: float = 0.0,
    progress: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = say,
) -> int:
    """The descriptor that holds the lock of a file, as `take_lock` has it, once nobody else does.

    Args:
        path: the file.
        waiting: from who holds it to the line to say after `silent_s`.
        failed: from who holds it to the message of the error.
        limit_s: how long to wait without any progress.
        silent_s: how long to wait without a word.
        progress: something that changes whenever the holder gets on.
        say: shows a line to a person.

    Raises:
        ValueError: another process has held it for too long.
    """
    begin = changed = time.monotonic()
    state, said = progress(), False
    while (lock := take_lock(path, say)) is None:
        now = time.monotonic()
        if (new := progress()) != state:
            state, changed = new, now
        if now - changed >= limit_s:
            raise ValueError(failed(holder(path)))
        if not said and now - begin >= silent_s:
            say(waiting(holder(path)))
            said = True
        time.sleep(POLL_S)
    return lock


def is_held(path: Path, *, unknown: bool) -> bool:
    """Whether another process, or this one, holds the lock of a file; `unknown` where that cannot be told."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return unknown
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    finally:
        os.close(lock)
    return False


def holder(path: Path) -> str:
    """Who holds the lock of a file, for people."""
    try:
        owner = json.loads(path.read_bytes())
        return f"another process (pid {owner['pid']} on host {owner['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_lock_of(lock: int, path: Path) -> bool:
    """Whether a path still names the file that a descriptor is open on."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


def _lock(lock: int, path: Path, say: Callable[[str], None]) -> bool:
    for _ in range(2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # perhaps it was somebody who only looked, with `is_held`
        except OSError as error:
            if error.errno != errno.ESTALE and path.parent not in _unlocked:
                _unlocked.add(path.parent)
                say(
                    f"{path.parent}: this file system has no locks ({error.strerror}): make sure that only one "
                    "process writes there"
                )
            return True
        else:
            return True
    return False
