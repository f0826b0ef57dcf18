"""The log of rank 0: rows and lines from the loop, on their way to files, terminals and servers.

Rows are in the tables on disk before the loop goes on, so that no checkpoint is ahead of its log. Every other tracker
has a thread and a queue of its own: the loop waits for no terminal and no server, and one that is stuck holds up no
other. A tracker that fails is dropped with a line that says so: it never stops training.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from roxxel_dist.process.interrupt import expect_a_hang

CLOSE_LIMIT_S = 30.0
CRASH_LIMIT_S = 5.0
"""Shorter: the other ranks learn of a crash only when this process has gone."""
QUEUE_LIMIT = 10_000
"""Rows and texts that may wait for a tracker; further ones are dropped and counted."""
STATUS_EVERY_S = 0.2
ABANDON_LIMIT_S = 5.0


class TrackerError(Exception):
    """A tracker cannot go on; the message is the line for people."""


class Tracker(Protocol):
    """A receiver of rows.

    Optional: `text(text)` for one that shows lines to people; `durable = True` for one that is called at once, on the
    loop's own thread; `status(record)` for a live display, which is given the newest record alone, five times a second
    at most; `crash(text)` for a traceback, which the process prints on its standard error itself but a file would miss;
    `digest(text)` for one that keeps the running digest: that of the row which comes next; `rewind(step)` for one that
    keeps rows: those after `step` are void; `sample(text)` for one that keeps what the model wrote; `log`, a function
    that the queue sets, to show people a line; `abandon(hangs)`, called once when a call has failed or still runs at
    the end (`hangs`), so that nothing of it is waited for when the process ends.
    """

    def row(self, row: Mapping[str, Any]) -> None:
        """One logged step."""
        ...

    def close(self) -> None:
        """Close: nothing more comes."""
        ...


class TrackerSource(Protocol):
    """Shows the run to the user instead of the console; a `Logger` is one."""

    def tracker(self, total_steps: int, restored_step: int) -> Tracker:
        """The tracker for the rows and lines of a run of so many steps that resumes after `restored_step`."""
        ...


class LogQueue:
    """Hands everything to its trackers; as a context manager it writes a crash's traceback too.

    Ranks that stay silent have no trackers. Where they are left out, they come with `open`, and lines wait for them.
    """

    def __init__(self, trackers: Sequence[Tracker] | None = None) -> None:
        self._durable: list[Tracker] = []
        self._workers: list[_Worker] = []
        self._early: list[str] | None = []
        if trackers is not None:
            self.open(trackers)

    def open(self, trackers: Sequence[Tracker]) -> None:
        """Begin to hand over, first the lines that waited."""
        for tracker in trackers:
            if hasattr(tracker, "log"):
                tracker.log = self.text  # pyright: ignore[reportAttributeAccessIssue]
        self._durable = [tracker for tracker in trackers if getattr(tracker, "durable", False)]
        self._workers = [_Worker(tracker, self.text) for tracker in trackers if tracker not in self._durable]
        for worker in self._workers:
            worker.start()
        early, self._early = self._early, None
        for text in early or ():
            self.text(text)

    def row(self, row: Mapping[str, Any], digest: str = "") -> None:
        """Log the metrics of one step, and the running digest after it."""
        if digest:
            self._call("digest", digest)
        self._call("row", dict(row))

    def text(self, text: str) -> None:
        """Log lines for people; on standard error if no tracker shows them."""
        if self._early is not None:
            self._early.append(text)
            return
        shown = [worker.put("text", text) for worker in self._workers]
        if not any(shown):
            print(text, file=sys.stderr, flush=True)

    def sample(self, text: str) -> None:
        """Log what the model wrote: as lines for people, and to trackers that keep it."""
        self.text(text)
        self._call("sample", text)

    def status(self, record: Mapping[str, Any]) -> None:
        """Move the live display."""
        for worker in self._workers:
            worker.status = record

    def rewind(self, step: int) -> None:
        """Training goes back to `step`: the rows after it leave the tables, and others will come."""
        self._call("rewind", step)

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write what is left and close the trackers; gives up after `limit_s` on those that are stuck."""
        end = time.monotonic() + limit_s
        # Those that show lines go last: the others may have something to say.
        for last in (False, True):
            closing = [worker for worker in self._workers if hasattr(worker.tracker, "text") == last]
            for worker in closing:
                worker.put("close")
            for worker in closing:
                worker.join(max(end - time.monotonic(), 0.1))
                if worker.is_alive() and not last:  # the last one that shows lines cannot report itself
                    name = type(worker.tracker).__name__
                    self.text(f"{name} is still busy after {limit_s:.0f} s: continuing without it")
                if worker.is_alive():
                    worker.abandon()
        self._workers = []
        self._call("close")
        self._durable = []

    def __enter__(self) -> "LogQueue":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            self.close()
            return
        self._call("crash", "".join(traceback.format_exception(kind, error, tb)))
        self.close(CRASH_LIMIT_S)

    def _call(self, call: str, *values: Any) -> None:
        """Call a method of the durable trackers now, and of the others when they come to it."""
        for tracker in list(self._durable):
            if failure := _failure(tracker, call, *values):
                self._durable.remove(tracker)
                self.text(failure)
        for worker in self._workers:
            worker.put(call, *values)


class _Worker(threading.Thread):
    """A tracker's thread and its queue, which is bounded: a tracker may never come back."""

    def __init__(self, tracker: Tracker, log: Callable[[str], None]) -> None:
        super().__init__(name=f"roxxel-{type(tracker).__name__}", daemon=True)
        self.tracker = tracker
        self.status: Mapping[str, Any] | None = None
        self._log, self._failed, self._dropped = log, False, 0
        self._calls: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def put(self, call: str, *values: Any) -> bool:
        """Have a method called; returns whether the tracker is there and has it."""
        if self._failed or not hasattr(self.tracker, call):
            return False
        if self._calls.qsize() >= QUEUE_LIMIT and call in ("row", "text"):
            self._dropped += 1
            return True
        if self._dropped:
            text = f"{self._dropped} lines were dropped here: this display was too slow"
            self._dropped = 0
            self._calls.put(("text", (text,)))
        self._calls.put((call, values))
        return True

    def run(self) -> None:
        """Call the tracker until it is closed or fails."""
        live, shown, next_status = hasattr(self.tracker, "status"), None, 0.0
        call, values = "", ()
        while call != "close" and not self._failed:
            try:
                # The loop sets a status without a signal, so that a step costs it no more than that: look now and then.
                call, values = self._calls.get(timeout=STATUS_EVERY_S if live else None)
            except queue.Empty:
                call = ""
            if call not in ("", "close"):
                self._make(call, *values)
            status, now = self.status, time.monotonic()
            if live and status is not shown and (call == "close" or now >= next_status):
                self._make("status", status)
                shown, next_status = status, now + STATUS_EVERY_S
            if call == "close":
                self._make(call)

    def abandon(self) -> None:
        """Give up a tracker that hangs: whatever it says now comes too late, and nothing of it may hold up this
        process."""
        self._failed, self._log = True, lambda text: None
        expect_a_hang(type(self.tracker).__name__)
        helper = threading.Thread(target=_failure, args=(self.tracker, "abandon", True), daemon=True)
        helper.start()
        helper.join(ABANDON_LIMIT_S)

    def _make(self, call: str, *values: Any) -> None:
        if not self._failed and (failure := _failure(self.tracker, call, *values)):
            self._failed = True
            self._log(failure)
            _failure(self.tracker, "abandon", False)


def _failure(tracker: Tracker, call: str, *values: Any) -> str:
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
