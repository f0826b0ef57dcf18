"""Servers with a token: the base of all, and that of the page. They are read-only.

A request with another host name (DNS rebinding by a page of another site), without the right token, or for an unknown
path, gets a line of text without information.
"""

import contextlib
import getpass
import hmac
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, urlsplit

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.view.web.feed import Changes, Feed
from roxxel_dist.view.web.page import page, policy

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
    """Answers requests that have its token until it is shut down.

    Args:
        handler: answers a request.
        host: the address that it listens on.
        port: 0 for a free one.
        token: empty for a new one.

    Raises:
        ValueError: the address or the port is not available.
    """

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
        there = LOOPBACK if host in ANY else f"[{host}]" if ":" in host else host
        return f"ssh -N -L {self.port}:{there}:{self.port} {getpass.getuser()}@{socket.gethostname()}"

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
    """Answers a request that names this server and has its token. A subclass has the pages."""

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
    """Serves the page of a feed until it is shut down.

    Args:
        feed: the items to show.
        host: the address that it listens on.
        port: 0 for a free one.

    Raises:
        ValueError: the address or the port is not available.
    """

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
