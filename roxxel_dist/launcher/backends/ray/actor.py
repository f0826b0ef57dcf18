"""What runs inside the Ray actor of a node: it starts programs there, and carries their bytes.

The class travels to the node as source of its own (`backend._make_actor`), so that Ray's workers need no
roxxel_dist: this file imports the standard library and Ray alone. Each method may wait; the actor has threads for it.
"""

import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

CHUNK = 48_000
"""Bytes of each stream in an answer: below 100 KB an answer needs no place in Ray's object store."""
OF_WORKERS = ("PYTHONBREAKPOINT", "SPT_NOENV", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Variables for Ray's own workers: its debugger, its process names, and the SSH session that typed `ray start`."""


class RayNode:
    """Runs programs on its node. When its process ends they read the end of their stdin.

    Args:
        given: variables that the user gave to Ray's workers (`env_vars` of a runtime environment).
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._programs: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = environment(os.environ, given)

    def ready(self) -> str:
        """The address of its node, when the actor is up."""
        import ray.util

        return ray.util.get_node_ip_address()

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

    def read(self, number: int) -> tuple[bytes, bytes, int | None]:
        """Wait for bytes of its stdout or stderr: (stdout, stderr, None); at the end of its stdout its exit code."""
        program = self._programs[number]
        assert program.stdout is not None
        assert program.stderr is not None
        while True:
            is_over = program.stdout.closed  # stderr may still have its last words
            pieces = [b"", b""]
            poll = select.poll()  # select() knows no descriptor above 1,023
            streams = [stream for stream in (program.stdout, program.stderr) if not stream.closed]
            for stream in streams:
                poll.register(stream, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(0 if is_over else None)}
            for stream in streams:
                if stream.fileno() in ready:
                    data = os.read(stream.fileno(), CHUNK)
                    pieces[stream is program.stderr] = data
                    if not data:
                        stream.close()
            if any(pieces):
                return pieces[0], pieces[1], None
            if is_over:
                return b"", b"", program.wait()

    def write(self, number: int, data: bytes) -> bool:
        """Give bytes to its stdin; b"" closes it. Whether it still reads."""
        stream = self._programs[number].stdin
        assert stream is not None
        with suppress(OSError):
            if data:
                stream.write(data)
                stream.flush()
                return True
        with suppress(OSError):
            stream.close()
        return False

    def kill(self, number: int) -> None:
        """End it now."""
        if program := self._programs.get(number):
            program.kill()


def environment(own: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """The variables of a program: those of the worker, without Ray's own and those that are for its workers.

    Args:
        own: of the worker.
        given: names that the user gave to the workers: these stay, also OMP_NUM_THREADS, which Ray sets otherwise.
    """
    dropped = {"OMP_NUM_THREADS", *OF_WORKERS} - {*given}
    return {name: value for name, value in own.items() if not name.startswith("RAY_") and name not in dropped}
