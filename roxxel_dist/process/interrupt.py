"""Ctrl-C, SIGTERM and SIGHUP from the first moment of a command: the process ends at once, and in order.

A KeyboardInterrupt does not do that in a process with jax. Raised in jax's callback of the garbage collector it is
printed and forgotten, raised below C++ it can end in a segmentation fault, and a main thread in a long call of C (a
tokenizer's training) does not raise it at all. So nothing is raised here: the main thread is held where it is, a thread
of its own takes away what is half made, and the process leaves with 128 + the signal's number.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

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
    """Within it the main thread's handlers, which are others, receive the signals alone."""
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
    """Within it `act` is called, in another thread and with this one held, before the process leaves by a signal."""
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
