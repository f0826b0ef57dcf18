"""The end of every process of a rank, whatever happened to those who watched it.

A rank leads a session of its own, so all that it starts carries its session id, also behind a shell or `timeout`,
which make process groups of their own. The guard is a forked child of the agent that waits for the agent's end (end of
file on a pipe that the agent alone holds) and then kills what the agent has left: it makes `kill -9` of an agent safe.
"""

import math
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

ROUNDS = 200
PAUSE_S = 0.005
PF_EXITING = 0x4
SLACK_S = 2.0


def is_ending(pid: int) -> bool:
    """Whether a process that was not reaped is on its way out or dead.

    It closes its files before anybody can see that it ended: who read from it may be gone earlier.
    """
    flags = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[6]
    return bool(int(flags) & PF_EXITING)


def _members(sessions: set[int]) -> Iterator[int]:
    """The living processes of these sessions."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError):  # it ended while we looked
            stat = Path("/proc", name, "stat").read_text(errors="replace")
            state, _, _, session = stat.rpartition(")")[2].split()[:4]
            if int(session) in sessions and state not in "ZX":
                yield int(name)


def kill_sessions(leaders: Iterable[int]) -> None:
    """SIGKILL every process of the sessions led by these pids, and return when they are dead (or after a second).

    A leader must not have been reaped yet: until then its number cannot belong to anybody else.
    """
    sessions = set(leaders)
    for leader in sessions:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(ROUNDS):
        if not sessions or not (members := list(_members(sessions))):
            return
        for pid in members:  # again each round: one of them may have forked just before it died
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


class Guard:
    """A forked child that kills the sessions it was told of, and removes `folder`, when this process is gone.

    Fork it while this process is small and has one thread. The child keeps the descriptors of its parent but `closes`:
    who reads the parent's channel sees its end only when the guard has finished.

    Args:
        folder: taken away at the end.
        closes: descriptors of the parent that the guard must not hold.
        leash_s: a parent that did not `beat` for so many seconds (and two more) is stopped, and gets killed.
    """

    def __init__(self, folder: Path, closes: Iterable[int] = (), leash_s: float = math.inf) -> None:
        parent = os.getpid()
        reads, self._writes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for fd in (self._writes, *closes):
                    os.close(fd)
                _watch(reads, folder, parent, None if leash_s == math.inf else leash_s + SLACK_S)
            finally:
                os._exit(0)
        os.close(reads)

    def watch(self) -> None:
        """Called in a rank between fork and exec: from here on the guard knows this session, whoever dies."""
        os.write(self._writes, b"+%d\n" % os.getpid())

    def forget(self, pid: int) -> None:
        """This session is over, its number may be somebody else's soon."""
        with suppress(BrokenPipeError):  # somebody killed the guard
            os.write(self._writes, b"-%d\n" % pid)

    def beat(self) -> None:
        """The parent lives, and is not stopped."""
        with suppress(BrokenPipeError):
            os.write(self._writes, b"\n")

    def close(self) -> None:
        """Let the guard do its last work, and wait for it."""
        os.close(self._writes)
        os.waitpid(self.pid, 0)


def _watch(reads: int, folder: Path, parent: int, limit_s: float | None) -> None:
    sessions: set[int] = set()
    rest = b""
    while True:
        if not select.select([reads], [], [], limit_s)[0]:
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            break
        data = os.read(reads, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    kill_sessions(sessions)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
