"""Locks of files (flock), on one host and on several that share a disk. Standard library alone.

Always on a regular file that is open for writing: NFS keeps the lock of a folder, or an exclusive one of a file that is
open to read, to one host. The file names the holder of the lock (host, pid, boot id, start time) for people and, if the
file system has no locks, for the next process that wants it. Decision 27.

The lock of a folder is that of the file `.lock` in it: runs, folders of checkpoints, data sets and studies have it. A
writer takes it before its first look at the folder and holds it until its last change: what was read under the lock is
what is written under it. Who only reads takes none.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.process.durable import make_folder, state_dir
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.process_stat import AwakeClock, boot_id, start_of

POLL_S = 0.1
READERS_S, READER_PAUSE_S = 5.0, 0.02
"""Who only asks whether a lock is held shares it for a moment: so long, and so often, a process that wants it tries."""

_unlocked: set[Path] = set()
"""Folders without locks for which the warning was already shown."""
_held_by_name: set[int] = set()
"""Locks that only their file says are held."""


def print_line(line: str) -> None:
    """Show a line to a person."""
    print(f"roxxel-dist: {line}", file=sys.stderr, flush=True)


def take_lock(path: Path, log: Callable[[str], None] = print_line) -> int | None:
    """The descriptor that holds the lock of a file; None where another has it. File and folder are made if missing.

    If the file system has no locks, it warns once, and the process named in the file holds the lock while it lives on
    this host. The holder may remove the file, or give the lock back with `release_lock`. Raises OSError if the file
    cannot be made or written, UserError where a process that only looks at it does not let go of it.
    """
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a folder that its maker has taken away again
            path.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            if not _lock(lock, path, log):
                os.close(lock)
                return None
            if is_lock_of(lock, path):  # else its holder has removed the file: this lock is on nothing
                owner = json.dumps(process_record()).encode()
                with suppress(OSError):  # a full disk
                    if os.pread(lock, len(owner) + 1, 0) != owner:
                        os.ftruncate(lock, 0)
                        os.pwrite(lock, owner, 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def release_lock(lock: int) -> None:
    """Give a lock back; where the file system has no locks, by taking the name of this process out of its file."""
    if lock in _held_by_name:
        _held_by_name.remove(lock)
        with suppress(OSError):
            os.ftruncate(lock, 0)
    os.close(lock)


def wait_for_lock(
    path: Path,
    waiting: Callable[[str], str],
    failed: Callable[[str], str],
    *,
    limit_s: float,
    silent_s: float = 0.0,
    progress: Callable[[], object] = lambda: None,
    log: Callable[[str], None] = print_line,
    error: type[UserError] = UserError,
) -> int:
    """Wait until no other process holds the lock of a file; returns the descriptor that holds it, like `take_lock`.

    From the name of the holder, `waiting` makes the line to show after `silent_s`, and `failed` the message of the
    `error` after `limit_s` without progress of the holder: `progress` returned the same value all the time.
    """
    clock = AwakeClock()  # the holder may be stopped together with this process
    changed = 0.0
    state, said = progress(), False
    while (lock := take_lock(path, log)) is None:
        now = clock.now()
        if (new := progress()) != state:
            state, changed = new, now
        if now - changed >= limit_s:
            raise error(failed(holder(path)))
        if not said and now >= silent_s:
            log(waiting(holder(path)))
            said = True
        time.sleep(POLL_S)
    return lock


def is_held(path: Path, *, unknown: bool) -> bool:
    """Whether another process, or this one, holds the lock of a file; `unknown` if that cannot be found out."""
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
        lives = is_alive(_owner(path))
        return unknown if lives is None else lives
    finally:
        os.close(lock)
    return False


def holding_process(path: Path) -> dict[str, Any] | None:
    """The process that holds the lock of a file now, as `process_record`; None for none, or one that is unknown."""
    return _owner(path) if is_held(path, unknown=False) else None


def holder(path: Path) -> str:
    """The holder of the lock of a file, for people."""
    owner = _owner(path)
    return f"another process (pid {owner['pid']} on host {owner['host']})" if owner else "another process"


def process_record() -> dict[str, Any]:
    """A record of this process for others: pid, host and, if the kernel has them, boot id, pid namespace, start."""
    boot = boot_id()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # two containers of a host may have the same name and number
        if boot:
            own = {"boot": boot, "namespace": namespace, "start": start_of(os.getpid())}
            return {"pid": os.getpid(), "host": socket.gethostname(), **own}
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _owner(path: Path) -> dict[str, Any] | None:
    """The process named in a lock's file."""
    with suppress(OSError, ValueError):
        owner = json.loads(path.read_bytes())
        if isinstance(owner, dict) and {"pid", "host"} <= owner.keys():
            return owner
    return None


def is_alive(record: Mapping[str, Any] | None) -> bool | None:
    """Whether the process of a record lives, False for none; None if unknown, as from another host."""
    if record is None:
        return False
    current = process_record()
    if record["host"] != current["host"] or "boot" not in record.keys() & current.keys():
        return None
    if record["boot"] != current["boot"]:
        return False
    if record.get("namespace", current["namespace"]) != current["namespace"]:
        return None
    return record.get("start") == start_of(record["pid"])


def is_lock_of(lock: int, path: Path) -> bool:
    """Whether a path still names the file that a descriptor is open on."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


def _lock(lock: int, path: Path, log: Callable[[str], None]) -> bool:
    end = time.monotonic() + READERS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _only_read(lock):
                return False
            if time.monotonic() >= end:
                raise UserError(
                    f"{path} is looked at by {_readers(path)} for more than {READERS_S:g} s, and nothing can be "
                    f"written beside it meanwhile: end that process (`lslocks` lists it)"
                ) from None
            time.sleep(READER_PAUSE_S)
        except OSError as error:
            if error.errno == errno.ESTALE:
                return True
            owner = _owner(path)
            lives = is_alive(owner)
            if path.parent not in _unlocked:
                _unlocked.add(path.parent)
                last = f"; the last was {holder(path)}" if owner and lives is None else ""
                log(
                    f"{path.parent}: this file system has no locks ({error.strerror}): make sure that only one "
                    f"process writes there{last}"
                )
            if not lives:
                _held_by_name.add(lock)
            return not lives
        else:
            return True


def _only_read(lock: int) -> bool:
    """Whether those who keep a lock from this process share it, as `is_held` does: none of them writes."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def _readers(path: Path) -> str:
    """The processes of this host that share the lock of a file, for people."""
    found: list[str] = []
    with suppress(OSError):
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == place:
                found.append(words[4])
    return f"process {', '.join(found)}" if found else "another process"


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


LOCK = ".lock"
_held: set[Path] = set()
"""The folders that this process holds; the kernel would refuse it a second lock on a file as it does others."""


class FolderIsHeld(UserError):
    """Another process holds the lock of the folder."""


def hold_folder(
    folder: Path,
    action: str,
    *,
    nested: bool = True,
    wait_s: float = 0.0,
    progress: Callable[[], object] = lambda: None,
    log: Callable[[str], None] = print_line,
) -> Callable[[], None]:
    """Hold the lock of a folder, made if it is missing, for this process; returns a function that releases it.

    Args:
        folder: the folder.
        action: what a holder does there, such as "training in", for messages.
        nested: whether a process that holds the lock may take it again; then the returned function does nothing.
        wait_s: how many seconds to wait for another holder; it is counted from the last change of `progress`.
        progress: a value that changes while the other holder works.
        log: shows the line that says who is waited for.

    Raises:
        FolderIsHeld: another process holds it, and still does after `wait_s`.
        UserError: the folder cannot be written.
    """
    folder = folder.absolute()
    if folder in _held:
        if nested:
            return lambda: None
        raise FolderIsHeld(f"this process is {action} {folder} already: close that one first, or name another folder")
    path = folder / LOCK

    def is_held_by(owner: str) -> str:
        return f"{owner} is {action} {folder}: wait for its end, or name another folder"

    try:
        make_folder(folder)
        lock = take_lock(path, log)
        if lock is None and wait_s > 0:
            lock = wait_for_lock(
                path,
                lambda owner: f"waiting up to {wait_s:g} s for {owner}, which is {action} {folder}",
                is_held_by,
                limit_s=wait_s,
                progress=progress,
                log=log,
                error=FolderIsHeld,
            )
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be written ({error.strerror}): choose another folder, or change its "
            "permissions"
        ) from error
    if lock is None:
        raise FolderIsHeld(is_held_by(holder(path)))
    held = lock
    _held.add(folder)

    def release() -> None:
        if folder in _held:
            _held.remove(folder)
            release_lock(held)

    return release


def is_held_here(folder: Path) -> bool:
    """Whether this process holds the lock of a folder."""
    return folder.absolute() in _held
