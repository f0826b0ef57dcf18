"""A study in an object store: the copy of it that a driver works from, and its trials on hosts that share no disk.

The store is the truth: the copy is made from it at every start. Objects are named as the files of a local study. A
trial keeps its files in the cache of its host.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.lease import Lease, is_renewed
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.place.bucket_folder import BucketFolder
from roxxel_dist.place.directory import DEFINITION, JOURNAL
from roxxel_dist.process.durable import cache_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import release_lock, wait_for_lock
from roxxel_dist.sweep.study.confirm import EXPECTED, FOLDER
from roxxel_dist.sweep.study.folder import BASE, EXTRAS, StudyDir
from roxxel_dist.sweep.study.journal import WAIT_S, Journal
from roxxel_dist.sweep.study.stored_journal import JournalWriter, read_journal
from roxxel_dist.sweep.trial.process import TrialTask
from roxxel_dist.sweep.trial.trial import Event, config_file, run
from roxxel_dist.sweep.wandb_server import agent_trial

LEASE = "study.lease"
FILES = (BASE, EXTRAS, DEFINITION)
"""Files in the order in which they are written: where the last one is, all are."""


class StudyBucket:
    """A study in an object store.

    Attributes: `url`, where it is; `path`, the folder of the copy, which has the files of a local study; `is_there`,
    whether it was begun when `fetch` looked.
    """

    def __init__(self, store: ObjectStore, path: Path) -> None:
        self.url: ObjectUrl = store.url
        self.path: Path = path
        self.is_there: bool = False
        self._store = store
        self._lease: Lease | None = None

    @property
    def is_searched(self) -> bool:
        """Whether a driver renews its lease. Raises StoreError."""
        return is_renewed(self._store, LEASE)

    @property
    def files(self) -> StudyDir:
        """The files of the copy."""
        return StudyDir(self.path, self.url)

    def fetch(self) -> None:
        """Make the copy what the store has. Raises ValueError where the journal is damaged, StoreError."""
        definitions = {name: self._read(name) for name in FILES}
        self.is_there = definitions[DEFINITION] is not None
        if not self.is_there:
            definitions = dict.fromkeys(FILES)  # what a start has left that was killed
        for name, data in definitions.items():
            if data is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                write_file(self.path / name, data)
        self._copy_journal(read_journal(self._store).data if self.is_there else b"")

    def _copy_journal(self, data: bytes) -> None:
        copy = self.path / JOURNAL
        # If the local file only extends the bucket's, no other driver has continued: keep the lines that were not sent.
        if not (data and copy.is_file() and copy.read_bytes().startswith(data)):
            write_file(copy, data)
            if not data:
                copy.unlink()

    def fetch_file(self, name: str) -> None:
        """Copy one of its other files too, where it is there. Raises StoreError."""
        if (data := self._read(name)) is not None:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path / name, data)

    def fetch_confirmation(self) -> None:
        """Copy its confirmation too, where one was begun. Raises what `fetch` raises."""
        self.fetch_file(EXPECTED)
        if (self.path / EXPECTED).is_file():
            (self.path / FOLDER).mkdir(exist_ok=True)
            store = ObjectStore.open(self.url.join(FOLDER), timeout_s=self._store.timeout_s)
            StudyBucket(store, self.path / FOLDER).fetch()

    def remove(self, name: str) -> None:
        """Delete one of its files in the store, where it is there. Raises StoreError."""
        self._store.delete([name])

    def hold(self, log: Callable[[str], None]) -> None:
        """Be the only driver from now on, until `release`; makes the copy again. Raises LeaseHeldError if there is
        another."""
        self._lease = Lease.take(self._store, LEASE, "sweep", wait_s=WAIT_S, log=log)
        self.fetch()

    def release(self) -> None:
        """Let others have it; of a study that was not begun nothing stays."""
        if self._lease is None:
            return
        if self.is_there:
            self._lease.release()
        else:
            with suppress(StoreError):  # it expires by itself
                self._lease.discard()
        self._lease = None

    def create(self) -> None:
        """Send the files of a study that begins, once `hold` was called. Raises StoreError."""
        for name in FILES:
            if (self.path / name).is_file():
                self._store.write(name, (self.path / name).read_bytes())
        self.is_there = True

    def rollback(self) -> None:
        """Undo `create`; the lease is held until all is deleted."""
        self._store.delete([DEFINITION, EXTRAS, BASE, JOURNAL])
        self.is_there = False

    @contextmanager
    def journal(self, log: Callable[[str], None]) -> Iterator[Journal]:
        """The journal, for the driver that holds the study. Raises what `Journal` and `JournalWriter` raise."""
        assert self._lease is not None
        stored = read_journal(self._store)
        with (
            JournalWriter(self._store, stored, self._lease) as writer,
            Journal(self.path, log, stored=writer) as journal,
        ):
            if unsent := (self.path / JOURNAL).read_bytes()[len(stored.data) :]:
                writer.add(unsent, soon=True, wait=True)
            yield journal

    def send(self, path: Path) -> str:
        """Send a file of the copy; returns its address. Raises StoreError."""
        name = path.relative_to(self.path)
        self._store.upload(path, name.as_posix())
        return str(self.url.join(*name.parts))

    def send_page(self, page: Path) -> str:
        """Send the report's page and the files beside it; returns the page's address. Raises StoreError."""
        addresses = {path: self.send(path) for path in sorted(page.parent.iterdir()) if path.is_file()}
        return addresses[page]

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.read(name)
        except StoreNotFoundError:
            return None

    def check_free(self) -> None:
        """Raises ValueError where no study is there, and something else is."""
        if self.is_there:
            return
        others = [info.key for info in self._store.list() if info.key not in (BASE, EXTRAS, LEASE)]
        others = [key for key in others if not key.startswith((".", f"{LEASE}."))]
        if others:
            raise UserError(f"--study {self.url} holds {others[0]}, and is not a study: name another place")


@contextmanager
def driver_bucket(
    url: ObjectUrl, log: Callable[[str], None], cache_dir: str | None, timeout_s: float
) -> Iterator[StudyBucket]:
    """A study in a bucket, for its driver: its copy, below `cache_dir` or in the user's cache, is for one process at a
    time.

    Raises ValueError where another process of this host has it, or the prefix holds something else; StoreError.
    """
    path = studies_folder(cache_dir) / f"{url.name}-{sha256(str(url).encode()).hexdigest()[:16]}"
    path.mkdir(parents=True, exist_ok=True)
    lock = wait_for_lock(
        path.with_name(f"{path.name}.lock"),
        lambda holder: f"waiting up to {WAIT_S:g} s for {holder}, which runs {url}",
        lambda holder: (
            f"--study {url}: {holder} runs this study, and did not end within {WAIT_S:g} s: stop it, or name another "
            "place"
        ),
        limit_s=WAIT_S,
        log=log,
    )
    try:
        bucket = StudyBucket(ObjectStore.open(url, timeout_s=timeout_s), path)
        bucket.fetch()
        bucket.check_free()
        try:
            bucket.hold(log)
            yield bucket
        finally:
            bucket.release()
    finally:
        release_lock(lock)


@contextmanager
def reader_bucket(url: ObjectUrl, timeout_s: float) -> Iterator[StudyBucket]:
    """A study in a bucket as it is now, for reading; there may be none. Raises ValueError, StoreError."""
    with TemporaryDirectory(prefix="roxxel-study-") as folder:
        bucket = StudyBucket(ObjectStore.open(url, timeout_s=timeout_s), Path(folder))
        bucket.fetch()
        yield bucket


SEND_S = 4.0
"""Seconds to send a trial's log: fewer than `ray_executor.END_S` leaves after the save."""


def studies_folder(cache_dir: str | None) -> Path:
    """The folder of this host for studies in buckets: below `cache_dir`, or the user's cache."""
    return Path(cache_dir or cache_folder()).absolute() / "studies"


def on_this_host(task: TrialTask) -> TrialTask:
    """The task with the paths of this host: those of the study count from the cache."""
    root = studies_folder(task.config.get("cache_dir"))
    local_dir = root / Path(task.run_dir).parts[0]
    corpus, data = task.corpus, task.data_path
    if corpus is not None:
        corpus, data = {**corpus, "folder": str(root / corpus["folder"])}, data and str(root / data)
    directory = task.directory if task.directory and os.path.isdir(task.directory) else None
    folder = BucketFolder(str(task.run_url), local_dir).folder
    paths: dict[str, Any] = {"run_dir": str(folder), "log": str(root / task.log), "local_dir": str(local_dir)}
    return replace(task, corpus=corpus, data_path=data, directory=directory, **paths)


def run_in_bucket(fields: Mapping[str, Any]) -> Iterator[Event]:
    """Run a trial, as `run` or `agent_trial` does; the log, whose address a failure names, and the config go to the
    study when the attempt has ended."""
    task = TrialTask(**fields)
    assert task.bucket is not None
    here = on_this_host(task)
    store = ObjectStore.open(task.bucket, timeout_s=SEND_S)
    events = (run if task.wandb_sweep is None else agent_trial)(asdict(here))
    try:
        for event in events:
            if (failure := event.get("fail")) and failure.get("log"):
                yield {"fail": {**failure, "log": str(store.url.join(*_key(task.log)))}}
            else:
                yield event
    finally:
        if isinstance(events, Generator):  # the trial ends here, and not when its events are collected
            events.close()
        for path, name in ((here.log, task.log), (config_file(here), config_file(task))):
            _send(store, Path(path), "/".join(_key(name)))


def _key(path: str | Path) -> tuple[str, ...]:
    """The key of an object, by the parts of a path whose first one is the study's folder."""
    return Path(path).parts[1:]


def _send(store: ObjectStore, path: Path, key: str) -> None:
    """Send one of a trial's small files, if possible; none of them is needed to go on."""
    try:
        if path.is_file():
            store.upload(path, key)
    except (StoreError, OSError) as error:
        print(f"roxxel-dist: {path} is not in {store.url}: {error}", file=sys.stderr, flush=True)
