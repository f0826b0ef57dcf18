"""Commands and scripts that begin at once: a process that has imported jax and the package forks one for each.

Most of what a small command costs is the start of Python and the imports of jax, two to four seconds of a core. What is
forked is a process like any other, with devices, signals, variables and an exit of its own: no device of jax is there
before the fork. In the fork `python -m roxxel_dist`, or the script, begins, whose modules are there.

The processes of one run of pytest share a server. Each holds a connection to it, and it ends with the last of these; a
connection that is closed ends the fork that was asked for there.
"""

import atexit
import errno
import gc
import hashlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from one_process import COMMANDS

IMPORTS = ("jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "roxxel_dist.cli", "roxxel_dist.run.experiment")
AT_IMPORT = ("JAX", "XLA", "PJRT", "PYTHON", "LD_", "OMP", "TF_", "PATH", "HOME", "VIRTUAL_ENV", "TESTS_OF")
"""How the names of variables begin that are read while Python starts and jax is imported, and the mark of the run."""
IN_FORKS = {"JAX_NUM_CPU_DEVICES": int, "JAX_COMPILATION_CACHE_DIR": str}
"""Those of them that a fork sets for itself: nothing was made or compiled yet."""
Done = subprocess.CompletedProcess[str]
Variables = tuple[tuple[str, str], ...]
HELD: dict[Variables, socket.socket] = {}
"""The connections that keep servers alive, by the variables of these."""
LOCK = threading.Lock()
MOST_BYTES = 150_000
"""Of a request, which is one message."""


class Fork:
    """A process that was forked, as a `Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(99))

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        self._connection.settimeout(timeout)
        try:
            code = int(self._connection.recv(99))
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout) from None
        self._connection.close()
        return code

    def kill(self) -> None:
        """End it; `wait` comes behind."""
        os.kill(self.pid, signal.SIGKILL)


def begin(given: dict[str, Any], cwd: Path, env: Mapping[str, str], streams: Sequence[IO[Any]]) -> Fork:
    """A fork with these variables, this folder, and its stdout and stderr."""
    names = (name for name in sorted(env) if name.startswith(AT_IMPORT) and name not in IN_FORKS)
    key = tuple((name, env[name]) for name in names)
    with LOCK:
        if key not in HELD:
            HELD[key] = connect(key)
            atexit.register(HELD[key].close)
    connection = connect(key)
    message = json.dumps(given | {"cwd": str(cwd), "env": dict(env)}).encode()
    socket.send_fds(connection, [message], [stream.fileno() for stream in streams])
    return Fork(connection)


def start(source: str, words: Sequence[object], cwd: Path, env: Mapping[str, str], streams: Sequence[IO[Any]]) -> Fork:
    """Begin `python -c SOURCE WORDS`."""
    return begin({"source": source, "words": [*map(str, words)]}, cwd, env, streams)


def can_run(words: Sequence[object]) -> bool:
    """Whether `roxxel-dist WORDS` starts no processes, so that it may be a fork."""
    return words[0] in COMMANDS


def run(words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float = 240, source: str = "") -> Done:
    """As `subprocess.run` of `python -m roxxel_dist WORDS`, with text and both streams captured; or of a script."""
    given = {"words": words} | ({"source": source} if source else {})
    with TemporaryFile() as said, TemporaryFile() as warned:
        fork = begin(given, cwd, env, (said, warned))
        try:
            code = fork.wait(timeout)
        except BaseException:
            fork.kill()
            fork.wait()
            raise
        texts = []
        for stream in (said, warned):
            stream.seek(0)
            texts.append(stream.read().decode())
    return Done(words, code, *texts)


def connect(key: Variables) -> socket.socket:
    """A connection to the server that has these variables. Who can take its name, as one process can, starts it."""
    name = "\0roxxel-dist-tests-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()
    while True:
        connection, is_ours = of_unix(), True
        try:
            with of_unix() as listening:
                try:
                    listening.bind(name)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    is_ours = False
                    connection.connect(name)
                else:
                    listening.listen(100)
                    connection.connect(name)  # before there is a server: it ends without a connection
                    launch(listening, key)
            if connection.recv(1):
                return connection
        except (ConnectionRefusedError, ConnectionResetError):
            pass  # it does not listen yet, or just ends
        except BaseException:
            connection.close()
            raise
        connection.close()
        if is_ours:
            raise RuntimeError("the process that forks ended at its start")
        time.sleep(0.01)


def of_unix() -> socket.socket:
    """A socket of whole messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def launch(listening: socket.socket, key: Variables) -> None:
    """Start a server."""
    words, null = [sys.executable, __file__, str(listening.fileno())], subprocess.DEVNULL
    started = subprocess.Popen(words, env=dict(key), stdin=null, stdout=null, pass_fds=[listening.fileno()])
    started.returncode = 0  # it may outlive this process


class Server:
    """Forks for each request, and says the number of the fork and its exit code."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.watched = selectors.PollSelector()
        """The socket for new connections, these, and a descriptor of each fork."""
        self.forks: dict[socket.socket, int] = {}
        """The numbers of the processes by their connections."""

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """In a fork it returns what was asked for, and the streams; in the end None."""
        self.watched.register(self.listening, selectors.EVENT_READ)
        self.accept()
        while len(self.watched.get_map()) > 1:
            for key, _ in self.watched.select():
                if key.fileobj is self.listening:
                    self.accept()
                elif key.data is not None:
                    self.tell_end(key.fd, key.data)
                elif (asked := self.hear(key.fileobj)) is not None:
                    return asked
        return None

    def accept(self) -> None:
        """A new connection, of this user: everybody can see the name of the socket."""
        connection, _ = self.listening.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            self.watched.register(connection, selectors.EVENT_READ)
            connection.send(b"+")
        else:
            connection.close()

    def hear(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        """A request, or the end of a connection and of its fork."""
        message, streams, *_ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not message:
            if connection in self.forks:
                os.kill(self.forks[connection], signal.SIGKILL)
            self.watched.unregister(connection)
            connection.close()
            return None
        with warnings.catch_warnings(action="ignore"):  # of jax, whose threads do not run yet
            pid = os.fork()
        if pid == 0:
            for key in self.watched.get_map().values():
                os.close(key.fd) if key.data is not None else key.fileobj.close()
            return json.loads(message), streams
        for stream in streams:
            os.close(stream)
        self.forks[connection] = pid
        self.watched.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
        connection.send(str(pid).encode())
        return None

    def tell_end(self, descriptor: int, connection: socket.socket) -> None:
        """The exit code of a fork to the one that asked, where he is still there."""
        self.watched.unregister(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(self.forks.pop(connection), 0)[1])
        with suppress(OSError):
            connection.send(str(code).encode())


def become(given: dict[str, Any], streams: list[int]) -> None:
    """Be the command or the script: its variables, folder and streams."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(given["env"])
    for name, kind in IN_FORKS.items():
        if name in os.environ:
            sys.modules["jax"].config.update(name.lower(), kind(os.environ[name]))
    os.chdir(given["cwd"])
    sys.path[0] = given["cwd"]
    if "source" in given:
        sys.argv = ["-c", *given["words"]]
        exec(given["source"], {"__name__": "__main__"})
    else:
        sys.argv = ["roxxel-dist", *given["words"]]
        runpy.run_module("roxxel_dist", run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve on the socket that is inherited, and be a command or a script in each fork."""
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is there stays shared
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        asked = Server(listening).serve()
    if asked is not None:
        become(*asked)


if __name__ == "__main__":
    main()
