"""Files that appear together or not at all.

New files are made in a hidden folder beside their place (`.NAME.writing`), while its writer holds the lock of a hidden
file (`.NAME.lock`). When all are complete and on disk, the writer adds a small file `commit.json` to the folder: from
then on they count as written. The writer moves them to their place, and removes the files that they replace. If it dies
after the commit, the next reader or writer finishes the move; if it dies earlier, the next writer deletes the folder.
Only the holder of the lock changes the folder and the lock file, and it removes both.

That lock protects the half-made files. The data set itself has the lock of its folder (`writing`): a writer holds it
from its first look at the data to its last change, so that what it continues is what it has read.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roxxel_dist.process import interrupt
from roxxel_dist.process.durable import make_folder, sync_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK, hold_folder, holder, is_held, is_held_here, is_lock_of, take_lock

COMMIT = "commit.json"
SUFFIX, LOCK_SUFFIX = ".writing", ".lock"
FINISH_LIMIT_S = 30.0


@contextmanager
def writing(folder: Path, *, nested: bool = False, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder of data sets, without unfinished work of dead writers in it.

    The folder is made if it is missing; an empty one that was made is removed afterwards. If it is `nested`, this
    process may hold the lock already. Another holder is waited for, for `wait_s` seconds. Raises FolderIsHeld: another
    writer, of this process or another, holds it. UserError: the folder cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder for the shards")
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    is_outer, is_used, is_written = not is_held_here(folder), (folder / LOCK).exists(), False
    release: Callable[[], None] | None = None

    def take_away() -> None:
        # By its holder: the file of a data set's lock is no file of it. Where nothing was written it may be of a run.
        if is_outer and release is not None and (is_written or not is_used):
            (folder / LOCK).unlink(missing_ok=True)
        for path in absent:
            with suppress(OSError):  # it has files
                path.rmdir()

    try:
        release = hold_folder(folder, "writing a data set in", nested=nested, wait_s=wait_s)
        with interrupt.cleanup(take_away):
            finish_interrupted(folder)
            _remove_abandoned(folder)
            yield
            is_written = True
        take_away()  # if an interrupt stops this call, the one below follows
    finally:
        try:
            take_away()
        finally:
            if release is not None:
                release()


@contextmanager
def staging_folder(folder: Path, name: str) -> Iterator[Path]:
    """An empty hidden folder in `folder` (created if missing) to write in; it is always removed afterwards. Raises
    ValueError: `folder` cannot be created or written to, or another process is writing `name` in it."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    staged = folder / f".{name}{SUFFIX}"
    lock: int | None = None

    def take_away() -> None:
        if lock is not None and is_lock_of(lock, _lock_file(staged)):  # otherwise another process has removed it
            _leave(staged)
            _lock_file(staged).unlink(missing_ok=True)
        for path in absent:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()

    try:
        try:
            make_folder(folder)
            finish_interrupted(folder)
            lock = take_lock(_lock_file(staged))
            if lock is not None:
                _leave(staged)
                staged.mkdir()
        except OSError as error:
            raise UserError(f"{folder}: cannot write there ({error.strerror}); choose another place") from error
        if lock is None:
            raise UserError(
                f"{folder}: {holder(_lock_file(staged))} is writing {name} there; wait for it or choose another place"
            )
        with interrupt.cleanup(take_away):
            try:
                yield staged
            except OSError as error:  # an error of a write, such as a full disk, names no file
                error.filename = error.filename or str(folder)
                raise
        take_away()  # if an interrupt stops this call, the one below follows
    finally:
        try:
            take_away()
        finally:
            if lock is not None:
                os.close(lock)


def publish(staged: Path, replaced: Iterable[str]) -> None:
    """Move all files of a staging folder to their place, and remove the files called `replaced` that have no successor.

    Files move in descending order of names, so the first of several shards appears last: until then their chain is
    broken, and a concurrent reader gets an error, not a part of the data.
    """
    remove = sorted(set(replaced) - set(os.listdir(staged)))
    sync_folder(staged)
    write_file(staged / COMMIT, json.dumps({"remove": remove}).encode())
    _move(staged)


def finish_interrupted(folder: Path) -> None:
    """Finish the committed write of a dead writer in `folder`; wait for a live writer that is finishing its own. Raises
    ValueError: a write must be finished and this process may not write there, or its writer makes no progress."""
    for staged in folder.glob(f".*{SUFFIX}"):
        lock_file = _lock_file(staged)
        deadline = time.monotonic() + FINISH_LIMIT_S
        while (staged / COMMIT).exists():
            try:
                lock = take_lock(lock_file)
                if lock is not None:
                    try:
                        _leave(staged)
                        lock_file.unlink(missing_ok=True)
                    finally:
                        os.close(lock)
            except OSError as error:
                # A process with read access only waits for a live writer.
                if not is_held(lock_file, unknown=False) and (staged / COMMIT).exists():
                    raise UserError(
                        f"{folder}: an interrupted write has to be finished and cannot be ({error.strerror}); "
                        "open it once with the right to write there"
                    ) from error
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: {holder(lock_file)} has held {staged.name} for {FINISH_LIMIT_S:.0f} s; end it first"
                )
            time.sleep(0.01)


def _remove_abandoned(folder: Path) -> None:
    """Delete what dead writers have begun in `folder` and not committed. For the holder of its lock."""
    for staged in folder.glob(f".*{SUFFIX}"):
        lock = take_lock(_lock_file(staged))
        if lock is not None:  # else a writer of a single file lives
            try:
                _leave(staged)
                _lock_file(staged).unlink(missing_ok=True)
            finally:
                os.close(lock)


def _lock_file(staged: Path) -> Path:
    return staged.with_name(staged.name.removesuffix(SUFFIX) + LOCK_SUFFIX)


def _leave(staged: Path) -> None:
    """Finish a committed write, or delete an uncommitted one, if there is one."""
    if (staged / COMMIT).exists():
        _move(staged)
    elif staged.exists():
        shutil.rmtree(staged)


def _move(staged: Path) -> None:
    folder = staged.parent
    remove = json.loads((staged / COMMIT).read_bytes())["remove"]
    for name in sorted(os.listdir(staged), reverse=True):
        if name != COMMIT:
            with suppress(FileNotFoundError):  # without file locks, another process may do the same
                os.replace(staged / name, folder / name)
    for name in remove:
        (folder / os.path.basename(name)).unlink(missing_ok=True)
    sync_folder(folder)
    with suppress(FileNotFoundError):
        (staged / COMMIT).unlink()
        staged.rmdir()
