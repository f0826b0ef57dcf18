"""Fetching what the next steps read: a plan knows it for any step.

Few windows lie near each other, many fill whole units, whose ranges are joined: so the first step is fetched alone, and
all others in long spans of steps.
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
"""Of windows that are looked for at once."""
SPANS = 4
"""How far ahead, at most."""
CACHE_SHARE = 8
"""And at most this part of the cache."""
AGAIN_S = 1.0


class Windows(NamedTuple):
    """Windows of one length in a data set, which some steps read."""

    name: str
    """Of the data set in the plan."""
    data: Any
    """The `Roxxel`."""
    offset: np.ndarray
    """int64 [N]: first tokens."""
    length: int
    packed: bool
    """Whether their documents are told apart."""

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return len(self.offset) * self.length * self.data.dtype.itemsize


class FetchAhead:
    """A thread that has fetched what the steps from `first` on read, as far ahead as the cache allows.

    It ends with this object. What fails is not reported: the step that reads it tries again, and raises.

    Args:
        windows: what the steps [first, stop) read.
        first: the step that is about to be read.
        stop: one past the last step.
        fetchers: of the data sets.
    """

    def __init__(
        self, windows: Callable[[int, int], Iterable[Windows]], first: int, stop: int, fetchers: Sequence[Fetcher]
    ) -> None:
        self._position = _Position(first)
        weakref.finalize(self, self._position.close).atexit = False
        most = min(SPANS * SPAN_BYTES, *(fetcher.cache.capacity // CACHE_SHARE for fetcher in fetchers))
        threading.Thread(
            target=_run, args=(self._position, windows, stop, most), name="roxxel-ahead", daemon=True
        ).start()

    def reached(self, step: int) -> None:
        """The reader is about to read `step`."""
        self._position.reach(step)


class _Position:
    """Which step the reader is at; shared by it and the thread."""

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
        """Wait until the reader is at a step; False where there is none any more."""
        with self._change:
            self._change.wait_for(lambda: self.closed or self.step >= step)
        return not self.closed


def _run(position: _Position, windows: Callable[[int, int], Iterable[Windows]], stop: int, most: int) -> None:
    """Fetch span after span."""
    step = position.step
    _fetch(list(windows(step, min(step + 1, stop))))
    step += 1
    while step < stop and not position.closed:
        step = max(step, position.step)
        size = max(1, sum(each.nbytes for each in windows(step, step + 1)))
        count = max(1, min(SPAN_BYTES, most // 2) // size)
        ahead = max(count + 1, most // size)
        if not position.wait_for(step + count - ahead):
            return
        if _fetch(list(windows(step, min(step + count, stop)))):
            # The store is away: the reader has what is in the cache, and this goes on when it is back.
            time.sleep(AGAIN_S)
            continue
        step += count


def _fetch(spans: Sequence[Windows]) -> bool:
    """Fetch some windows; whether the store has failed."""
    failed = False
    for each in spans:
        try:
            each.data.fetch(each.offset, each.length, documents=each.packed)
        except StoreError:
            failed = True
        except ValueError:  # damage, a full disk: for the step that meets it
            pass
    return failed
