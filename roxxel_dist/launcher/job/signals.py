"""Signals to the launcher as bytes in a pipe, so that its loop can wait for them beside everything else."""

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Self

from roxxel_dist.process.exit_codes import SCHEDULER_SIGNALS

SUSPENSION = (signal.SIGTSTP, signal.SIGCONT)


def suspends(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a SIGTSTP here is SLURM's: it is in one of its jobs, and no terminal could send a Ctrl-Z."""
    if not environ.get("SLURM_JOB_ID"):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return True
    return False


class SignalPipe:
    """SIGINT, SIGQUIT, SIGTERM, SIGHUP and the signals of batch systems as bytes in a pipe (`fd`), not as exceptions,
    while the context is open. Of the last, those that the program has no handler for.

    Args:
        info: shows a line to a person.
        stays: take SIGTSTP (Ctrl-Z) too, for a launcher that must not stand still.
    """

    fd: int

    def __init__(self, info: Callable[[str], None], *, stays: bool = False) -> None:
        self._info = info
        self._stays = stays
        self._suspended: float | None = None  # since when

    def __enter__(self) -> Self:
        self.fd, self._writes = os.pipe()
        for fd in (self.fd, self._writes):
            os.set_blocking(fd, False)
        self._wakeup = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        numbers = [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, *SUSPENSION[: 2 * self._stays]]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to stay
            numbers.append(signal.SIGHUP)
        numbers += [number for number in SCHEDULER_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        # The wake-up descriptor has the number already; without a handler it would not get it.
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # one that came before this was ready is received now
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.fd)
        os.close(self._writes)

    def take(self) -> list[int]:
        """The requests that came since the last call."""
        try:
            numbers = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        for number in numbers if self._stays else ():
            self._follow_suspension(number)
        # The descriptor has the number of every signal for which the program has a handler.
        return [number for number in numbers if number in self._before and number not in SUSPENSION]

    def _follow_suspension(self, number: int) -> None:
        """Say what a request to stand still means here: SLURM sends SIGTSTP, and SIGSTOP some seconds later."""
        if number == signal.SIGTSTP and suspends():
            self._suspended = time.monotonic()
            self._info(
                "SLURM suspends the job: launcher and ranks stand still until it resumes the job (`scontrol resume "
                f"{os.environ['SLURM_JOB_ID']}`), and go on where they were"
            )
        elif number == signal.SIGTSTP:
            self._info("Ctrl-Z is not followed: hosts that hear nothing from here for long end their ranks")
        elif number == signal.SIGCONT and self._suspended is not None:
            self._info(f"SLURM resumed the job after {time.monotonic() - self._suspended:.0f} s")
            self._suspended = None

    def wait(self, seconds: float) -> list[int]:
        """The requests that come within so many seconds, as soon as there is one."""
        end = time.monotonic() + seconds
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(self.fd, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if poll.poll(1000 * min(left, 3600)) and (numbers := self.take()):
                return numbers
        return self.take()
