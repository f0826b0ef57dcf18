"""A trace of some steps by jax's profiler, for XProf, TensorBoard or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class Profiler:
    """Traces the steps from `first` to `last`, 1-based and both included; never stops training.

    The trace goes into `plugins/profile/<time>/` of the folder, and `log` has the line that says so, or why there is
    none. A run that resumes after `first` begins at once.
    """

    def __init__(self, folder: str | Path, first: int, last: int, log: Callable[[str], None] = print) -> None:
        self._folder, self._first, self._last, self._log = Path(folder), first, last, log
        self._running = self._done = False
        self._traced = (0, 0)

    def before(self, step: int, pending: Any = None) -> None:
        """About to begin `step`; where tracing begins, wait for the arrays in `pending` first."""
        if self._done or self._running or not self._first <= step <= self._last:
            return
        self._guarded(lambda: self._start(pending))
        self._running, self._traced = not self._done, (step, step)

    def after(self, step: int, pending: Any = None) -> None:
        """`step` was begun; if tracing ends here, first wait for `pending`, the arrays that it computes."""
        if self._running:
            self._traced = (self._traced[0], step)
            if step >= self._last:
                self.close(pending)

    def close(self, pending: Any = None) -> None:
        """Write the trace, should it be running still: training ended before its last step."""
        if not self._running:
            return
        self._running = False
        self._guarded(lambda: (jax.block_until_ready(pending), jax.profiler.stop_trace()))
        if not self._done:
            self._log(f"profile of steps {self._traced[0]} to {self._traced[1]}: {self._folder}")
        self._done = True

    def _start(self, pending: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # jax would find out at the end, and go on tracing for ever
        jax.block_until_ready(pending)
        jax.profiler.start_trace(self._folder)

    def _guarded(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._done = True
            self._log(f"no profile of steps {self._first} to {self._last}: {error}")
