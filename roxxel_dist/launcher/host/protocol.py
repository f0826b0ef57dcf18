"""The messages of the controller and a program on a host: one JSON object a line, over its stdin and stdout.

Before the start: questions of preflight with `ask`, each with an answer, see `preflight.probe`
To the agent:  warm (command, ranks, key, spares: for a host that is to join) ·
               start (command, ranks: [{rank, env}], total, key, spares, lease) · stop (grace) · kill (after) · dump ·
               alive (at) · first (port: where the first host is asked about leases) · leave
From the agent: warm (why: no rank can run here; empty where spares are ready, or there are none) · first (port) ·
                started (rank, pid) · lines (rank, time, text) · status (rank, record) ·
                progress (records: [[rank, record]], those that changed; usage: [[rank, usage]], of the same moment;
                echo: `at` of the newest heartbeat; every half second, also where none did) · note (text, for people) ·
                code (files: [[rank, module, path, checksum]], each content of a module once) ·
                dumped (ranks: [[rank, state, listens]]) · exit (rank, pid, code, killed_by_us, step) · done
From its guard: gone (code, when the agent has ended, and all that it had started; a client may have another code)
"""

import json
import os
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError

Message = dict[str, Any]
FIRST = frozenset({"id", "type", "entry", "code"})
"""A program's first message has one of these: an answer, a message of an agent, or that of a detached controller."""


def encode(message: Message) -> bytes:
    """One line of ASCII; what an argument holds that is not Unicode survives as an escaped surrogate."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Puts messages together from the pieces in which they arrive.

    Args:
        after_noise: what stands before the first message is left out: start-up files of a shell may print.
    """

    def __init__(self, *, after_noise: bool = False) -> None:
        self._rest: list[bytes] = []
        self._after_noise = after_noise
        self.noise: str = ""
        """The last line that was left out."""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises ValueError for a line that is no JSON object."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest.append(rest)
            return []
        block = b"".join([*self._rest, head])
        self._rest = [rest]
        messages = []
        for line in block.split(b"\n"):
            if not line:
                continue
            message = _parse(line[max(line.find(b'{"'), 0) :] if self._after_noise else line)
            if message is not None and (not self._after_noise or message.keys() & FIRST):
                if self._after_noise and line.endswith(b"\r"):
                    raise UserError(
                        "lines come back with CR LF: a terminal is in between; start it without one (no -t)"
                    )
                self._after_noise = False
                messages.append(message)
            elif self._after_noise:
                self.noise = line.decode(errors="replace").strip() or self.noise
            else:
                raise UserError(f"{line[:80].decode(errors='replace')!r} is no message of roxxel-dist")
        return messages

    def read(self, fd: int) -> list[Message]:
        """Wait for messages from a descriptor; none at its end."""
        while data := os.read(fd, 1 << 16):
            if messages := self.feed(data):
                return messages
        return []


def _parse(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def take_stdout() -> int:
    """A descriptor for this program's messages; what prints to stdout from here on prints to stderr."""
    channel = os.dup(1)  # no child inherits it
    os.dup2(2, 1)
    return channel


class Outbox:
    """Messages on their way out through a descriptor, without ever waiting for the reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._bytes = bytearray()
        os.set_blocking(fd, False)

    def __len__(self) -> int:
        return len(self._bytes)

    def send(self, message: Message) -> None:
        """Queue a message; `flush` moves it."""
        self._bytes += encode(message)

    def flush(self) -> None:
        """Write as much as the reader has room for. If the reader is gone, drop everything."""
        try:
            while self._bytes:
                del self._bytes[: os.write(self.fd, memoryview(self._bytes)[: 1 << 16].tobytes())]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._bytes.clear()
