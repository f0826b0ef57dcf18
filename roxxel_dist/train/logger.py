"""Rank 0's voice: a queue between the training loop and everything that is written or shown.

The loop never waits for a disk or a terminal; a thread takes rows and lines off the queue in order. A tracker that
fails is dropped with a line that says so: it never stops training.
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
    """Where rows and lines go. Optional: `status(record)` for a live display, `crash(text)` for a traceback that the
    process itself will print on its standard error, but that a file would otherwise miss."""

    def row(self, row: Mapping[str, float]) -> None:
        """One logged step."""
        ...

    def text(self, text: str) -> None:
        """Lines for people."""
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
        self._trackers = list(trackers)
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="roxxel-logger", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
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
            print(f"{type(tracker).__name__} failed and writes no more: {error!r}", file=sys.stderr, flush=True)
