"""Servers with a token: the base of all, and that of the page, with the one reading for all who look. Read-only. A
request with another host name (DNS rebinding by a page of another site), without the right token, or for an unknown
path, gets a line of text without information."""

import contextlib
import getpass
import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, urlsplit

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.view.items import Item, is_behind, keep_readers, read
from roxxel_dist.view.run import SLICE_S
from roxxel_dist.view.web.page import page, policy
from roxxel_dist.view.web.sections import Sections, item_id, message, sections

REFRESH_S, LIST_S, NEW_S = 1.0, 2.0, 5.0
"""Seconds between readings of open items, of a list, and searches for new items."""
SHARE = 0.02
"""The largest share of a core for reading, if reading is slow; long logs are read first, `SLICE_S` a look."""
LONGEST_S = 60.0


@dataclass
class _Reading:
    """The last reading of some items."""

    due: float = 0.0
    items: dict[str, Sections] = field(default_factory=dict)


class Feed:
    """The items of a page. Thread-safe: one thread reads, and the others get its result. `find` finds the items, every
    `NEW_S` seconds, to detect new runs; it raises ValueError if there are none."""

    def __init__(self, find: Callable[[], Sequence[Item]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._items: dict[str, Item] = {}
        self._looked = float("-inf")
        self._readings: dict[tuple[str, ...], _Reading] = {}
        self._look()

    def read(self, wanted: tuple[str, ...] = ()) -> tuple[list[str], dict[str, Sections]]:
        """(the ids of all items in order, the full sections of the wanted items, or brief sections of all)."""
        with self._lock:
            self._look()
            reading = self._readings.setdefault(wanted, _Reading())
            if (now := time.monotonic()) >= reading.due:
                before = time.thread_time()
                reading.items, behind = self._sections(wanted, before + SLICE_S)
                pause, took = REFRESH_S if wanted else LIST_S, time.thread_time() - before
                pause = REFRESH_S if behind else max(pause, took / SHARE)
                reading.due = now + min(pause, LONGEST_S)
                self._readings = {key: old for key, old in self._readings.items() if now < old.due + LONGEST_S}
            return list(self._items), reading.items

    def _sections(self, wanted: tuple[str, ...], deadline: float) -> tuple[dict[str, Sections], bool]:
        """(the sections of items, whether logs of them are not read to their ends yet)."""
        brief, items, behind = not wanted, dict[str, Sections](), False
        for name in wanted or self._items:
            if item := self._items.get(name):
                try:
                    state = read(item, brief=brief, deadline=deadline)
                    items[name], behind = sections(state, brief=brief), behind or is_behind(state)
                except (OSError, ValueError):  # it is being deleted or created
                    self._looked = float("-inf")
        return items, behind

    def _look(self) -> None:
        """Update the list of items. Existing readers stay, because they keep what they have read."""
        if time.monotonic() < self._looked + NEW_S:
            return
        try:
            found = self._find()
        except OSError:  # a folder is being deleted or created: the items stay
            found = [*self._items.values()]
        except ValueError:
            if not self._items:
                raise
            found = []
        self._items = {item_id(*item.key): item for item in keep_readers(self._items.values(), found)}
        self._looked = time.monotonic()


class Changes:
    """The changes that one viewer has not received yet."""

    def __init__(self, feed: Feed, wanted: tuple[str, ...] = ()) -> None:
        self._feed, self._wanted = feed, wanted
        self._ids: list[str] = []
        self._sent: dict[str, Sections] = {}

    def next(self) -> str:
        """The message with the changed sections; empty if there are no changes."""
        ids, items = self._feed.read(self._wanted)
        new = dict[str, Sections]()
        for name, now in items.items():
            before = self._sent.get(name, {})
            if parts := {part: text for part, text in now.items() if before.get(part) != text}:
                new[name] = parts
        if not new and ids == self._ids:
            return ""
        self._ids, self._sent = ids, dict(items)
        return message(ids, new)


LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::", "")
MOST = 100
"""The most simultaneous connections: others are refused, so that threads and files never run out."""
REQUEST_S, WRITE_S = 5.0, 30.0
"""Seconds for a client to send its whole request, and for a browser to receive a message."""
LOOK_S, ALIVE_S = 0.25, 10.0
"""Seconds between checks for changes, and after which a line is always sent, to detect clients that have left."""
OPEN_AT_ONCE = 8
"""Most items in one stream."""
NO_TOKEN = "open the whole link that `roxxel-dist top --web` printed: its token is missing or old"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class TokenServer(ThreadingHTTPServer):
    """A server that answers requests that have its token until it is shut down. Port 0 is a free one, an empty token a
    new one. Raises ValueError where the address or the port is not available."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, handler: "type[TokenHandler]", host: str = LOOPBACK, port: int = 0, token: str = "") -> None:
        self.token: str = token or secrets.token_urlsafe(24)
        self.ended: threading.Event = threading.Event()
        self._asking: dict[Any, float] = {}
        self._slots = threading.BoundedSemaphore(MOST)
        self.address_family: int = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port is {port}: {host} cannot use it ({getattr(error, 'strerror', None) or error}): use 0 "
                "for a free one"
            ) from error
        self.port: int = self.server_address[1]
        host_names = (
            {socket.gethostname(), socket.getfqdn()} if host not in (LOOPBACK, "::1", "localhost") else set[str]()
        )
        self.names: set[str] = {
            name.lower() for name in {"localhost", LOOPBACK, "[::1]", host, f"[{host}]", *host_names}
        }

    @property
    def place(self) -> str:
        """The address of the server, as a browser takes it."""
        host = self.server_address[0] if self.server_address[0] not in ANY else socket.gethostname()
        shown = f"[{host}]" if ":" in str(host) else host
        return f"http://{shown}:{self.port}"

    @property
    def tunnel(self) -> str:
        """The command that forwards the port to another machine."""
        host = str(self.server_address[0])
        address = LOOPBACK if host in ANY else f"[{host}]" if ":" in host else host
        return f"ssh -N -L {self.port}:{address}:{self.port} {getpass.getuser()}@{socket.gethostname()}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, if one is free."""
        if self._slots.acquire(blocking=False):
            self._asking[request] = time.monotonic() + REQUEST_S
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0.0)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        self.shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections without a whole request in time, so that slow clients do not block threads."""
        for request, due in list(self._asking.items()):
            if time.monotonic() >= due:
                self.has_asked(request)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def has_asked(self, request: Any) -> None:
        """Stop the time limit of a connection: its request is complete."""
        self._asking.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and release its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that have left; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class TokenHandler(BaseHTTPRequestHandler):
    """A handler that answers a request that names this server and has its token. A subclass has the pages."""

    server: TokenServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version: str = "roxxel-dist"
    sys_version: str = ""
    timeout: ClassVar[float | None] = REQUEST_S

    def do_GET(self) -> None:
        """Answer, or refuse with a line of text."""
        self.server.has_asked(self.connection)
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._names_this_host():
            self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server has no such name")
        elif not hmac.compare_digest(self.token(query).encode(), self.server.token.encode()):
            self.refuse_token()
        else:
            self.answer_page(url.path, query)

    def token(self, query: dict[str, list[str]]) -> str:
        """The token of a request."""
        return query.get("token", [""])[0]

    def refuse_token(self) -> None:
        """Answer a request without the right token."""
        self.refuse(HTTPStatus.FORBIDDEN, NO_TOKEN)

    def answer_page(self, path: str, query: dict[str, list[str]]) -> None:
        """Answer a request that has the token."""
        self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _names_this_host(self) -> bool:
        host = self.headers.get_all("Host") or []
        name = host[0].lower() if len(host) == 1 else ""
        before, _, port = name.rpartition(":")
        return (before if port.isdecimal() else name) in {*self.server.names, self.connection.getsockname()[0]}

    def answer(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        """Send a whole answer; `headers` are more of them, with _ for -."""
        self.head(status, kind, len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: HTTPStatus, text: str, **headers: str) -> None:
        """Send a line of text."""
        self.answer(status, "text/plain", f"{text}\n".encode(), **headers)

    def head(self, status: HTTPStatus, kind: str, length: int | None = None, **headers: str) -> None:
        """Send the headers."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy("'self'") + "; frame-ancestors 'none'")
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a protocol error or an unknown method."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing: a log of requests would contain the token."""


class PageServer(TokenServer):
    """A server of the page of a feed. Raises as `TokenServer`."""

    def __init__(self, feed: Feed, host: str = LOOPBACK, port: int = 0) -> None:
        self.feed: Feed = feed
        super().__init__(_PageHandler, host, port)

    @property
    def link(self) -> str:
        """The address to open in a browser."""
        return f"{self.place}/?token={quote(self.token)}"


class _PageHandler(TokenHandler):
    """Answers browsers."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def answer_page(self, path: str, query: dict[str, list[str]]) -> None:
        """The page, and the stream of its numbers."""
        if path == "/":
            self.answer(HTTPStatus.OK, "text/html", page("roxxel-dist").encode())
        elif path == "/events":
            self._stream(tuple(query.get("item", ())[:OPEN_AT_ONCE]))
        else:
            super().answer_page(path, query)

    def _stream(self, wanted: tuple[str, ...]) -> None:
        """Send changes as they happen, until the browser leaves."""
        self.connection.settimeout(WRITE_S)
        self.head(HTTPStatus.OK, "text/event-stream")
        changes, sent = Changes(self.server.feed, wanted), 0.0
        with contextlib.suppress(OSError):
            while not self.server.ended.is_set():
                text = changes.next()
                if text or time.monotonic() >= sent + ALIVE_S:
                    self.wfile.write(f"data: {text}\n\n".encode() if text else b": alive\n\n")
                    self.wfile.flush()
                    sent = time.monotonic()
                self.server.ended.wait(LOOK_S)
