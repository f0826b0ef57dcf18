"""The speed of this rank's CPU: a small fixed computation at intervals, in a thread of its own.

Steps last as long as those of the slowest rank, so they do not tell how fast this one is. The CPU time of a fixed
computation does: it does not grow while the rank waits for others, nor while it waits for a CPU (the agent reads that
in /proc), but with a clock that is throttled, or a hypervisor that gives the CPU to others.

An accelerator would be probed here too, in a `measure` of its own for the moments when no step is on it.
"""

import hashlib
import threading
import time
from types import TracebackType
from typing import Self

from roxxel_dist.cluster.progress import Progress

PROBE_S = 1.0
"""Between two probes: of `ROUNDS` computations of 0.1 ms, so a thousandth of the time is never reached."""
ROUNDS = 3
"""The quickest counts: the others were interrupted."""
DATA = bytes(1 << 17)


def measure() -> float:
    """CPU seconds of the computation; the interpreter is free for other threads meanwhile."""
    times = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        hashlib.sha256(DATA).digest()
        times.append(time.thread_time() - begun)
    return min(times)


class SpeedProbe:
    """Writes the time of a probe into this rank's record, every second while the context is open.

    Nothing where no launcher reads the record. The steps do not wait for it, and it computes nothing of theirs.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speed probe", daemon=True)

    def __enter__(self) -> Self:
        if self._progress.is_read:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(PROBE_S)

    def _run(self) -> None:
        while not self._ending.wait(PROBE_S):
            self._progress.probe(measure())
