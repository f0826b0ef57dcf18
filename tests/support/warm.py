"""Commands that begin at once: a process that has imported jax and the package forks one for each.

Most of what a small command costs is the start of Python and the imports of jax, two to four seconds of a core. What is
forked is a process like any other, with devices, signals, variables and an exit of its own: no device of jax is there
before the fork. In the fork `python -m roxxel_dist` begins, whose modules are there.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from one_process import COMMANDS

IMPORTS = ("jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "roxxel_dist.cli", "roxxel_dist.run.experiment")
AT_IMPORT = ("JAX", "XLA", "PJRT", "PYTHON", "LD_", "OMP", "TF_", "PATH", "HOME", "VIRTUAL_ENV", "TESTS_OF")
"""How the names of variables begin that are read while Python starts and jax is imported."""
DEVICES = "JAX_NUM_CPU_DEVICES"
"""The one of them that a fork sets for itself: its devices are not made yet."""
Done = subprocess.CompletedProcess[str]
SERVERS: dict[tuple[tuple[str, str], ...], "Warm"] = {}
"""By these variables."""


class Warm:
    """A process that forks commands, one after the other; it ends with this one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], env=dict(env), text=True, **pipes)
        self.lock = threading.Lock()
        atexit.register(self.end)

    def run(self, words: list[str], cwd: Path, env: Mapping[str, str], timeout: float) -> Done:
        """As `subprocess.run` of `python -m roxxel_dist WORDS`, with text and both streams captured."""
        with self.lock, TemporaryFile() as said, TemporaryFile() as warned:
            streams = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (said, warned)]
            given = {"words": words, "cwd": str(cwd), "env": dict(env), "streams": streams}
            try:
                print(json.dumps(given), file=self.process.stdin, flush=True)
                pid = int(self.process.stdout.readline())
                if not select.select([self.process.stdout], [], [], timeout)[0]:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(words, timeout)
                code = int(self.process.stdout.readline())
            except BaseException:  # its answer would be read by the next one
                self.end()
                raise
            texts = []
            for stream in (said, warned):
                stream.seek(0)
                texts.append(stream.read().decode())
        return Done(words, code, *texts)

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def can_run(words: Sequence[object]) -> bool:
    """Whether `roxxel-dist WORDS` starts no processes, so that it may be a fork."""
    return words[0] in COMMANDS


def run(words: list[str], cwd: Path, env: Mapping[str, str], timeout: float) -> Done:
    """Run `roxxel-dist WORDS` in a fork of the process that has these variables; one is begun where none is there."""
    key = tuple(sorted((name, value) for name, value in env.items() if name.startswith(AT_IMPORT) and name != DEVICES))
    if key not in SERVERS or SERVERS[key].process.poll() is not None:
        SERVERS[key] = Warm(dict(key))
    return SERVERS[key].run(words, cwd, env, timeout)


def serve() -> dict[str, Any] | None:
    """Fork for each line of stdin, and say the number of the fork and its exit code.

    In a fork it returns what was asked for, in the end None.
    """
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is there stays shared
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def become(given: dict[str, Any]) -> None:
    """Be the command: its variables, folder and streams."""
    for number, path in enumerate(given["streams"], 1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(given["env"])
    if DEVICES in os.environ:
        sys.modules["jax"].config.update(DEVICES.lower(), int(os.environ[DEVICES]))
    os.chdir(given["cwd"])
    sys.path[0] = given["cwd"]
    sys.argv = ["roxxel-dist", *given["words"]]
    runpy.run_module("roxxel_dist", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        become(asked)
