"""One process trains in a run directory: it holds a lock (flock) on the file `.lock` in it. Standard library alone."""

from collections.abc import Callable
from pathlib import Path

from roxxel_dist.cluster.durable import make_folder
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.file_lock import holder, release_lock, take_lock

LOCK = ".lock"
HELD: set[Path] = set()
"""The run directories that this process holds; the kernel would refuse it a second lock on a file as it does others."""


class RunIsHeld(UserError):
    """Another process trains in the run directory."""


def hold(run: Path, *, nested: bool = True) -> Callable[[], None]:
    """Hold a run directory, made if it is missing, for this process; returns a function that releases it.

    If this process already holds it and may do so again (`nested`), that function does nothing. Raises RunIsHeld if
    another one holds it, and ValueError if it cannot be written.
    """
    run = run.absolute()
    if nested and run in HELD:
        return lambda: None
    try:
        make_folder(run)
        lock = take_lock(run / LOCK)
    except OSError as error:
        raise UserError(
            f"the run directory {run} cannot be written ({error.strerror}): choose another folder, or change its "
            f"permissions"
        ) from error
    if lock is None:
        raise RunIsHeld(f"{holder(run / LOCK)} is training in {run}: wait for its end, or name another folder")
    HELD.add(run)

    def let_go() -> None:
        if run in HELD:
            HELD.remove(run)
            release_lock(lock)

    return let_go
