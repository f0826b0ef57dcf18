"""The end of every process of a rank, whatever happened to those who watched it.

A rank leads a session of its own, so all that it starts carries its session id, also behind a shell or `timeout`,
which make process groups of their own. What leaves the session still has the rank's key in its environment.

As a program, `reaper.py PARENT LIMIT FOLDER KEY`, this file is the guard's other half. It imports no other file of the
package: it must start within milliseconds, without site-packages.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

KEY_ENV = "ROXXEL_RANK_KEY"
"""The variable that holds the key of a rank, a random word."""
ROUNDS = 200
PAUSE_S = 0.005
PF_EXITING = 0x4
STATE, SESSION, FLAGS, STARTED = 0, 3, 6, 19
"""Fields of /proc/PID/stat, counted from the one after the name."""


def is_ending(pid: int) -> bool:
    """Whether a process that was not reaped is on its way out or dead.

    It closes its files before anybody can see that it ended: who read from it may be gone earlier.
    """
    return bool(int(_stat(pid)[FLAGS]) & PF_EXITING)


def _stat(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _living() -> Iterator[tuple[int, list[bytes]]]:
    """Every process that has not ended, with the fields of its stat."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended while we looked
                stat = _stat(int(name))
                if stat[STATE] not in (b"Z", b"X"):
                    yield int(name), stat


def members(leaders: Iterable[int]) -> list[int]:
    """The living processes of the sessions led by these pids."""
    sessions = set(leaders)
    return [pid for pid, stat in _living() if int(stat[SESSION]) in sessions] if sessions else []


def carriers(keys: Iterable[str]) -> list[int]:
    """The living processes that have a key in their environment which begins with one of these.

    Only those that are younger than this process are looked at: a key is made by who looks for it, and to read the
    environment of a stranger that is stuck can take for ever.
    """
    marks = [f"\0{KEY_ENV}={key}".encode() for key in keys]
    found = []
    own = int(_stat(os.getpid())[STARTED])
    for pid, stat in _living() if marks else ():
        if int(stat[STARTED]) >= own and pid != os.getpid():
            with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # ended, or somebody else's
                environment = b"\0" + file.read()
                if any(mark in environment for mark in marks):
                    found.append(pid)
    return found


def kill_sessions(leaders: Iterable[int], keys: Iterable[str] = ()) -> None:
    """SIGKILL every process of the sessions led by these pids, then all that have one of the keys.

    Returns when they are dead, or for each of the two after a second. A leader must not have been reaped yet: until
    then its number cannot belong to anybody else.
    """
    sessions, wanted = set(leaders), list(keys)
    for leader in sessions:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    _kill_all(lambda: members(sessions))
    _kill_all(lambda: carriers(wanted))


def _kill_all(look: Callable[[], list[int]]) -> None:
    for _ in range(ROUNDS):
        if not (found := look()):
            return
        for pid in found:  # again each round: one of them may have forked just before it died
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def main(parent: int, limit_s: float, folder: str, key: str) -> None:
    """Read from stdin which sessions the parent has, and when that ends kill them and remove `folder`.

    Args:
        parent: who writes to stdin; killed when it has written nothing for `limit_s` seconds (it is stopped).
        limit_s: seconds; may be infinite.
        folder: with files only.
        key: the beginning of the keys of all ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sessions := _watch(parent, None if limit_s == float("inf") else limit_s):
        kill_sessions(sessions, [key])
    with suppress(OSError):  # somebody has emptied the temporary folder
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _watch(parent: int, limit_s: float | None) -> set[int]:
    """The sessions that the parent has when it is gone."""
    sessions: set[int] = set()
    rest = b""
    while True:
        if not select.select([0], [], [], limit_s)[0]:
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            return sessions
        data = os.read(0, 1 << 16)
        if not data:
            return sessions
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4])
    os._exit(0)  # the agent waits for the end, and there is nothing to take down
