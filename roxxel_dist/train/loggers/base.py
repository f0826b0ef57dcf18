"""Rank 0's voice: what the loop hands over, on its way to files and people.

Rows are in the tables on disk before the loop goes on, so that no checkpoint is ahead of its log. Every other tracker
has a thread and a queue of its own: the loop waits for no terminal and no server, and one that is stuck holds up no
other. A tracker that fails is dropped with a line that says so: it never stops training.
"""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

CLOSE_LIMIT_S = 30.0
CRASH_LIMIT_S = 5.0
"""Shorter: the other ranks learn of a crash only when this process has gone."""
QUEUE_LIMIT = 10_000
"""Rows and texts that wait for a tracker; what comes on top is dropped and counted."""
STATUS_EVERY_S = 0.2


class TrackerError(Exception):
    """A tracker cannot go on; the message is the line for people."""


class Tracker(Protocol):
    """Where rows go.

    Optional: `text(text)` for one that shows lines to people; `durable = True` for one that is called at once, on the
    loop's own thread; `status(record)` for a live display, which is given the newest record alone; `crash(text)` for a
    traceback, which the process prints on its standard error itself but a file would miss; `rewind(step)` for one that
    keeps rows: those after `step` are void; `say`, a function that the queue sets, to tell people a line.
    """

    def row(self, row: Mapping[str, Any]) -> None:
        """One logged step."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class LogQueue:
    """Hands everything to its trackers; as a context manager it writes a crash's traceback too.

    Args:
        trackers: where everything goes; none on the ranks that stay silent. Left out, they come with `open`, and the
            lines until then wait for them.
    """

    def __init__(self, trackers: Sequence[Tracker] | None = None) -> None:
        self._durable: list[Tracker] = []
        self._workers: list[_Worker] = []
        self._early: list[str] | None = []
        if trackers is not None:
            self.open(trackers)

    def open(self, trackers: Sequence[Tracker]) -> None:
        """Begin to hand over, the lines first that were said before."""
        self._durable = [t for t in trackers if getattr(t, "durable", False)]
        self._workers = [_Worker(t, self.text) for t in trackers if t not in self._durable]
        for tracker in trackers:
            if hasattr(tracker, "say"):
                tracker.say = self.text  # pyright: ignore[reportAttributeAccessIssue]
        for worker in self._workers:
            worker.start()
        early, self._early = self._early, None
        for text in early or ():
            self.text(text)

    def row(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of one step."""
        self._at_once("row", row)
        self._put("row", dict(row))

    def text(self, text: str) -> None:
        """Log lines for people; on standard error where nobody shows them."""
        if self._early is not None:
            self._early.append(text)
        elif any(worker.knows("text") for worker in self._workers):
            self._put("text", text)
        else:
            print(text, file=sys.stderr, flush=True)

    def status(self, record: Mapping[str, Any]) -> None:
        """Move the live display."""
        for worker in self._workers:
            worker.status = record

    def rewind(self, step: int) -> None:
        """Training goes back to `step`: the rows after it leave the tables, and others will come."""
        self._at_once("rewind", step)
        self._put("rewind", step)

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write what is left and close the trackers; gives up after `limit_s` on those that are stuck."""
        end = time.monotonic() + limit_s
        # Those that show lines go last: the others may have something to say.
        for last in (False, True):
            closing = [worker for worker in self._workers if worker.knows("text") == last]
            for worker in closing:
                worker.stop()
            for worker in closing:
                worker.join(max(end - time.monotonic(), 0.1))
                if worker.is_alive() and not last:  # one that shows lines: nobody is left to tell
                    self.text(f"{worker.title} is still busy after {limit_s:.0f} s: going on without it")
        self._workers = []
        self._at_once("close")
        self._durable = []

    def __enter__(self) -> "LogQueue":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            self.close()
            return
        text = "".join(traceback.format_exception(kind, error, tb))
        self._at_once("crash", text)
        self._put("crash", text)
        self.close(CRASH_LIMIT_S)

    def _at_once(self, call: str, *values: Any) -> None:
        for tracker in list(self._durable):
            if failure := _call(tracker, call, *values):
                self._durable.remove(tracker)
                self.text(failure)

    def _put(self, call: str, value: Any) -> None:
        for worker in self._workers:
            worker.put(call, value)


class _Worker(threading.Thread):
    """A tracker's thread, and what waits for it: bounded, as a tracker may never come back."""

    def __init__(self, tracker: Tracker, tell: Callable[[str], None]) -> None:
        super().__init__(name=f"roxxel-{type(tracker).__name__}", daemon=True)
        self.title = type(tracker).__name__
        self.status: Mapping[str, Any] | None = None
        self._tracker, self._tell = tracker, tell
        self._waiting: deque[tuple[str, Any]] = deque()
        self._change = threading.Condition()
        self._shown: Mapping[str, Any] | None = None
        self._dropped = 0
        self._stopping = self._failed = False

    def knows(self, call: str) -> bool:
        """Whether the tracker is there and has that method."""
        return not self._failed and hasattr(self._tracker, call)

    def put(self, call: str, value: Any) -> None:
        """Have a method called, if the tracker has it."""
        if not self.knows(call):
            return
        with self._change:
            if len(self._waiting) >= QUEUE_LIMIT and call in ("row", "text"):
                self._dropped += 1
            else:
                self._waiting.append((call, value))
                self._change.notify()

    def stop(self) -> None:
        """End when nothing waits any more."""
        with self._change:
            self._stopping = True
            self._change.notify()

    def run(self) -> None:
        """Call the tracker until told to stop, then close it; leave when it fails."""
        while not self._failed:
            items, ending = self._next()
            for call, value in items:
                if not self._failed:
                    self._make(call, value)
            if ending:
                break
        if not self._failed:
            self._make("close")

    def _next(self) -> tuple[list[tuple[str, Any]], bool]:
        """What has come, and whether it is the last; the newest status comes after the rest."""
        live = hasattr(self._tracker, "status")
        with self._change:
            # The loop sets a status without a signal, so that a step costs it no more than that: look now and then.
            if not self._waiting and not self._stopping:
                self._change.wait(STATUS_EVERY_S if live else None)
            items, ending = list(self._waiting), self._stopping
            self._waiting.clear()
            dropped, self._dropped = self._dropped, 0
        if dropped:
            items.append(("text", f"{dropped} lines were dropped here: this display was too slow"))
        if live and (status := self.status) is not self._shown:
            self._shown = status
            items.append(("status", status))
        return items, ending

    def _make(self, call: str, *values: Any) -> None:
        if failure := _call(self._tracker, call, *values):
            self._failed = True
            self._tell(failure)


def _call(tracker: Tracker, call: str, *values: Any) -> str:
    """Call a method that the tracker may have; the line about its failure, if it fails."""
    try:
        method = getattr(tracker, call, None)
        if method is not None:
            method(*values)
    except TrackerError as error:
        return str(error)
    except Exception as error:
        return f"{type(tracker).__name__} failed and writes no more: {error!r}"
    return ""
