"""The controller's end of one program on a host: its orders, its messages, the end of its stderr."""

import os
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from roxxel_dist.launcher.host.protocol import Decoder, Message, Outbox
from roxxel_dist.launcher.job.backend import Backend, RemoteProcess
from roxxel_dist.launcher.output.logs import LineSplitter

CHUNK = 1 << 20
AGENT_END_S = 10.0
HEARTBEAT_S = 0.5
"""Seconds between the heartbeats that a controller sends its agents."""
STDERR_LINES = 100
"""Of a program's stderr so many lines are kept, to show why it ended."""


def agent_words(backend: Backend) -> tuple[str, ...]:
    """The module of the agent and its arguments, for `Backend.start`."""
    timeout = () if backend.heartbeat_timeout_s is None else (f"{backend.heartbeat_timeout_s:g}",)
    return ("roxxel_dist.launcher.host.agent", *timeout)


@dataclass(eq=False, kw_only=True)
class HostConnection:
    """The controller's end of one program on a host."""

    host: str
    process: RemoteProcess
    ranks: list[int] = field(default_factory=list)
    last_seen: float = field(default_factory=time.monotonic)
    """When the last message of the program came, by the launcher's clock."""
    echoed: float = 0.0
    """When the newest heartbeat was sent that the program has acknowledged, by the launcher's clock."""
    leased: bool = False
    """Whether its ranks may have a lease: for some time no host is known to have received from the launcher."""
    ready: bool = False
    """Whether any message has come."""
    done: bool = False
    """Whether nothing more is expected from it in this attempt: its work has ended, or it is lost."""
    lost: bool = False
    """Whether no message is expected from it any more."""
    started: bool = False
    """Whether it got the order to start ranks: from then on it ends if it receives nothing."""
    question: int = 0
    """The number of the last question sent to it."""
    decoder: Decoder = field(default_factory=lambda: Decoder(after_noise=True))
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))
    """The last lines of its stderr: those of ssh, or of a program that could not start."""

    def __post_init__(self) -> None:
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._streams = (stdin, stdout, stderr)
        self.order_fd: int = stdin.fileno()
        self.fd: int = stdout.fileno()
        self.error_fd: int = stderr.fileno()
        self._outbox = Outbox(self.order_fd)
        self._lines = LineSplitter()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether there are orders for which the pipe has had no room."""
        return len(self._outbox) > 0

    def send(self, *messages: Message) -> None:
        """Give orders, and go on with those that wait, without waiting for the program; one that is gone needs none."""
        with self._lock:
            if self._streams[0].closed:
                return
            for message in messages:
                self._outbox.send(message)
            self._outbox.flush()

    def errors(self, data: bytes) -> list[str]:
        """The lines that this piece of its stderr completes (its end: `b""`)."""
        lines = [line for line in (self._lines.feed(data) if data else self._lines.close()) if line.strip()]
        self.stderr.extend(lines)
        return lines

    def wait(self, limit_s: float) -> int | None:
        """How the program ended, and its stderr up to there; None where it has not within the limit, and is killed."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        os.set_blocking(self.error_fd, False)  # another process may hold the other end for long
        with suppress(BlockingIOError):
            while data := os.read(self.error_fd, CHUNK):
                self.errors(data)
        self.errors(b"")
        return code

    def hang_up(self) -> None:
        """Close the stream of orders: the program ends, an agent together with its ranks."""
        with self._lock, suppress(BrokenPipeError):
            self._streams[0].close()

    def close(self, limit_s: float) -> None:
        """Wait for the end of a program that was hung up on; at the limit it is killed."""
        self._streams[1].close()
        if self.wait(limit_s) is None:
            self.process.wait()
        self._streams[2].close()
