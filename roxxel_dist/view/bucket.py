"""A run in a bucket: the files that a frame shows are copied to a local folder, repeatedly."""

import os
import shutil
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CURSOR, DAMAGED, META, TABLE
from roxxel_dist.cluster.durable import cache_folder, make_folder, write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.lease import is_renewed
from roxxel_dist.objects.store import ObjectInfo, ObjectStore
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.place.bucket_folder import LEASE
from roxxel_dist.place.directory import CONFIG, DEFINITION, METRICS, is_run, no_run
from roxxel_dist.train.log.timeline import NAME
from roxxel_dist.view.run import RunReader, RunState

PULL_S = 3.0
"""Seconds between two reads of the bucket: a run sends its changes at the same interval."""
TIMEOUT_S = 20.0
SHOWN = "top"
"""The subfolder of the cache for copies of runs."""
FILES = (CONFIG, METRICS, NAME, CURSOR)


class BucketRunReader(RunReader):
    """Reads a run in a bucket. While the store is unavailable, the state does not change.

    Raises:
        ValueError: it is not the address of a run.
        StoreError: the first read of the store fails.
    """

    def __init__(self, url: str) -> None:
        address = ObjectUrl.parse(url)
        folder = cache_folder() / SHOWN / address.scheme / address.bucket / address.key
        super().__init__(folder, str(address))
        self._copy = RunCopy(ObjectStore.open(address, timeout_s=TIMEOUT_S), folder)
        self._copy.pull()
        if not is_run(folder):
            what = f"{address} is a study in a bucket, and top shows runs there: use `roxxel-dist report {address}`"
            raise UserError(what if self._copy.is_study else no_run(folder, str(address)))
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


class RunCopy:
    """The copy of the small files of a run, and of the list of its checkpoints.

    Attributes:
        is_trained: whether a process renewed its lease, at the last `pull`.
        is_study: whether it is a study.
    """

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._etags: dict[str, str] = {}
        self.is_trained: bool = False
        self.is_study: bool = False

    def pull(self) -> None:
        """Update the copy from the bucket. Raises StoreError."""
        objects = {info.key: info for info in self._store.list()}
        self.is_trained = LEASE in objects and is_renewed(self._store, LEASE)
        self.is_study = DEFINITION in objects
        make_folder(self._folder / CHECKPOINTS)
        for name in FILES:
            self._fetch(name, objects.get(name))
        checkpoints: dict[str, float] = {}
        for name, info in objects.items():
            top, step, last = (*name.split("/"), "", "")[:3]
            if top == CHECKPOINTS and step.isdecimal() and last in (TABLE, TABLE + DAMAGED):
                checkpoints[step + last.removeprefix(TABLE)] = info.modified
        for path in (self._folder / CHECKPOINTS).iterdir():
            if path.name not in checkpoints:
                shutil.rmtree(path, ignore_errors=True)
        for name, saved in checkpoints.items():
            checkpoint, step = self._folder / CHECKPOINTS / name, name.removesuffix(DAMAGED)
            make_folder(checkpoint)
            (checkpoint / TABLE).touch()
            if name == step:
                self._fetch(f"{CHECKPOINTS}/{step}/{META}", objects.get(f"{CHECKPOINTS}/{step}/{META}"))
            os.utime(checkpoint, (saved, saved))

    def _fetch(self, name: str, info: ObjectInfo | None) -> None:
        path = self._folder / name
        if info is None:
            path.unlink(missing_ok=True)
        elif self._etags.get(name) != info.etag or not path.exists():
            with suppress(StoreNotFoundError):  # deleted after the listing
                write_file(path, self._store.read(name))
                os.utime(path, (info.modified, info.modified))
                self._etags[name] = info.etag


def _follow(copy: RunCopy, over: threading.Event) -> None:
    while not over.wait(PULL_S):
        with suppress(StoreError, OSError):  # it is read again later
            copy.pull()
