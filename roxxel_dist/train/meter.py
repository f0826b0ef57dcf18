"""How fast training is: time and tokens since the last report, with what is not training left out."""

import time


class Meter:
    """Starts when made; `pause` and `resume` leave out validations, saves and compilations."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._steps = self._tokens = 0
        self.tokens_per_s: float | None = None

    def step(self, tokens: int) -> None:
        """One step of `tokens` tokens was done."""
        self._steps += 1
        self._tokens += tokens

    def pause(self) -> None:
        """From here on it is not training."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def forget(self) -> None:
        """Start afresh, after a step that compiled."""
        self._since, self._steps, self._tokens, self._paused_at = time.perf_counter(), 0, 0, None

    def report(self) -> dict[str, float]:
        """{"ms_per_step", "tokens_per_s"} since the last report; empty where no step was timed."""
        if not self._steps:
            return {}
        spent = max((self._paused_at or time.perf_counter()) - self._since, 1e-9)
        self.tokens_per_s = self._tokens / spent
        result = {"ms_per_step": 1000 * spent / self._steps, "tokens_per_s": self.tokens_per_s}
        paused = self._paused_at is not None
        self.forget()
        if paused:
            self.pause()
        return result
