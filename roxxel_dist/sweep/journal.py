"""The record of a study: append-only JSON lines, each on the disk before anything is done about it, by one writer."""

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
from roxxel_dist.data.file_lock import wait_for_lock
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
            self._lock = wait_for_lock(
                self._study / LOCK,
                lambda holder: f"waiting up to {self._wait_s:g} s for {holder}, which runs {self._study}",
                lambda holder: (
                    f"--study {self._study}: {holder} runs this study, and did not end within {self._wait_s:g} s: "
                    "stop it, or name another folder"
                ),
                limit_s=self._wait_s,
                say=self._say,
            )
        except OSError as error:
            raise ValueError(
                f"--study {self._study}: cannot be written ({error.strerror}): choose another folder, or change its "
                "permissions"
            ) from error
        try:
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
