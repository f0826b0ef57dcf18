"""Fetching the windows of later steps ahead; a plan can compute them for any step.

The windows of one step are rarely adjacent, but those of many steps fill whole units, which are fetched in joined
ranges. So the first step is fetched alone, and the others in long spans of steps.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.remote.fetch import Fetcher
from roxxel_dist.objects.errors import StoreError

SPAN_BYTES = 32 << 20
"""Bytes of windows that are fetched in one span."""
SPANS = 4
"""Spans to fetch ahead, at most."""
AGAIN_S = 1.0


class Windows(NamedTuple):
    """Windows of one length in a data set, read by some steps."""

    name: str
    """The name of the data set in the plan."""
    data: Any
    """The `Roxxel`."""
    offset: np.ndarray
    """int64 [N]: first tokens."""
    length: int
    packed: bool
    """Whether segments are read too."""

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return len(self.offset) * self.length * self.data.dtype.itemsize


class FetchAhead:
    """A thread that fetches the windows of the steps from `first`, as far ahead as the cache allows.

    It ends with this object. Errors are not reported: the step that reads the window tries again, and raises.

    Args:
        windows: returns the windows of the steps [first, stop).
        first: the next step to be read.
        stop: one past the last step.
        fetchers: of the data sets.
    """

    def __init__(
        self, windows: Callable[[int, int], Iterable[Windows]], first: int, stop: int, fetchers: Sequence[Fetcher]
    ) -> None:
        self._position = _Position(first)
        weakref.finalize(self, self._position.close).atexit = False
        threading.Thread(
            target=_run, args=(self._position, windows, stop, fetchers), name="roxxel-ahead", daemon=True
        ).start()

    def reached(self, step: int) -> None:
        """The reader is about to read `step`."""
        self._position.reach(step)


class _Position:
    """The reader's current step, shared with the thread."""

    def __init__(self, step: int) -> None:
        self.step, self.closed = step, False
        self._change = threading.Condition()

    def reach(self, step: int) -> None:
        with self._change:
            self.step = step
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self.closed = True
            self._change.notify_all()

    def wait_for(self, step: int) -> bool:
        """Wait until the reader reaches a step; False if the reader has gone."""
        with self._change:
            self._change.wait_for(lambda: self.closed or self.step >= step)
        return not self.closed


def _run(
    position: _Position, windows: Callable[[int, int], Iterable[Windows]], stop: int, fetchers: Sequence[Fetcher]
) -> None:
    """Fetch span after span."""
    step = position.step
    _fetch(list(windows(step, min(step + 1, stop))))
    step += 1
    while step < stop and not position.closed:
        step = max(step, position.step)
        most = min(SPANS * SPAN_BYTES, *(fetcher.ahead_bytes for fetcher in fetchers))
        size = max(1, sum(span.nbytes for span in windows(step, step + 1)))
        count = max(1, min(SPAN_BYTES, most // 2) // size)
        ahead = max(count + 1, most // size)
        if not position.wait_for(step + count - ahead):
            return
        if _fetch(list(windows(step, min(step + count, stop)))):
            # The store is unavailable: the reader uses the cache, and this thread continues when the store is back.
            time.sleep(AGAIN_S)
            continue
        step += count


def _fetch(spans: Sequence[Windows]) -> bool:
    """Fetch some windows; returns whether the store has failed."""
    failed = False
    for span in spans:
        try:
            span.data.fetch(span.offset, span.length, documents=span.packed)
        except StoreError:
            failed = True
        except ValueError:  # damage: the step that reads the window raises it
            pass
    return failed
