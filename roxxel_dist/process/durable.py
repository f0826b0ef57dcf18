"""Durable files: a whole file written in one atomic move, and names that a power failure does not take away.

Everything that the package replaces or leaves for a later process is written here; its cache has its place. Standard
library alone.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from roxxel_dist.process.exit_codes import UserError

FORMAT = 1
"""The value of the key `format` in what a later process of this package reads: checkpoints, records, journals."""


class FormatError(UserError):
    """A file is of a format that this version does not read. It is not damaged."""


def check_format(saved: object, source: object) -> None:
    """Check the `format` of an object: FormatError unless it is that of this version, TypeError for no object."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{source}: expected an object, found a {type(saved).__name__}")
    found = cast("Mapping[str, object]", saved).get("format")
    if found != FORMAT:
        is_newer = isinstance(found, int) and found > FORMAT
        writer, cure = ("a newer", "update") if is_newer else ("an earlier", "begin anew, or use that version of")
        raise FormatError(
            f"{source}: {'no format' if found is None else f'format {found!r}'}, and this version reads format "
            f"{FORMAT}: it was written by {writer} version of roxxel-dist, which reads it: {cure} roxxel-dist"
        )


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, where they are missing, and bring their names to the disk."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in absent:
        sync_folder(path.parent)


def write_file(path: Path, data: bytes | str, *, sync: bool = True) -> None:
    """Write a file atomically: under a temporary name, fsynced, renamed. Text becomes UTF-8.

    After a power failure the file holds what it held before or all of `data`; without `sync`, which a disk of many
    clients makes slow, that is so after a kill of the writer alone. Such a writer leaves `.NAME.*.tmp` beside it.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir()):
        path.write_bytes(data.encode() if isinstance(data, str) else data)  # a device or a pipe is never replaced
        return
    # Not the process's id: on a shared disk two containers may have the same.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    data = data.encode() if isinstance(data, str) else data
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write names no file: what a full disk says
            error.filename = str(path)
        raise
    if sync:
        sync_folder(path.parent)


def put_back(path: Path, descriptor: int) -> bool:
    """Write a file again that is gone from `path`, as after a cleaner, and is still open for reading as `descriptor`.

    Returns whether it was gone; then the caller opens the new file instead of the old one. Raises OSError.
    """
    if path.exists():
        return False
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        data = file.read()
    make_folder(path.parent)
    write_file(path, data)
    return True


def cache_folder() -> Path:
    """The cache of this user on this host: what may be deleted, and is made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roxxel-dist"


def state_dir() -> Path:
    """The folder of this user's links to the records of jobs. Raises FileNotFoundError where this user has no home."""
    for state in (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")):
        if os.path.isabs(state):
            return Path(state, "roxxel-dist", "jobs")
    raise FileNotFoundError(errno.ENOENT, "no home directory: set HOME or XDG_STATE_HOME")
