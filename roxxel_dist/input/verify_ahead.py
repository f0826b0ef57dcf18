"""Verification of the training data: a thread compares what the next steps read with the checksums of the shards.

The plan knows what a step will read. No row is logged, and no checkpoint saved, of tokens that were not verified.
Decision 3.
"""

import threading

from roxxel_dist.data.verify import DamagedData, VerifiedBlocks
from roxxel_dist.input.stream import Stream

STEPS_AT_ONCE, TOKENS_AT_ONCE = 256, 1 << 22


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

    def follow(self, stream: Stream, last_step: int) -> None:
        """Verify what a stream reads from now on up to `last_step`; what was followed before is left."""
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

    def _run(self, stream: Stream, blocks: VerifiedBlocks, last_step: int) -> None:
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

    def _verify(self, stream: Stream, blocks: VerifiedBlocks, first: int, stop: int) -> int:
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
