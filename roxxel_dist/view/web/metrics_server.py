"""The server of `top --metrics`: OpenMetrics text for Prometheus, on this machine alone, with a token."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from roxxel_dist.process.durable import state_dir
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.view.items import Item, State, is_active, read
from roxxel_dist.view.metrics import CONTENT_TYPE, exposition
from roxxel_dist.view.run import SLICE_S
from roxxel_dist.view.web.server import TokenHandler, TokenServer

PATH = "/metrics"
KEPT_S = 1.0
"""A scrape within this time gets the text of the last one."""
LEAST = 16
"""Characters of a token."""


class Scrapes:
    """The text of a scrape. Thread-safe.

    Args:
        find: finds the items. A ValueError means that there are none.
        all_items: also those that had ended before the first scrape.
    """

    def __init__(self, find: Callable[[], Sequence[Item]], *, all_items: bool) -> None:
        self._find, self._all = find, all_items
        self._lock = threading.Lock()
        self._items: dict[tuple[str, str], Item] = {}
        self._shown: set[tuple[str, str]] = set()
        self._text, self._until = "", float("-inf")

    def text(self) -> str:
        """The numbers of all items as they are now."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = exposition(self._read())
                self._until = time.monotonic() + KEPT_S
            return self._text

    def _read(self) -> list[State]:
        found: Sequence[Item] = []
        with suppress(ValueError):
            found = self._find()
        items = {(type(item.reader).__name__, item.name): item for item in found}
        self._items = {key: self._items.get(key, item) for key, item in items.items()}  # readers keep what they read
        states, deadline = list[State](), time.thread_time() + SLICE_S
        for key, item in self._items.items():
            with suppress(OSError, ValueError):  # it is being deleted or created
                if self._all or key in self._shown or is_active(read(item, brief=True, deadline=0.0)):
                    self._shown.add(key)
                    states.append(read(item, deadline=deadline))
        return states


class MetricsServer(TokenServer):
    """Serves the text of scrapes at `PATH`, to requests with the header `Authorization: Bearer TOKEN`.

    Raises:
        ValueError: the port is not available.
    """

    def __init__(self, scrapes: Scrapes, port: int, token: str) -> None:
        self.scrapes: Scrapes = scrapes
        super().__init__(_MetricsHandler, port=port, token=token)


class _MetricsHandler(TokenHandler):
    """Answers scrapes."""

    server: MetricsServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        """Answer as to GET, without the text (`curl -I`)."""
        self.do_GET()

    def token(self, query: dict[str, list[str]]) -> str:
        """The token of the header: an address, and a token in it, may stand in the logs of a proxy."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    def refuse_token(self) -> None:
        """Say what is missing."""
        text = "send the token of the token file: Authorization: Bearer TOKEN"
        self.refuse(HTTPStatus.UNAUTHORIZED, text, WWW_Authenticate="Bearer")

    def answer_page(self, path: str, query: dict[str, list[str]]) -> None:
        """The text of a scrape."""
        if path == PATH:
            self.answer(HTTPStatus.OK, CONTENT_TYPE, self.server.scrapes.text().encode())
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"there is only {PATH}")


def default_token_file() -> Path:
    """The file in the folder of this user's state. Raises FileNotFoundError if there is no home directory."""
    return state_dir().parent / "metrics-token"


def token_of(path: Path) -> str:
    """The token in a file; a new file gets a new one, and only this user can read it. Raises ValueError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII"
        raise UserError(f"the token file {path} cannot be used ({reason}); name another file") from error
    if len(token) < LEAST or len(token.split()) != 1:
        raise UserError(
            f"the token file {path} must hold one word of {LEAST} characters or more; delete it, and a new one is made"
        )
    return token
