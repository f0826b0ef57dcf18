"""How fast training is: time and tokens since the last report, with what is not training left out."""

import time


class Meter:
    """Starts when made; `pause` and `resume` leave out validations, saves and compilations."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """As of the last report."""
        self.forget()

    def forget(self) -> None:
        """Start afresh, after a step that compiled."""
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._finished_at: float | None = None
        self._steps = self._tokens = 0

    def step(self, tokens: int) -> None:
        """One step of `tokens` tokens was begun."""
        self._steps += 1
        self._tokens += tokens
        self._finished_at = None  # it was said of the steps before

    def finished(self) -> None:
        """All steps begun until now are known to be done: the next report ends here, not when it is made."""
        self._finished_at = time.perf_counter()

    def pause(self) -> None:
        """From here on it is not training."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def report(self) -> dict[str, float]:
        """{"ms_per_step", "tokens_per_s"} since the last report; empty where no step was timed."""
        if not self._steps:
            return {}
        end = self._finished_at or self._paused_at or time.perf_counter()
        spent = max(end - self._since, 1e-9)
        self.tokens_per_s = self._tokens / spent
        result = {"ms_per_step": 1000 * spent / self._steps, "tokens_per_s": self.tokens_per_s}
        self._since, self._finished_at, self._steps, self._tokens = end, None, 0, 0
        return result
