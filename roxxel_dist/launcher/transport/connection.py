"""The controller's end of one agent."""

import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from roxxel_dist.launcher.backends.base import Backend, RemoteProcess
from roxxel_dist.launcher.output.logs import LineSplitter
from roxxel_dist.launcher.transport.protocol import Decoder, Message, Outbox

AGENT_END_S = 10.0
HEARTBEAT_S = 0.5
"""How often a controller and its agents let each other hear that they live."""
WORDS = 20
"""Lines of an agent's stderr that are kept, to tell why it ended."""


def agent_words(backend: Backend) -> tuple[str, ...]:
    """The module of the agent and its arguments, for `Backend.start`."""
    timeout = () if backend.heartbeat_timeout_s is None else (f"{backend.heartbeat_timeout_s:g}",)
    return ("roxxel_dist.launcher.host.agent", *timeout)


@dataclass(eq=False, kw_only=True)
class HostConnection:
    """The controller's end of one agent."""

    host: str
    ranks: list[int]
    process: RemoteProcess
    heard: float = field(default_factory=time.monotonic)
    """When the agent said something last, by the launcher's clock."""
    ready: bool = False
    """Whether it has said anything."""
    done: bool = False
    said: deque[str] = field(default_factory=lambda: deque(maxlen=WORDS))
    """The last lines of its stderr: those of ssh, or of an agent that could not start."""
    decoder: Decoder = field(default_factory=Decoder)
    _lines: LineSplitter = field(default_factory=LineSplitter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        assert self.process.stdin is not None
        self._outbox = Outbox(self.process.stdin.fileno())

    @property
    def fd(self) -> int:
        """Where its messages come from."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def error_fd(self) -> int:
        """Where its stderr comes from."""
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    @property
    def order_fd(self) -> int:
        """Where its orders go to."""
        return self._outbox.fd

    @property
    def waiting(self) -> bool:
        """Whether there are orders for which the pipe has had no room."""
        return len(self._outbox) > 0

    def send(self, message: Message) -> None:
        """Give an order, without waiting for anybody; an agent that is gone needs none."""
        with self._lock:
            self._outbox.send(message)
            self._outbox.flush()

    def flush(self) -> None:
        """Go on with what waits."""
        with self._lock:
            self._outbox.flush()

    def errors(self, data: bytes) -> list[str]:
        """The lines that this piece of its stderr completes (its end: `b""`)."""
        lines = [line for line in (self._lines.feed(data) if data else self._lines.close()) if line.strip()]
        self.said.extend(lines)
        return lines

    def hang_up(self) -> None:
        """Let the agent know that there will be no more orders: it ends, and what ranks it has."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> int:
        """Wait for the agent's end, and say how it ended."""
        self.hang_up()
        process = self.process
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        try:
            return process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stderr.close()


class Heartbeat:
    """Tells agents, from a thread, that their controller lives: its loop may have to wait, for a disk for instance."""

    def __init__(self, links: Sequence[HostConnection]) -> None:
        self._links = list(links)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            for link in self._links:
                if not link.done and not link.waiting:
                    link.send({"type": "alive"})

    def end(self) -> None:
        """Say nothing any more."""
        self._end.set()
        self._thread.join()
