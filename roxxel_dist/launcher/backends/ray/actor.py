"""What runs inside the Ray actor of a node: it starts programs there, and carries their bytes.

The class travels to the node as source of its own (`cluster.actor`), so that Ray's workers need no
roxxel_dist: this file imports the standard library alone. Each method may wait; the actor has threads for it.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

CHUNK = 1 << 16
"""Answers below 100 KB travel with the answer itself, not through Ray's object store."""
OF_WORKERS = ("PYTHONBREAKPOINT", "SPT_NOENV", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Means Ray's workers alone: its debugger, how it names processes, and the session of whoever typed `ray start`."""


class RayNode:
    """Runs programs on its node. When its process ends they read the end of their stdin.

    Args:
        given: variables that the user gave to Ray's workers (`env_vars` of a runtime environment).
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._programs: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = environment(os.environ, given)

    def ready(self) -> None:
        """Answers when the actor is up."""

    def start(self, number: int, words: Sequence[str], directory: str | None) -> str:
        """Start a program as `number`, in a directory (None: that of Ray's worker); why it cannot be, or ""."""
        if directory is not None and not os.path.isdir(directory):
            return f"cd: {directory}: there is no such directory on this node"
        try:
            self._programs[number] = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        return ""

    def read(self, number: int, error: bool) -> bytes:
        """Wait for bytes of its stdout or stderr; b"" at the end."""
        program = self._programs[number]
        stream = program.stderr if error else program.stdout
        assert stream is not None
        data = os.read(stream.fileno(), CHUNK)
        if not data:
            stream.close()
        return data

    def write(self, number: int, data: bytes) -> bool:
        """Give bytes to its stdin; b"" closes it. Whether it still reads."""
        stream = self._programs[number].stdin
        assert stream is not None
        try:
            if data:
                stream.write(data)
                stream.flush()
                return True
        except OSError:
            pass
        with suppress(OSError):
            stream.close()
        return False

    def wait(self, number: int) -> int:
        """How it ended, when it has."""
        return self._programs[number].wait()

    def kill(self, number: int) -> None:
        """End it now."""
        program = self._programs.get(number)
        if program is not None:
            program.kill()


def environment(own: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """The variables of a program: those of the worker, without Ray's own and those that are for its workers.

    Args:
        own: of the worker.
        given: names that the user gave to the workers: these stay, also OMP_NUM_THREADS, which Ray sets otherwise.
    """
    dropped = {"OMP_NUM_THREADS", *OF_WORKERS} - {*given}
    return {name: value for name, value in own.items() if not name.startswith("RAY_") and name not in dropped}
