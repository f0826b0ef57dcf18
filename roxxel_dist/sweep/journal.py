"""The record of a study: append-only JSON lines, each on the disk before anything is done about it, by one writer."""

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from roxxel_dist.data.commit import make_folder, sync_folder
from roxxel_dist.run_directory import take_lock
from roxxel_dist.sweep.history import JOURNAL, History, Trial, read_history, replay, whole

LOCK = ".lock"
WAIT_S = 30.0
"""How long a start waits for the driver before it, which may be ending its trials."""

__all__ = ["History", "Journal", "Trial", "read_history"]


class Journal:
    """The journal of a study, held by one driver while the context is open.

    Args:
        study: the folder; made where it is missing.
        say: shows a line to a person.
        wait_s: how long to wait for a driver that has it.
    """

    def __init__(self, study: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> None:
        self._study, self._say, self._wait_s = study, say, wait_s
        self.history = History()

    def __enter__(self) -> "Journal":
        """Take it, and read it.

        Raises:
            ValueError: another driver holds it, it cannot be written, or it is damaged.
        """
        path = self._study / JOURNAL
        try:
            make_folder(self._study)
            self._lock = os.open(self._study / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"--study {self._study}: cannot be written ({error.strerror}): choose another folder, or change its "
                "permissions"
            ) from error
        try:
            self._claim()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                data = whole(path.read_bytes())
                self.history: History = replay(path, data)
                self._size = len(data)
                os.ftruncate(self._file, self._size)
                sync_folder(self._study)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def append(self, *events: Mapping[str, Any]) -> None:
        """Write events, in one piece; they are on the disk when this returns.

        Numbers that JSON has no form for are written as null. Raises OSError where the disk does not take them.
        """
        now = round(time.time(), 3)
        timed = [{"event": event["event"], "time": now, **finite(event)} for event in events]
        data = "".join(json.dumps(event, allow_nan=False, default=_plain) + "\n" for event in timed).encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):  # a later line must not stand behind half of this one
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        for event in timed:
            self.history.take(event)

    def _has_lock(self) -> bool:
        """Take the lock; false where another has it, or took the file away (a first start that was refused)."""
        if not take_lock(self._lock):
            return False
        path = self._study / LOCK
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(self._lock)):
                return True
        make_folder(self._study)
        os.close(self._lock)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        return False

    def _claim(self) -> None:
        end = time.monotonic() + self._wait_s
        told = False
        while not self._has_lock():
            if time.monotonic() >= end:
                raise ValueError(
                    f"--study {self._study}: {_holder(self._lock)} runs this study, and did not end within "
                    f"{self._wait_s:g} s: stop it, or name another folder"
                )
            if not told:
                self._say(f"waiting up to {self._wait_s:g} s for {_holder(self._lock)}, who runs {self._study}")
                told = True
            time.sleep(0.1)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held already, where there are locks
        except OSError as error:
            self._say(
                f"--study {self._study}: this file system has no locks ({error.strerror}): see to it yourself that "
                "only one driver runs the study; two would damage its journal"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(this_driver()).encode(), 0)


def this_driver() -> dict[str, Any]:
    """Who writes, for people."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no form for."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's own."""
    if hasattr(value, "item"):
        return finite(value.item())
    raise TypeError(f"{value!r} cannot stand in a journal")


def _holder(lock: int) -> str:
    try:
        found = json.loads(os.pread(lock, 4096, 0))
        return f"the driver with pid {found['pid']} on host {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another driver"
