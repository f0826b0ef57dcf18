"""Files that appear together or not at all.

New files are made in a hidden folder beside their place (`.NAME.writing`), while its writer holds the lock of a hidden
file (`.NAME.lock`). When all are complete and on the disk, one small file in the folder, `commit.json`, says so: from
then on they count as written. They are moved to their place, and what they replace is removed. If the writer dies on
the way, whoever opens or writes next finishes that; if it dies before, the folder is thrown away by the next writer.
Folder and file are touched by whoever holds the lock alone, who removes both.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.durable import make_folder, sync_folder, write_file
from roxxel_dist.cluster.file_lock import holder, is_held, is_lock_of, take_lock

COMMIT = "commit.json"
SUFFIX, LOCK_SUFFIX = ".writing", ".lock"
FINISH_LIMIT_S = 30.0


@contextmanager
def staging(folder: Path, name: str) -> Iterator[Path]:
    """An empty hidden folder in `folder` (made if it is not there) to write in; gone afterwards, whatever happens.

    Raises:
        ValueError: `folder` cannot be made or written to, or another process writes `name` in it now.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    staged = folder / f".{name}{SUFFIX}"
    lock: int | None = None

    def take_away() -> None:
        if lock is not None and is_lock_of(lock, _lock_file(staged)):  # else taken away before
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
            raise ValueError(f"{folder}: cannot write there ({error.strerror}); choose another place") from error
        if lock is None:
            raise ValueError(
                f"{folder}: {holder(_lock_file(staged))} is writing {name} there; wait for it or choose another place"
            )
        with interrupt.cleanup(take_away):
            try:
                yield staged
            except OSError as error:  # of a write, which names no file: what a full disk says
                error.filename = error.filename or str(folder)
                raise
        take_away()  # here too: an interrupt within it is followed by the one below
    finally:
        try:
            take_away()
        finally:
            if lock is not None:
                os.close(lock)


def publish(staged: Path, replaced: Iterable[str]) -> None:
    """Move all files of a staging folder to their place, and remove the files called `replaced` that have no successor.

    The names go in falling order, so that of several shards the first appears last: until then their chain is broken,
    and a reader that comes in between gets an error and not a part.
    """
    remove = sorted(set(replaced) - set(os.listdir(staged)))
    sync_folder(staged)
    write_file(staged / COMMIT, json.dumps({"remove": remove}).encode())
    _move(staged)


def finish_interrupted(folder: Path) -> None:
    """Finish what a writer that died had committed in `folder`; wait for one that is alive and just doing it.

    Raises:
        ValueError: there is something to finish and no right to do it, or its writer does not get on.
    """
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
                # Who may only read waits for a writer that is alive.
                if not is_held(lock_file, unknown=False) and (staged / COMMIT).exists():
                    raise ValueError(
                        f"{folder}: an interrupted write has to be finished and cannot be ({error.strerror}); "
                        "open it once with the right to write there"
                    ) from error
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{folder}: {holder(lock_file)} has held {staged.name} for {FINISH_LIMIT_S:.0f} s; end it first"
                )
            time.sleep(0.01)


def _lock_file(staged: Path) -> Path:
    return staged.with_name(staged.name.removesuffix(SUFFIX) + LOCK_SUFFIX)


def _leave(staged: Path) -> None:
    """Finish what was committed, and throw away what was not; nothing where there is neither."""
    if (staged / COMMIT).exists():
        _move(staged)
    elif staged.exists():
        shutil.rmtree(staged)


def _move(staged: Path) -> None:
    folder = staged.parent
    remove = json.loads((staged / COMMIT).read_bytes())["remove"]
    for name in sorted(os.listdir(staged), reverse=True):
        if name != COMMIT:
            with suppress(FileNotFoundError):  # where there are no locks, another process may do the same
                os.replace(staged / name, folder / name)
    for name in remove:
        (folder / os.path.basename(name)).unlink(missing_ok=True)
    sync_folder(folder)
    with suppress(FileNotFoundError):
        (staged / COMMIT).unlink()
        staged.rmdir()
