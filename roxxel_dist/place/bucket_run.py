"""A run that is kept in a bucket: the lease of the job that trains in it, its checkpoints, the mirror of the rest.

Nothing is deleted there because a local file is gone: the local folder is a copy, from which cleaners may delete files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from roxxel_dist.checkpoint.digests import files_below
from roxxel_dist.checkpoint.metadata import CHECKPOINTS
from roxxel_dist.checkpoint.remote import RemoteCheckpoints
from roxxel_dist.cluster.distributed import is_primary, process_index
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.place.bucket_folder import AT_ONCE, LEASE, BucketFolder, FileState, state_of
from roxxel_dist.place.directory import DATA, LOGS
from roxxel_dist.process.durable import ANSWER, REQUEST, SAVE_FOLDER, save_mailbox

if TYPE_CHECKING:
    from roxxel_dist.objects.lease import Lease
    from roxxel_dist.objects.store import ObjectStore

INTERVAL_S = 3.0
"""Between two looks at the files."""
ROWS = ("metrics.jsonl", "training_log.csv")
"""Files that must be in the bucket before a checkpoint of the same steps."""
BYTES_PER_S = 1 << 20
"""Of one file that grows: a large one is sent less often."""

log: logging.Logger = logging.getLogger("roxxel_dist.objects")


class RunMirror:
    """Sends the files of a local run directory to the prefix of the run, from a thread of its own.

    `is_mine` says whether this rank sends a file, by its name below the folder; the one rank that `serves` takes
    requests to save from the bucket, and answers them there.
    """

    def __init__(self, store: ObjectStore, folder: Path, is_mine: Callable[[str], bool], *, serves: bool) -> None:
        self._store, self._folder, self._is_mine, self._serves = store, folder, is_mine, serves
        self._sent: dict[str, tuple[FileState | None, float]] = {}
        """The state of each file that was sent, and when it is to be looked at again."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._problem: Exception | None = None
        self._serving: list[str] = []  # requests of the bucket that are in the folder
        self._unreadable: dict[str, str] = {}
        """By file, the error of the disk that kept it from being sent, and is logged."""
        self._thread = threading.Thread(target=self._work, name="run mirror", daemon=True)

    def note_fetched(self, name: str, state: FileState | None) -> None:
        """Note that the object of a name is what the local file was in a state; None: an older state of it, or none."""
        self._sent[name] = state, 0.0

    def start(self) -> None:
        """Begin; delete the requests and answers that an earlier process left."""
        if self._serves:
            self._store.delete([info.key for info in self._store.list(SAVE_FOLDER)])
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread: StoreError where files could not be sent within the store's time limit."""
        if self._problem is not None:
            raise self._problem

    def flush(self) -> None:
        """Send all that has changed. Raises StoreError."""
        self._pass(everything=True)

    def flush_rows(self) -> None:
        """Send the rows of the log; nothing large waits in between. Raises StoreError, and OSError of the disk."""
        for name in ROWS:
            if (self._folder / name).is_file() and self._is_mine(name):
                self._send(name, self._folder / name)

    def close(self, limit_s: float | None = None) -> None:
        """Send all that has changed and end, within so many seconds where given. Raises StoreError where it failed."""
        self._over.set()
        if self._thread.ident is not None:  # else it never began
            self._thread.join(limit_s)
        if limit_s is not None:  # after a failure: the thread sends the rest, as far as it comes
            return
        self.check()
        self.flush()

    def _work(self) -> None:
        try:
            while not self._over.wait(INTERVAL_S):
                self._pass(everything=False)
            self._pass(everything=True)
        except Exception as error:  # `check` raises it in the run's own thread
            self._problem = error

    @contextlib.contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Log an error of the disk once; the next pass tries again. Errors of the store pass."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            text = error.strerror or str(error)
            if self._unreadable.get(name) != text:
                log.warning("%s: %s cannot be sent to the bucket (%s): it is tried again", self._folder, name, text)
            self._unreadable[name] = text
        else:
            self._unreadable.pop(name, None)

    def _pass(self, *, everything: bool) -> None:
        now, there = time.monotonic(), dict[str, Path]()
        with self._readable("its list of files"):
            there = {str(path.relative_to(self._folder)): path for path in self._files()}
        for name, path in sorted(there.items()):
            if everything or now >= self._sent.get(name, (None, 0.0))[1]:
                with self._readable(name):
                    self._send(name, path)
        if self._serves and self._thread.ident is not None:  # `start` clears what a dead run was asked
            with self._readable("requests to save"):
                self._serve_requests()

    def _files(self) -> list[Path]:
        """What this rank sends: no checkpoints, which have their own way, and nothing hidden."""
        top = [path for path in self._folder.iterdir() if not path.name.startswith(".") and path.name != CHECKPOINTS]
        paths = [file for path in top for file in (files_below(path) if path.is_dir() else [path])]
        return [
            path for path in paths
            if not path.name.startswith(".") and path.is_file() and self._is_mine(str(path.relative_to(self._folder)))
        ]  # fmt: skip

    def _send(self, name: str, path: Path) -> None:
        with self._lock:  # else the older one of two states might be sent last
            try:
                state = state_of(path)
                if state == self._sent.get(name, (None, 0.0))[0]:
                    return
                if state[0] <= AT_ONCE:
                    self._store.write(name, path.read_bytes())
                else:
                    self._store.upload(path, name)
            except FileNotFoundError as error:  # taken away meanwhile
                if isinstance(error, StoreNotFoundError):  # the bucket
                    raise
                return
            self._sent[name] = state, time.monotonic() + state[0] / BYTES_PER_S

    def _serve_requests(self) -> None:
        """Pass requests in the bucket to the folder, and answers back."""
        box = save_mailbox(self._folder)
        for key in [info.key for info in self._store.list(SAVE_FOLDER)]:
            if key.endswith(REQUEST):
                if (name := Path(key).stem) not in self._serving:
                    self._serving.append(box.post({}, name))
                self._store.delete([key])
        for name in [*self._serving]:
            if (answer := box.take_answer(name)) is not None:
                self._store.write(f"{SAVE_FOLDER}/{name}{ANSWER}", json.dumps(answer).encode())
                self._serving.remove(name)


class BucketRun(BucketFolder):
    """A run below a prefix of a bucket, to be trained, or to be read with its checkpoints; made as a `BucketFolder`."""

    _lease: Lease | None = None
    _mirror: RunMirror | None = None

    @cached_property
    def checkpoints(self) -> RemoteCheckpoints:
        """The checkpoints of the run."""
        folder = self.folder / CHECKPOINTS
        return RemoteCheckpoints(self._store, folder, before_table=self._before_table, check_run=self.check)

    def take(self) -> None:
        """Take the lease, on rank 0, so that no other process trains in the run, and fetch the newest files.

        Raises ValueError if another process has it; the message names that process and its last sign of life.
        """
        from roxxel_dist.objects.lease import Lease

        job = os.environ.get("ROXXEL_RUN_ID")
        self._lease = Lease.take(self._store, LEASE, "roxxel-dist train", job=job)
        self._holds = True
        self.pull()

    def begin(self) -> None:
        """Send the files of the folder, and from now on its changes; on every rank."""
        own = f"{LOGS}/rank-{process_index()}.log"

        def is_mine(name: str) -> bool:
            if is_primary():
                return not name.startswith(f"{DATA}/") and (not name.startswith(f"{LOGS}/rank-") or name == own)
            return name == own or name.startswith("profile/")

        self._mirror = RunMirror(self._store, self.folder, is_mine, serves=is_primary())
        for name, state in self._fetched.items():
            if is_mine(name):
                self._mirror.note_fetched(name, state)
        self._mirror.flush()
        self._mirror.start()

    def send_data(self) -> None:
        """Send, on rank 0, the shards made from a text, before the run's config: only that makes the run valid."""
        self._store.delete([info.key for info in self._store.list(f"{DATA}/")])
        for path in files_below(self.folder / DATA):
            if not path.name.startswith("."):
                self._store.upload(path, str(path.relative_to(self.folder)))

    def fetch_data(self) -> None:
        """Fetch those shards, where this host does not have them."""
        for info in self._store.list(f"{DATA}/"):
            self._pull(info)

    def check(self) -> None:
        """Raises what ended the mirror, such as StoreError, and LeaseLostError where another job has the run."""
        if self._mirror is not None:
            self._mirror.check()
        if self._lease is not None and self._lease.lost is not None:
            self._lease.check()

    def _before_table(self) -> None:
        if self._mirror is not None:
            self._mirror.flush_rows()
        if self._lease is not None:
            self._check_renewed(self._lease)

    @staticmethod
    def _check_renewed(lease: Lease) -> None:
        """Raises LeaseLostError where another job may have the run by now; after a store that was away for long, the
        next renewal is waited for."""
        from roxxel_dist.objects.lease import RENEW_S, LeaseLostError

        end = time.monotonic() + 2 * RENEW_S
        while True:
            try:
                return lease.check()
            except LeaseLostError:
                if lease.lost is not None or time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def close(self, limit_s: float | None = None) -> None:
        """Send what is left, within so many seconds where given, and let the run go. Raises StoreError."""
        try:
            if self._mirror is not None:
                self._mirror.close(limit_s)
        finally:
            self._mirror = None
            if self._lease is not None:
                self._lease.release()
            self._lease = None

    def abandon(self, limit_s: float) -> None:
        """`close` after a failure: files that cannot be sent within so many seconds stay local."""
        with contextlib.suppress(StoreError):
            self.close(limit_s)
