"""The lock of a folder: one process writes there. Runs, folders of checkpoints, data sets and studies all have it.

It is a lock (flock) of the file `.lock` in the folder. A writer takes it before its first look at the folder and holds
it until its last change: what was read under the lock is what is written under it. Who only reads takes none.
Standard library alone.
"""

from collections.abc import Callable
from pathlib import Path

from roxxel_dist.process.durable import make_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import holder, print_line, release_lock, take_lock, wait_for_lock

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
