"""Rank 0's voice: what the loop hands over, on its way to files and people.

Rows are in the tables on disk before the loop goes on, so that no checkpoint is ahead of its log. Everything else waits
in a queue for a thread: the loop never waits for a terminal or a server. A tracker that fails is dropped with a line
that says so: it never stops training.
"""

import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

CLOSE_LIMIT_S = 30.0


class Tracker(Protocol):
    """Where rows go.

    Optional: `text(text)` for one that shows lines to people; `durable = True` for one that is given rows at once and
    nothing else; `status(record)` for a live display; `crash(text)` for a traceback, which the process prints on its
    standard error itself but a file would miss.
    """

    def row(self, row: Mapping[str, float]) -> None:
        """One logged step."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Logger:
    """Hands everything to its trackers on a thread; as a context manager it writes a crash's traceback too.

    Args:
        trackers: where everything goes; none on the ranks that stay silent.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._durable = [t for t in trackers if getattr(t, "durable", False)]
        self._trackers = [t for t in trackers if t not in self._durable]
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="roxxel-logger", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        for tracker in list(self._durable):
            self._guarded(tracker, "row", row)
        self._queue.put(("row", dict(row)))

    def text(self, text: str) -> None:
        """Log lines for people."""
        self._queue.put(("text", text))

    def status(self, record: Mapping[str, Any]) -> None:
        """Move the live display."""
        self._queue.put(("status", dict(record)))

    def close(self) -> None:
        """Write what is left and close the trackers; gives up after 30 s on one that is stuck."""
        self._queue.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        for tracker in self._durable:
            self._guarded(tracker, "close")
        self._durable = []

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
            self._queue.put(("crash", "".join(traceback.format_exception(kind, error, tb))))
        self.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, value = item
            for tracker in list(self._trackers):
                self._guarded(tracker, kind, value)
        for tracker in self._trackers:
            self._guarded(tracker, "close")

    def _guarded(self, tracker: Tracker, call: str, *values: Any) -> None:
        try:
            method = getattr(tracker, call, None)
            if method is not None:
                method(*values)
        except Exception as error:
            self._trackers = [t for t in self._trackers if t is not tracker]
            self._durable = [t for t in self._durable if t is not tracker]
            print(f"{type(tracker).__name__} failed and writes no more: {error!r}", file=sys.stderr, flush=True)
