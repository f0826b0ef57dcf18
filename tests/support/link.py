"""A link between an HTTP client and a server, in threads of this process, that is as bad as a test wants it to be."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

CHUNK = 16384
UNAVAILABLE = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>test</Message></Error>"
CHANGES = (b"PUT", b"POST", b"DELETE")
REASONS = {429: b"TooManyRequests", 500: b"InternalError", 503: b"SlowDown"}


@dataclass(frozen=True)
class Request:
    """A request that came."""

    method: str
    path: str
    range: str
    """What its header Range says, such as bytes=0-99; "" without."""


class Link:
    """A proxy for plain HTTP. Attributes may be changed while it runs, and count from the next request on.

    Attributes:
        delay_s: seconds that each request, and each connection, takes longer: the round trip.
        rate: bytes a second of all bodies together; 0 for any.
        down: connections are refused, and those that are there are cut.
        status: each request is answered by this status, and not passed on; 0 for none.
        body: of these answers; b"" for what S3 says.
        keep: the rights to the bucket lack deletion, which is answered by 403.
        cut: each body of an answer ends after so many bytes, and its connection; None for no cut.
        lose: the answers to requests of this method are lost, after the server has done them; "" for none.
        trickle: bodies of answers come by one byte in so many seconds; 0 for no trickle.
        obey: If-Match and If-None-Match of a PUT are obeyed, for a server that does not look at them: objects that went
            through this link are known.
        requests: those that came.
        body_bytes: bytes of bodies that went to the client.
    """

    def __init__(
        self, target: tuple[str, int], *, delay_s: float = 0.0, rate: float = 0.0, port: int = 0, obey: bool = False
    ) -> None:  # fmt: skip
        self.target = target
        self.delay_s = delay_s
        self.rate = rate
        self.status = 0
        self.body = b""
        self.keep = False
        self.cut: int | None = None
        self.lose = ""
        self.trickle = 0.0
        self.obey = obey
        self.requests: list[Request] = []
        self.body_bytes = 0
        self._down = False
        self._lock = threading.Lock()
        self._etags: dict[bytes, bytes] = {}
        self._conditional = threading.Lock()
        self._free_at = 0.0
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = port

    @property
    def endpoint(self) -> str:
        """What a client names as its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, value: bool) -> None:
        if value and not self._down:
            self._down = True
            self._close()
        elif not value and self._down:
            self._down = False
            self._listen()

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._down = True
        self._close()

    def _listen(self) -> None:
        self._listener = listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _close(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
            listener, self._listener = self._listener, None
        for one in [*sockets, *([listener] if listener else [])]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        try:
            server = socket.create_connection(self.target, 10)
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            time.sleep(self.delay_s)
            with client.makefile("rb") as asked, server.makefile("rb") as answered:
                while not self._down and self._exchange(client, server, asked, answered):
                    pass
        except (OSError, ValueError):
            pass
        finally:
            for one in (client, server):
                if one is not None:
                    with self._lock:
                        self._sockets.discard(one)
                    one.close()

    def _exchange(self, client: socket.socket, server: socket.socket, asked: BinaryIO, answered: BinaryIO) -> bool:
        """One request and its answer; whether the connection is good for another one."""
        head = _head(asked)
        if not head:
            return False
        method, path = head.split(b" ", 2)[:2]
        span = _field(head, b"range")
        with self._lock:
            self.requests.append(Request(method.decode(), path.decode(), span.decode()))
        body = b"".join(_body(asked, head))
        time.sleep(self.delay_s)
        is_deletion = method == b"DELETE" or (method == b"POST" and path.partition(b"?")[2].startswith(b"delete"))
        if status := self.status or (403 if self.keep and is_deletion else 0):
            text = self.body or UNAVAILABLE % REASONS.get(status, b"Test")
            lines = b"HTTP/1.1 %d Test\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(text))
            client.sendall(lines + (b"" if method == b"HEAD" else text))
            return False
        self._wait(len(body))
        with self._conditional if self.obey and method in CHANGES else contextlib.nullcontext():
            if self.obey and (refusal := self._refusal(method, path, head)):
                client.sendall(refusal)
                return True
            server.sendall(head + body)
            answer = _head(answered)
            self._note(method, path, body, answer)
        if not answer or self.lose == method.decode():
            return False
        client.sendall(answer)
        left = self.cut
        if method != b"HEAD" and answer.split(b" ", 2)[1] not in (b"204", b"304"):
            for piece in _body(answered, answer):
                self._wait(len(piece))
                if left is not None and len(piece) >= left:
                    client.sendall(piece[:left])
                    return False
                left = None if left is None else left - len(piece)
                self._send(client, piece)
        return _field(answer, b"connection").lower() != b"close"

    def _refusal(self, method: bytes, path: bytes, head: bytes) -> bytes:
        """The answer to a PUT whose condition does not hold, as S3 gives it; b"" where it does."""
        known, wanted, absent = self._etags.get(path), _field(head, b"if-match"), _field(head, b"if-none-match")
        if method != b"PUT" or not ((absent and known) or (wanted and known != wanted)):
            return b""
        code = b"PreconditionFailed" if known else b"NoSuchKey"
        text = UNAVAILABLE % code
        return b"HTTP/1.1 %d Test\r\nContent-Length: %d\r\n\r\n%s" % (412 if known else 404, len(text), text)

    def _note(self, method: bytes, path: bytes, body: bytes, answer: bytes) -> None:
        """What an answer says of the object at a path."""
        status, etag = answer[9:12], _field(answer, b"etag")
        if method == b"POST" and path.partition(b"?")[2].startswith(b"delete"):
            for key in re.findall(rb"<Key>(.*?)</Key>", body):
                self._etags.pop(path.partition(b"?")[0].rstrip(b"/") + b"/" + key, None)
        elif status == b"404" or (method == b"DELETE" and status[:1] == b"2"):
            self._etags.pop(path, None)
        elif status[:1] == b"2" and etag:
            self._etags[path] = etag

    def _send(self, client: socket.socket, piece: bytes) -> None:
        with self._lock:
            self.body_bytes += len(piece)
        if not self.trickle:
            client.sendall(piece)
            return
        for i in range(len(piece)):
            client.sendall(piece[i : i + 1])
            time.sleep(self.trickle)

    def _wait(self, count: int) -> None:
        """Until so many bytes are through."""
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.rate
            wait = self._free_at - now
        time.sleep(max(0.0, wait))


def _head(stream: BinaryIO) -> bytes:
    """The first line and the fields of a request or an answer, with the empty line; b"" at the end."""
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _field(head: bytes, name: bytes) -> bytes:
    match = re.search(rb"\r\n" + name + rb":[ \t]*([^\r]*)\r\n", head, re.IGNORECASE)
    return match[1] if match else b""


def _body(stream: BinaryIO, head: bytes) -> Iterator[bytes]:
    """The pieces of a body as they are on the wire."""
    if _field(head, b"transfer-encoding").lower() == b"chunked":
        while size := stream.readline():
            count = int(size.split(b";")[0], 16)
            yield size + stream.read(count + 2)
            if not count:
                return
        return
    left = int(_field(head, b"content-length") or 0)
    while left:
        piece = stream.read(min(CHUNK, left))
        if not piece:
            raise OSError("the body ended")
        left -= len(piece)
        yield piece
