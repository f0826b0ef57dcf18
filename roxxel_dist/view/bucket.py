"""A run in a bucket: the files that a frame shows are fetched into a local folder, repeatedly."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CURSOR, DAMAGED, META, TABLE
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.objects.errors import StoreError
from roxxel_dist.objects.lease import is_renewed
from roxxel_dist.place.bucket_folder import LEASE, BucketFolder
from roxxel_dist.place.directory import CONFIG, DEFINITION, METRICS, is_run, no_run
from roxxel_dist.process.durable import cache_folder, make_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.log.timeline import NAME
from roxxel_dist.view.run import RunReader, RunState

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectInfo

PULL_S, CHECKPOINTS_S = 3.0, 15.0
"""Seconds between two reads of the bucket: a run sends its changes at the same interval; and of its checkpoints, each
of which is a request that is paid for."""
TIMEOUT_S = 20.0
SHOWN = "top"
"""The subfolder of the cache for copies of runs."""
FILES = (CONFIG, METRICS, NAME, CURSOR)
SHOWN_META = re.compile(rf"{CHECKPOINTS}/\d+/{re.escape(META)}")


class BucketRunReader(RunReader):
    """A reader of a run in a bucket. While the store is unavailable, the state does not change. Raises ValueError where
    it is not the address of a run, StoreError where the first read fails."""

    def __init__(self, url: str) -> None:
        self._copy = RunCopy(url)
        super().__init__(self._copy.pull(), str(self._copy))
        if not is_run(self.path):
            what = f"{self._copy} is a study in a bucket, and top shows runs there: use `roxxel-dist report {url}`"
            raise UserError(what if DEFINITION in self._copy.objects else no_run(self.path, str(self._copy)))
        self._over: threading.Event | None = None

    def read(self, job: JobRecord | None = None, *, brief: bool = False, deadline: float | None = None) -> RunState:
        """See `RunReader`; after the first call a thread reads the bucket."""
        if self._over is None:
            self._over = threading.Event()
            weakref.finalize(self, self._over.set).atexit = False
            threading.Thread(target=_follow, args=(self._copy, self._over), name="top bucket", daemon=True).start()
        return super().read(job, brief=brief, deadline=deadline)

    def is_trained(self) -> bool:
        """Whether a process renews its lease."""
        return self._copy.is_trained


class RunCopy(BucketFolder):
    """The files of a run that a frame shows, and the list of its checkpoints, as the bucket has them; `is_trained` says
    whether a process renewed its lease at the last `pull`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, cache_folder() / SHOWN, read_only=True, timeout_s=TIMEOUT_S)
        self.is_trained: bool = False
        self._complete: dict[str, list[ObjectInfo]] = {}  # by step, the small files of checkpoints that have a table
        self._small: list[ObjectInfo] = []  # those of all checkpoints, as they were at the time after it
        self._listed = float("-inf")

    def _list(self) -> list[ObjectInfo]:
        """The files of the run, and the small ones of its checkpoints, whose parts are as many as there are hosts. A
        checkpoint that has its table changes no more, but a start may set the newest two aside, and the oldest goes."""
        files, _ = self._store.list_folder()
        if time.monotonic() < self._listed + CHECKPOINTS_S:
            return files + self._small
        small: list[ObjectInfo] = []
        steps = sorted((name for name in self._store.list_folder(CHECKPOINTS)[1] if name.isdecimal()), key=int)
        complete: dict[str, list[ObjectInfo]] = {}
        for step in steps:
            known = None if step in (*steps[:1], *steps[-2:]) else self._complete.get(step)
            some = self._store.list_folder(f"{CHECKPOINTS}/{step}")[0] if known is None else known
            small += some
            if any(info.key.endswith((TABLE, TABLE + DAMAGED)) for info in some):
                complete[step] = some
        self._complete, self._small, self._listed = complete, small, time.monotonic()
        return files + small

    def pull(self) -> Path:
        """Update the copy from the bucket. Raises StoreError."""
        super().pull()
        self.is_trained = LEASE in self.objects and is_renewed(self._store, LEASE)
        checkpoints: dict[str, float] = {}
        for name, info in self.objects.items():
            top, step, last = (*name.split("/"), "", "")[:3]
            if top == CHECKPOINTS and step.isdecimal() and last in (TABLE, TABLE + DAMAGED):
                checkpoints[step + last.removeprefix(TABLE)] = info.modified
        make_folder(self.folder / CHECKPOINTS)
        for path in (self.folder / CHECKPOINTS).iterdir():
            if path.name not in checkpoints:
                shutil.rmtree(path, ignore_errors=True)
        for name, saved in checkpoints.items():
            checkpoint = self.folder / CHECKPOINTS / name
            make_folder(checkpoint)
            (checkpoint / TABLE).touch()
            os.utime(checkpoint, (saved, saved))
        return self.folder

    def _is_fetched(self, key: str) -> bool:
        return key in FILES or SHOWN_META.fullmatch(key) is not None


def _follow(copy: RunCopy, over: threading.Event) -> None:
    while not over.wait(PULL_S):
        with suppress(StoreError, OSError):  # it is read again later
            copy.pull()
