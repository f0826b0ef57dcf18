"""Asking the controller of a job of this machine to stop, and waiting until it has."""

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from roxxel_dist.launcher.jobs import record
from roxxel_dist.launcher.jobs.record import JobRecord

ASK_S = 5.0
"""How long a controller may take to note that it was asked."""
TELL_S = 5.0


def stop(entry: JobRecord, *, kill: bool, timeout_s: float, say: Callable[[str], None]) -> JobRecord:
    """Ask a job to save and leave (`kill`: and kill its ranks), wait for its end, and return its entry.

    A job that was asked before is not asked again: a second request would kill its ranks. After `timeout_s` the entry
    is returned as it is.
    """
    path = record.path_of(entry)
    try:
        controller = os.pidfd_open(entry.controller.pid)
    except ProcessLookupError:
        return record.read(path) or entry
    try:
        if record.is_alive(entry.controller):  # after the open: from here on the descriptor is this very process
            end = time.monotonic() + timeout_s
            _ask(entry, controller, kill=kill, say=say)
            _wait(entry, controller, end, say)
    finally:
        os.close(controller)
    return record.read(path) or entry


def _ask(entry: JobRecord, controller: int, *, kill: bool, say: Callable[[str], None]) -> None:
    path = record.path_of(entry)
    with _alone():
        now = record.read(path)
        if now is not None and now.is_over:
            return
        if now is not None and now.state == "stopping":
            say(f"run {entry.run_id} was asked to stop before")
        else:
            say(f"run {entry.run_id}: its ranks get {entry.grace:g} s to save and leave; --kill does not wait for them")
            _signal(controller)
            _until_noted(entry, controller)
    if kill:
        say(f"run {entry.run_id}: killing its ranks")
        _signal(controller)


def _signal(controller: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(controller, signal.SIGINT)  # SIGTERM is how SLURM asks, to go on later


def _until_noted(entry: JobRecord, controller: int) -> None:
    """Wait until the job says that it stops: two signals at once would be one, and two requests a kill."""
    end = time.monotonic() + ASK_S
    while time.monotonic() < end and not _has_ended(controller, 0.02):
        now = record.read(record.path_of(entry))
        if now is not None and (now.state == "stopping" or now.is_over):
            return


def _wait(entry: JobRecord, controller: int, end: float, say: Callable[[str], None]) -> None:
    begun = time.monotonic()
    while (left := end - time.monotonic()) > 0 and not _has_ended(controller, min(TELL_S, left)):
        now = record.read(record.path_of(entry)) or entry
        step = f", in step {now.step}" if now.step else ""
        say(f"run {entry.run_id} is still {now.state}{step}, {time.monotonic() - begun:.0f} s after the request")


def _has_ended(controller: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(controller, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One request at a time, of whoever asks on this machine."""
    lock = os.open(record.folder(), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
