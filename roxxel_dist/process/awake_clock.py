"""A clock that stands still while this process does not run.

A process that was stopped (Ctrl-Z, SIGSTOP, a frozen container, a paused virtual machine) finds, when it goes on, that
much time has gone by. It read no answer in that time, which therefore says nothing about other processes.
"""

import time

GAP_S = 5.0
"""The most that counts between two readings; who measures by this clock reads it more often."""


class AwakeClock:
    """Seconds since it was made, of which at most `GAP_S` count between two readings; for one thread."""

    def __init__(self) -> None:
        self._read, self._awake = time.monotonic(), 0.0

    def now(self) -> float:
        """The seconds that this process ran, as far as its readings tell."""
        now = time.monotonic()
        self._awake += min(now - self._read, GAP_S)
        self._read = now
        return self._awake
