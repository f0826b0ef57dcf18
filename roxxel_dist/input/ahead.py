"""What is done ahead of a step, in threads, for the plan knows what each will read: fetching and verification.

`FetchAhead` brings windows from an object store. The windows of one step are rarely adjacent, but those of many steps
fill whole units, which are fetched in joined ranges. So the first step is fetched alone, and the others in long spans.

`Verification` compares what the next steps read with the checksums of the shards. No row is logged, and no checkpoint
saved, of tokens that were not verified. Decision 3.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from roxxel_dist.data.remote.fetch import Fetcher
from roxxel_dist.data.verify import DamagedData, VerifiedBlocks
from roxxel_dist.objects.errors import StoreError

if TYPE_CHECKING:
    from roxxel_dist.input.stream import Stream

SPAN_BYTES = 32 << 20
"""Bytes of windows that are fetched in one span."""
SPANS = 4
"""Spans to fetch ahead, at most."""
AGAIN_S = 1.0
STEPS_AT_ONCE, TOKENS_AT_ONCE = 256, 1 << 22


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


class Verification:
    """Verifies the tokens of the steps ahead of a training loop, in a thread; nothing where `blocks` is None.

    With `every_step`, a step waits for its own tokens before it begins. It must where other processes read too: its
    loss, and so the row and the checkpoint, are everybody's.
    """

    def __init__(self, blocks: VerifiedBlocks | None, *, every_step: bool) -> None:
        self.blocks = blocks
        self._every_step = every_step
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._problem: BaseException | None = None
        self._reached, self._verified, self._wake = 0, 1 << 62, 1 << 62

    def follow(self, stream: "Stream", last_step: int) -> None:
        """From now on verify what a stream reads up to `last_step`; what was followed before is left."""
        self.close()
        if self.blocks is None:
            return
        self._ended, self._problem = False, None
        self._reached = self._verified = stream.step
        self._thread = threading.Thread(
            target=self._run, args=(stream.twin(), self.blocks, last_step), name="roxxel-verify", daemon=True
        )
        self._thread.start()

    def enter(self, step: int) -> None:
        """The loop is about to do `step`, counted from 0.

        Raises DamagedData where it is known to read damaged tokens.
        """
        self._reached = step
        if step >= self._wake:
            with self._change:
                self._change.notify_all()
        if self._every_step or self._problem is not None:
            self.wait(step + 1)

    def wait(self, done: int) -> None:
        """Wait until all that the first `done` steps read is verified.

        Raises DamagedData where some of it is damaged.
        """
        if self._verified >= done:
            return
        with self._change:
            self._change.wait_for(lambda: self._verified >= done or self._problem is not None or self._ended)
        if self._verified < done and self._problem is not None:
            raise self._problem

    def __enter__(self) -> "Verification":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._verified = 1 << 62

    def _run(self, stream: "Stream", blocks: VerifiedBlocks, last_step: int) -> None:
        step, count = self._verified, 1  # few at first: the first step is about to begin
        while step < last_step:
            rows, length = stream.plan.shape(step)
            most = max(1, min(STEPS_AT_ONCE, TOKENS_AT_ONCE // (rows * length)))
            count = min(2 * count, most, last_step - step)
            with self._change:
                self._wake = step - most
                self._change.wait_for(lambda: self._ended or self._reached >= self._wake)
                if self._ended:
                    return
                self._wake = 1 << 62
            step = self._verify(stream, blocks, step, step + count)
            if self._problem is not None:
                return

    def _verify(self, stream: "Stream", blocks: VerifiedBlocks, first: int, stop: int) -> int:
        """Verify some steps, and note how far it came."""
        problem: BaseException | None = None
        try:
            stream.verify(first, stop, blocks)
        except DamagedData:
            while problem is None and first < stop:  # which of the steps it is that reads the damage
                try:
                    stream.verify(first, first + 1, blocks)
                    first += 1
                except DamagedData as error:
                    problem, stop = DamagedData(f"step {first + 1} cannot be done: {error}"), first
        except TimeoutError as error:  # an object store is away; the loop has not come there yet
            if self._reached < first and not self._ended:
                return first
            problem, stop = error, first
        except BaseException as error:  # whatever it is, the loop must hear of it
            problem, stop = error, first
        with self._change:
            self._verified, self._problem = stop, problem
            self._change.notify_all()
        return stop
