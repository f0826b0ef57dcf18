"""Requests to stop that this process receives; `train/saves.py` makes them requests to all ranks."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import jax

from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import SCHEDULER_SIGNALS, STATUS_ENV
from roxxel_dist.process.interrupt import in_batch_job, kills

_stop, _stepped = threading.Event(), threading.Event()
_requests: list[tuple[int, float]] = []


@contextlib.contextmanager
def watching_for_stop() -> Iterator[None]:
    """A context in which SIGTERM, SIGHUP, Ctrl-C and the signals of batch systems (SIGUSR1, SIGUSR2, SIGXCPU) ask the
    training loop to stop after the step in hand; another Ctrl-C kills (`interrupt.kills`).

    A command that has done no step yet has nothing to save: it ends at once. A SIGHUP that is ignored (`nohup`) stays
    so.
    """
    _stop.clear()
    _requests.clear()
    _stepped.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        watched.append(signal.SIGHUP)
    watched += [number for number in SCHEDULER_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    with interrupt.paused(), interrupt.handled_by(_on_signal, watched):
        yield


def _on_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    again = number == signal.SIGINT and kills(number, _requests, now, batch_job=in_batch_job())
    _requests.append((number, now))
    if interrupt.active() and (again or not (_stepped.is_set() or jax.process_count() > 1)):
        interrupt.leave(number)
    if again:
        raise KeyboardInterrupt
    is_first = not _stop.is_set()
    _stop.set()
    if is_first and os.environ.get(STATUS_ENV) != "1":  # else the launcher says it
        how = "another Ctrl-C" if number == signal.SIGINT else "Ctrl-C"
        line = f"{signal.Signals(number).name}: finishing this step and saving it; {how} ends without saving"
        with contextlib.suppress(OSError):  # a terminal that is closed
            os.write(2, f"\nroxxel-dist: {line}\n".encode())  # print may not be called here: the handler interrupts one


def stop_requested() -> bool:
    """Whether this process was asked to stop; to be called when a step is done."""
    _stepped.set()
    return _stop.is_set()
