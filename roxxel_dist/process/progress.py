"""What a rank sends its launcher beside its output: a record in memory, and messages in a pipe.

The record is in a memory-mapped file, 64 bytes a rank, no locks. A rank names the step it enters before it waits for
anybody, so the rank whose `entered` is the smallest is the one that the others wait for. Standard library only: the
launcher reads this without importing jax.
"""

import contextlib
import functools
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from roxxel_dist.process.exit_codes import PIPE_ENV, UserError

RECORD = struct.Struct("<qqdqqq")  # the fields of a `Record`; of the activity its place in `ACTIVITIES`
ENV = "ROXXEL_PROGRESS"
ACTIVITIES = ("", "start", "join", "compile", "restore", "step", "eval", "save", "exit")
"""What a rank can say that it does; each has its own limit in the launcher. The first says nothing, and has none."""


class Record(NamedTuple):
    """The progress of one rank; in messages its values follow the number of the rank."""

    entered: int = 0
    """The step it entered last, from 1."""
    done: int = 0
    """The step it finished last."""
    time: float = 0.0
    """The time of its last change, in seconds since 1970 by the clock of its host."""
    phase: int = 0
    """The phase of the step, from 1; 0 where there are none."""
    activity: str = ""
    """One of `ACTIVITIES`."""
    pid: int = 0
    """The process that writes; 0 where none has written."""


def create(path: str | Path, ranks: int) -> int:
    """Write a file of `ranks` empty records, and return a descriptor for `read`, which outlives the file's name."""
    Path(path).write_bytes(bytes(RECORD.size * ranks))
    return os.open(path, os.O_RDONLY)


def read(fd: int, rank: int) -> Record:
    """The record of a rank; an empty one if the file was truncated."""
    data = os.pread(fd, RECORD.size, RECORD.size * rank).ljust(RECORD.size, b"\0")
    entered, done, when, phase, number, pid = RECORD.unpack(data)
    return Record(entered, done, when, phase, ACTIVITIES[number] if 0 <= number < len(ACTIVITIES) else "", pid)


def say_exit() -> None:
    """The program of this rank has ended well, and its process exits next, when others have come as far."""
    progress = Progress.from_env(int(os.environ.get("ROXXEL_PROCESS_ID") or 0))
    progress.now = own_record()._replace(pid=os.getpid())
    progress.say("exit")


def own_record() -> Record:
    """The record of this rank, as its program has written it; an empty one where no launcher started this process."""
    rank = int(os.environ.get("ROXXEL_PROCESS_ID") or 0)
    try:
        fd = os.open(os.environ[ENV], os.O_RDONLY)
    except (KeyError, OSError):
        return Record()
    try:
        return read(fd, rank)
    finally:
        os.close(fd)


class Progress:
    """Writes the record of one rank. Without a file (no launcher started this process) every call is free.

    Attributes:
        listener: called with the new record whenever the activity changes.
        now: the record as it was written last.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self.listener: Callable[[Record], None] | None = None
        self._map: mmap.mmap | None = None
        self._offset = rank * RECORD.size
        self.now: Record = Record(pid=os.getpid())
        if path:
            fd = os.open(path, os.O_RDWR)
            try:
                self._map = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
            if len(self._map) < self._offset + RECORD.size:
                raise UserError(f"{path} has no record for rank {rank}: it is not the file of this job")

    @classmethod
    def from_env(cls, rank: int) -> "Progress":
        """The record named by ROXXEL_PROGRESS; none if it is unset, or its file went with the temporary folder."""
        try:
            return cls(os.environ.get(ENV), rank)
        except (OSError, ValueError):
            return cls(None, rank)

    def enter(self, step: int, phase: int = 0) -> None:
        """Enter `step` (the done-count stays). From now on the launcher's step limit counts."""
        self._write(entered=step, phase=phase, activity="step")

    def finish(self, step: int) -> None:
        """Finish `step`."""
        self._write(done=step)

    def say(self, activity: str) -> None:
        """Name something else than a step that this rank does, until the next `enter` or `say`; "" ends every limit.

        Raises:
            ValueError: none of `ACTIVITIES`.
        """
        if activity not in ACTIVITIES:
            raise UserError(f"activity {activity!r}: must be one of {', '.join(map(repr, ACTIVITIES))}")
        self._write(activity=activity)

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Name `activity` as what this rank does within it, as `say` does; afterwards what it did before."""
        before = self.now.activity
        self.say(activity)
        try:
            yield
        finally:
            self.say(before)

    def _write(self, **changes: Any) -> None:
        before, self.now = self.now, self.now._replace(time=time.time(), **changes)
        record = self.now
        if record.activity != before.activity and self.listener is not None:
            self.listener(record)
        if self._map is not None:
            number = ACTIVITIES.index(record.activity)
            values = (record.entered, record.done, record.time, record.phase, number, record.pid)
            RECORD.pack_into(self._map, self._offset, *values)


MESSAGE_BYTES = 4096
"""A longer message would not be written as a whole (PIPE_BUF)."""


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def is_short(message: dict[str, Any]) -> bool:
    """Whether the pipe to the agent can take a message."""
    return len(_line(message)) <= MESSAGE_BYTES


class AgentPipe:
    """The pipe from this process to the agent that has started it; closed where there is none.

    It is taken out of the environment, and closed in children: only the program that takes it first writes there.
    A number alone could mean a file of the program's own by now, so the inode has to agree.
    """

    def __init__(self) -> None:
        self._fd = -1
        fd, _, inode = os.environ.pop(PIPE_ENV, "").partition(":")
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(fd))
            if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
                self._fd = int(fd)
                os.set_inheritable(self._fd, False)
                os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def send(self, message: dict[str, Any]) -> bool:
        """Write a message, without waiting; whether the agent will read it."""
        line = _line(message)
        try:
            return self._fd >= 0 and len(line) <= MESSAGE_BYTES and os.write(self._fd, line) > 0
        except OSError:  # no room, or no agent
            return False


@functools.cache
def agent_pipe() -> AgentPipe:
    """The pipe of this process."""
    return AgentPipe()
