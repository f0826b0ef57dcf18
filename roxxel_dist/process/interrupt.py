"""Ctrl-C, SIGTERM and SIGHUP from the first moment of a command: the process ends at once, and in order.

A KeyboardInterrupt does not do that in a process with jax. Raised in jax's callback of the garbage collector it is
printed and forgotten, raised below C++ it can end in a segmentation fault, and a main thread in a long call of C (a
tokenizer's training) does not raise it at all. So nothing is raised here: the main thread is held where it is, a thread
of its own takes away what is half made, and the process leaves with 128 + the signal's number.

A second request is one to kill where a person repeats it; systems send two signals for one request (`kills`): systemd
sends SIGTERM and SIGHUP together, a wrapper hands on the SIGINT of the terminal, GNU timeout sends SIGTERM to its
program and to its group, and batch systems send a warning, then SIGTERM, or (LSF) SIGINT, SIGTERM and SIGKILL ten
seconds apart. A process that has done its work ends, whatever a library still waits for (`limit_the_end`).
"""

import contextlib
import gc
import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from roxxel_dist.process.exit_codes import SCHEDULER_SIGNALS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEANUP_LIMIT_S = 1.0
"""How long taking away may last: a disk that hangs does not keep the process."""

_before: dict[int, Any] = {}
_cleanups: list[Callable[[], Any]] = []
_leaving = threading.Lock()
_active = threading.Event()


def begin(*before: Any) -> None:
    """Handle the signals from here on; those that are ignored (`nohup`) stay ignored. For a command's main thread.

    `before`: handlers in whose place these are, beside Python's own; `end` restores them.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in SIGNALS:
        if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler, *before):
            _before[number] = signal.default_int_handler if number == signal.SIGINT else handler
            signal.signal(number, _on_signal)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written to while the main thread is in C, too
    threading.Thread(target=_watch, args=(read_end,), name="roxxel-signals", daemon=True).start()
    os.register_at_fork(after_in_child=end)  # else a signal to the child would end this process
    _active.set()


def end() -> None:
    """Restore the handlers of before, for SIGINT Python's own: for a command that sets handlers."""
    if not _active.is_set():
        return
    _active.clear()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, _before[number])


def active() -> bool:
    """Whether this process ends by `leave`: it is a command, not a program of the user's."""
    return _active.is_set()


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any], numbers: Iterable[int]) -> Iterator[None]:
    """Have these signals call `handler` within it; for the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A context in which the main thread's handlers, which are others, receive the signals alone."""
    if not _active.is_set():
        yield
        return
    write_end = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)


@contextlib.contextmanager
def cleanup(act: Callable[[], Any]) -> Iterator[None]:
    """A context in which `act` is called, in another thread, before the process leaves by a signal."""
    _cleanups.append(act)
    try:
        yield
    finally:
        _cleanups.remove(act)


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """A new folder within `parent`, deleted at the end and before the process leaves by a signal.

    What deletes it is there before the folder is, so that no signal comes between.
    """
    folder = parent / f"{prefix}{secrets.token_hex(4)}"

    def take_away() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    try:
        with cleanup(take_away):
            folder.mkdir()
            yield folder
    finally:
        take_away()


def leave(number: int) -> NoReturn:
    """End this process for a signal: the last registered cleanup first, then one line on stderr."""
    if not _leaving.acquire(blocking=False):  # another thread is at it
        while True:
            time.sleep(60)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        # Not in this thread: it may hold a lock, such as that of a stream, that is needed.
        thread = threading.Thread(target=_clean, args=(number,), daemon=True)
        thread.start()
        thread.join(CLEANUP_LIMIT_S)
    os._exit(128 + number)


def _clean(number: int) -> None:
    for act in reversed(_cleanups):
        with contextlib.suppress(Exception):
            act()
    with contextlib.suppress(OSError):
        clear = b"\r\x1b[?25h\x1b[K" if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb" else b""
        os.write(2, clear + f"roxxel-dist: ended by {signal.Signals(number).name}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _on_signal(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:  # a second signal ends the process at once
        if signal.getsignal(other) is _on_signal:
            signal.signal(other, signal.SIG_DFL)
    leave(number)


def _watch(read_end: int) -> None:
    while True:
        for number in os.read(read_end, 64):
            if number in SIGNALS and signal.getsignal(number) in (_on_signal, signal.SIG_DFL):
                leave(number)


PAIR_S = 3.0
"""Signals of one request come within so many seconds, also from a busy machine."""
FORWARD_S = 0.15
"""A wrapper hands a SIGINT on sooner than a person presses Ctrl-C again."""
BATCH_JOB = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "SGE_O_HOST", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID")
"""Variables of a job of a batch system, which sends its signals one after the other until its SIGKILL."""
AGAIN = "Ctrl-C again kills them"
"""The words for a person who has asked for a stop."""


def in_batch_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a batch system started this process."""
    return any(environ.get(name) for name in BATCH_JOB)


def kills(number: int, earlier: Sequence[tuple[int, float]], now: float, *, batch_job: bool = False) -> bool:
    """Whether a signal asks to kill what saves; otherwise it is a request to stop, or says nothing new.

    Args:
        number: the signal.
        earlier: the requests before it: (signal, when, in seconds of any clock that only grows).
        now: by the same clock.
        batch_job: a batch system sends signals here: of others than people's only a SIGKILL ends the save.
    """
    if number == signal.SIGQUIT:
        return True
    by_people = [when for before, when in earlier if before == signal.SIGINT]
    if number == signal.SIGINT and by_people:
        return now - by_people[0] >= FORWARD_S
    if batch_job or number not in (signal.SIGINT, signal.SIGTERM):  # a terminal that closes says nothing new
        return False
    by_systems = [when for before, when in earlier if before not in SCHEDULER_SIGNALS]  # which are warnings
    return bool(by_systems) and now - by_systems[0] >= PAIR_S


EXIT_WAIT_S = 10.0
"""How long the interpreter has for its end after something was found to hang."""
_hanging: list[str] = []


def expect_a_hang(what: str) -> None:
    """Note that something of this process hangs, so that its end may too: `limit_the_end` limits that."""
    _hanging.append(what)


def limit_the_end(code: int) -> None:
    """Call it last, before `sys.exit(code)`: if something hangs, this process ends so after `EXIT_WAIT_S`."""
    if _hanging:
        timer = threading.Timer(EXIT_WAIT_S, _exit_now, (code,))
        timer.daemon = True
        timer.start()


def _exit_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


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
                f"{os.environ['SLURM_JOB_ID']}`); after more than some seconds the ranks start again"
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


def collect_seldom() -> None:
    """Look through new objects less often; to be called before jax is imported.

    A step leaves no garbage, and what jax imports and traces stays: to look through it took a quarter of a start.
    """
    gc.set_threshold(50_000, 50, 10)
