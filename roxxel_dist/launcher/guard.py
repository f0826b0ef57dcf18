"""The process that outlives an agent, to kill what it has left: it makes `kill -9` of an agent safe.

It waits for the agent's end (end of file on a pipe that the agent alone holds). It is a program of its own
(`reaper.py`), not a fork: who kills agents by their command line must not kill it too.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from roxxel_dist.launcher import reaper

SLACK_S = 2.0
PR_SET_PDEATHSIG = 1


class Guard:
    """Kills the sessions and the keys it was told of, and removes `folder`, when this process is gone.

    Args:
        folder: taken away at the end.
        holds: descriptors that the guard keeps until it has finished: who reads the parent's channel sees its end then.
        leash_s: a parent that did not `beat` for so many seconds (and two more) is stopped, and gets killed.
    """

    def __init__(self, folder: Path, holds: Iterable[int] = (), leash_s: float = math.inf) -> None:
        self._key = os.urandom(16).hex()
        self._prctl = ctypes.CDLL(None).prctl
        reads, self._writes = os.pipe()
        words = [os.getpid(), leash_s + SLACK_S, folder, self._key]
        # Without the variables of an outer launch: that one would take the guard for a process of its rank.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", reaper.__file__, *map(str, words)],
            stdin=reads,
            pass_fds=tuple(holds),
            env=inherited,
            start_new_session=True,
        )
        self.pid: int = self._process.pid
        os.close(reads)

    def key(self, rank: int) -> str:
        """The value of ROXXEL_RANK_KEY for a rank: nobody else has it, on no machine and in no other attempt."""
        return f"{self._key}-{rank}-"

    def watch(self) -> None:
        """Called in a rank between fork and exec: from here on the guard knows this session, whoever dies.

        Where the guard and its parent are killed at once, the kernel still kills the rank itself.
        """
        os.write(self._writes, b"+%d\n" % os.getpid())
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def forget(self, pid: int) -> None:
        """This session is over, its number may be somebody else's soon."""
        with suppress(BrokenPipeError):  # somebody killed the guard
            os.write(self._writes, b"-%d\n" % pid)

    def beat(self) -> None:
        """The parent lives, and is not stopped. Raises BrokenPipeError where the guard is gone."""
        os.write(self._writes, b"\n")

    def close(self) -> None:
        """Let the guard do its last work, and wait for it."""
        os.close(self._writes)
        self._process.wait()
