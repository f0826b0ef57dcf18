"""Durable files: a whole file written in one atomic move, and names that a power failure does not take away.

Everything that the package replaces or leaves for a later process is written here; its cache has its place. So do
requests to a running job: NAME.request in a folder, which the job takes away and answers by NAME.answer, both JSON
objects. Standard library alone.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

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


REQUEST, ANSWER = ".request", ".answer"


class Mailbox:
    """The requests in a folder, and their answers.

    Args:
        folder: is made by the first request, and removed with the last answer. The folder above must be there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder: Path = Path(folder)

    def post(self, content: Mapping[str, Any], name: str = "") -> str:
        """Ask, under a new name where none is given; returns the name. Raises OSError."""
        name = name or secrets.token_hex(8)
        while True:
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody took the last answer, and the folder
                write_file(self.folder / f"{name}{REQUEST}", json.dumps(content) + "\n", sync=False)
                return name

    def withdraw(self, name: str) -> None:
        """Take a request away that nobody has taken."""
        (self.folder / f"{name}{REQUEST}").unlink(missing_ok=True)

    def take_answer(self, name: str) -> dict[str, Any] | None:
        """The answer to a request; None where there is none yet. Raises OSError."""
        path = self.folder / f"{name}{ANSWER}"
        try:
            answer = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        self._remove()
        return answer

    def take_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, content) of the requests that are there, which are taken away. One that cannot be read is left."""
        requests: list[tuple[str, dict[str, Any]]] = []
        with contextlib.suppress(OSError):  # no folder; or a network file system that is away for a moment
            for path in sorted(self.folder.glob(f"*{REQUEST}")):
                with contextlib.suppress(OSError, ValueError):
                    content = json.loads(path.read_text(encoding="utf-8"))
                    path.unlink()
                    if isinstance(content, dict):  # nobody who waits for an answer has written anything else
                        requests.append((path.stem, content))
        return requests

    def answer(self, name: str, content: Mapping[str, Any]) -> None:
        """Answer a request. Raises OSError."""
        write_file(self.folder / f"{name}{ANSWER}", json.dumps(content) + "\n", sync=False)

    def clear(self, before: float = math.inf) -> None:
        """Delete requests and answers, and what a writer that died left of them, where they are older than `before`
        (seconds since 1970). Raises OSError."""
        for path in self.folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another one has taken it
                if (REQUEST in path.name or ANSWER in path.name) and path.stat().st_mtime < before:
                    path.unlink()
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()


SAVE_FOLDER = ".save"
LOOK_EVERY_S = 1.0


def save_mailbox(run: str | Path) -> Mailbox:
    """The requests to save in a run directory; an answer is {"step": saved step} or {"error": text}."""
    return Mailbox(Path(run, SAVE_FOLDER))


class SaveRequests:
    """The requests to save in a run directory, for rank 0, which alone reads them.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self._mailbox = save_mailbox(folder)
        self._waiting: list[str] = []  # no save has begun since they came
        self._saving: list[str] = []  # for which a step is being saved
        self._step: int | None = None
        self._answers: dict[str, dict[str, Any]] = {}  # not written yet
        self._look_at = 0.0

    def is_open(self) -> bool:
        """Whether a request waits for a save to begin."""
        if self._step is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._look()
        return self._step is None and bool(self._waiting)

    def begin(self, step: int) -> None:
        """The save of `step` begins, and is for the open requests."""
        self._step, self._saving, self._waiting = step, [*self._saving, *self._waiting], []

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        if self._step is not None and self._step <= step:
            self._end({"step": step})

    def failed(self, step: int, why: str) -> None:
        """`step` could not be saved, so the commands that asked shall not wait."""
        if self._step == step:
            self._end({"error": f"step {step} could not be saved: {why}"})

    def finish(self, step: int) -> None:
        """The run ends, and `step`, its last one, is saved: the answer to what is open."""
        self._look()
        self.begin(step)
        self._end({"step": step})

    def _look(self) -> None:
        self._write_answers()
        self._waiting += [name for name, _ in self._mailbox.take_requests()]

    def _end(self, answer: dict[str, Any]) -> None:
        self._answers |= dict.fromkeys(self._saving, answer)
        self._step, self._saving = None, []
        self._write_answers()

    def _write_answers(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: again at the next look
            for name in [*self._answers]:
                self._mailbox.answer(name, self._answers[name])
                del self._answers[name]
