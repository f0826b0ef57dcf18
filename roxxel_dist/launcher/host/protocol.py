"""The messages of the controller and a program on a host: one JSON object a line, over its stdin and stdout.

The first order to a program has a `nonce`, and each of its messages begins with that and `PROTOCOL` (`n`).
Before the start: questions of preflight with `ask`, each with an answer, see `host.probe`
To the agent:  warm (command, ranks, key, spares: for a host that is to join) ·
               start (command, ranks: [{rank, env}], total, key, spares, lease) · stop (grace) · kill (after) · dump ·
               alive (at) · first (port: where the first host is asked about leases) · leave
From the agent: warm (why: no rank can run here; empty where spares are ready, or there are none) · first (port) ·
                started (rank, pid) · lines (rank, time, text) · status (rank, record) ·
                progress (records: [[rank, *record]], those that changed; echo: `at` of the newest heartbeat; every half
                second, also where none did) · note (text, for people) ·
                code (files: [[rank, module, path, checksum]], each content of a module once) ·
                dumped (ranks: [[rank, state, listens]], suspects: variables that may part them) ·
                exit (rank, pid, code, killed_by_us, step) · done · saved (step) ·
                signal (number: a system asks this host to end; told within an attempt alone)
From its guard: gone (code, when the agent has ended, and all that it had started; a client may have another code)
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from roxxel_dist.process.exit_codes import UserError

Message = dict[str, Any]
NONCE = "nonce"
"""A key in the first order of a link: its program begins each message with these letters, which no other one has."""
PROTOCOL = 2
"""The number of these messages, behind the nonce in each of the program's. A change that the other end cannot read
raises it."""
LIMITS = "limits"
"""There too: the time limits of the job."""


def mark(nonce: str) -> str:
    """The bytes with which the messages of a program begin, of which the first order had a nonce."""
    return f"{nonce}.{PROTOCOL}" if nonce else ""


def encode(message: Message, nonce: str = "") -> bytes:
    """One line of ASCII; what an argument holds that is not Unicode survives as an escaped surrogate."""
    if nonce:
        message = {"n": mark(nonce), **message}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Puts messages together from the pieces in which they arrive.

    Args:
        nonce: of a program on a host, whose messages begin with its `mark`. All else is left out, before, between and
            beside them: start-up files of a shell and clients print, JSON too.
    """

    def __init__(self, nonce: str = "") -> None:
        self._rest: list[bytes] = []
        self._begin = f'{{"n":"{mark(nonce)}"'.encode() if nonce else b""
        self._any_begin = f'{{"n":"{nonce}'.encode()
        self._order = f'"{NONCE}":"{nonce}"'.encode()
        self._is_first = True
        self._cut = b""  # a message without its end: its program was killed, if what comes next is its guard's word
        self.noise: str = ""
        """The last line that was left out."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes. Raises ValueError for a line that is no JSON object, or is damaged, but
        for one in which the program was killed."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest.append(rest)
            return
        block = b"".join([*self._rest, head])
        self._rest = [rest]
        for line in block.split(b"\n"):
            if not line:
                continue
            start = line.find(self._begin)
            if self._begin and start < 0:
                self._leave_out(line)
                continue
            message = _parse(line[start:] if self._begin else line)
            if message is None and self._begin and not (self._is_first or self._cut):
                self._cut = line
                continue
            if message is None or (self._cut and message.get("type") != "gone"):
                raise self._damage(self._cut or line)
            if self._begin:
                del message["n"]
                self._refuse_terminal(line)
            self._is_first = False
            self._cut = b""
            yield message
        if self._cut and not rest:  # its guard speaks with the end of that line
            raise self._damage(self._cut)

    def _damage(self, line: bytes) -> UserError:
        return UserError(f"{line[:80].decode(errors='replace')!r} is no message of roxxel-dist")

    def _leave_out(self, line: bytes) -> None:
        """Take note of a line that is no message. Raises ValueError for an order that comes back."""
        if self._is_first and self._order in line:
            self._refuse_terminal(line)
            last = f" (its last line: {self.noise[:80]})" if self.noise else ""
            raise UserError(f"it sends back what it is sent{last}: no program runs there")
        if self._is_first and self._any_begin in line:
            raise UserError(
                f"the roxxel-dist there is of another version (its messages are not of protocol {PROTOCOL}): install "
                f"the same on all hosts"
            )
        self.noise = line.decode(errors="replace").strip() or self.noise

    def _refuse_terminal(self, line: bytes) -> None:
        if self._is_first and line.endswith(b"\r"):
            raise UserError("lines come back with CR LF: a terminal is in between; start it without one (no -t)")

    def read(self, fd: int) -> list[Message]:
        """Wait for messages from a descriptor; none at its end."""
        while data := os.read(fd, 1 << 16):
            if messages := list(self.feed(data)):
                return messages
        return []


_json = json.JSONDecoder()


def _parse(line: bytes) -> Message | None:
    """The object with which a line begins; clients may print something behind it."""
    try:
        message, _ = _json.raw_decode(line.decode())
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def take_stdout() -> int:
    """A descriptor for this program's messages; what prints to stdout from here on prints to stderr."""
    channel = os.dup(1)  # no child inherits it
    os.dup2(2, 1)
    return channel


class Outbox:
    """Messages on their way out through a descriptor, without ever waiting for the reader.

    `nonce`: as the reader expects it.
    """

    def __init__(self, fd: int, nonce: str = "") -> None:
        self.fd = fd
        self._nonce = nonce
        self._bytes = bytearray()
        os.set_blocking(fd, False)

    def __len__(self) -> int:
        return len(self._bytes)

    def send(self, message: Message) -> None:
        """Queue a message; `flush` moves it."""
        self._bytes += encode(message, self._nonce)

    def flush(self) -> None:
        """Write as much as the reader has room for. If the reader is gone, drop everything."""
        try:
            while self._bytes:
                del self._bytes[: os.write(self.fd, memoryview(self._bytes)[: 1 << 16].tobytes())]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._bytes.clear()
