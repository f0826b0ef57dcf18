"""What runs inside the Ray actor of a node: it starts programs there, and carries their bytes.

The class travels to the node as source of its own (`ray_cluster.actor`), so that Ray's workers need no
roxxel_dist: this file imports the standard library alone. Each method may wait; the actor has threads for it.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

CHUNK = 1 << 16
"""Answers below 100 KB travel with the answer itself, not through Ray's object store."""
ADDED = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Set by Ray for its own workers: one thread a task, a debugger of its own."""
ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
"""Set by Ray, to nothing where a worker asked for no accelerator."""
SESSION = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Of whoever typed `ray start`: no address by which the other nodes come."""


class RayNode:
    """Runs programs on its node. When its process ends they read the end of their stdin.

    Args:
        given: variables that the user gave to Ray's workers (`env_vars` of a runtime environment).
        dealt: whether Ray has dealt GPUs to this actor.
    """

    def __init__(self, given: Sequence[str] = (), dealt: bool = False) -> None:
        self._programs: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = environment(os.environ, of_node(), given, dealt)

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


def environment(own: Mapping[str, str], node: Mapping[str, str], given: Sequence[str], dealt: bool) -> dict[str, str]:
    """The variables of a program: those of the worker, without what Ray tells its workers by them.

    Args:
        own: of the worker.
        node: of Ray's daemon on the node, before it made a worker's of them.
        given: names that the user gave to the workers: these stay.
        dealt: whether Ray has dealt GPUs; its list of them stays then.
    """
    kept = {name: value for name, value in own.items() if not name.startswith("RAY_") and name not in SESSION}
    for name in (*ADDED, *(() if dealt else ACCELERATORS)):
        if name in given:
            continue
        kept.pop(name, None)
        if name in node and name != "SPT_NOENV":
            kept[name] = node[name]
    return kept


def of_node() -> dict[str, str]:
    """The variables with which Ray was started on this node; none where they cannot be read."""
    try:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ", encoding="utf-8", errors="surrogateescape") as file:
            pairs = (line.partition("=") for line in file.read().split("\0"))
            return {name: value for name, equals, value in pairs if equals}
    except (OSError, KeyError):
        return {}
