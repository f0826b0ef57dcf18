"""Copies of folders to buckets, from buckets, and between them: resumable, verified, and complete or absent."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from roxxel_dist.cluster.durable import make_folder, sync_folder, write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.file_lock import holder, is_lock_of, take_lock
from roxxel_dist.objects.copy_record import RECORD, CopiedFile, CopyRecord
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.store import ObjectInfo, ObjectStore
from roxxel_dist.objects.tree import BucketSource, Source, SourceFile, digest, is_same, source_file
from roxxel_dist.utils.voice import argument

THREADS = 4
"""Files at a time; a large file is sent in parallel parts."""
SUFFIX = ".copying"

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The result of a copy: the number of files, how many were copied now, and their bytes."""

    files: int
    sent: int
    sent_bytes: int


def copy_to_bucket(
    source: Source,
    store: ObjectStore,
    files: Sequence[SourceFile],
    *,
    stage: Callable[[str], int],
    advance: Advance,
    overwrite: bool = False,
) -> Copied:
    """Copy files to the prefix of a store.

    Objects that already have the same content, by the record of earlier tries or by their bytes, are not sent again.

    Args:
        source: of the files.
        store: the destination.
        files: of the source.
        stage: the stage of a name: all files of one stage are sent before the next stage begins.
        advance: called with the number of copied bytes.
        overwrite: replace objects that have other content.

    Raises:
        ValueError: an object with other content exists, and `overwrite` is off.
        StoreError: the store fails, or has another object than the one sent.
    """
    there = {info.key: info for info in store.list()}
    record = _record_in(store)
    absent: list[SourceFile] = []

    def look(file: SourceFile) -> None:
        info = there.get(file.name)
        if info is not None and _is_there(source, store, file, info, record):
            advance(file.size)
            return
        if info is not None and not overwrite:
            url = store.url.join(file.name)
            raise UserError(f"{url} exists with other content: choose another place, or give {argument('overwrite')}")
        absent.append(file)

    def send(file: SourceFile) -> None:
        with source.local(file) as (path, xxh3):
            record.add(file.name, _copied(file, xxh3, store.upload(path, file.name)))
        advance(file.size)

    _in_threads(look, files)  # before any change
    absent.sort(key=lambda file: (stage(file.name), file.name))
    try:
        for _, group in groupby(absent, key=lambda file: stage(file.name)):
            _in_threads(send, list(group))
    finally:
        with suppress(StoreError):  # report the error that ends the copy
            record.flush()
    _compare(store, files, record)
    return Copied(files=len(files), sent=len(absent), sent_bytes=sum(file.size for file in absent))


class Sender:
    """Sends files as they are written, before `copy_to_bucket` copies their folder. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._record = store, _record_in(store)

    def send(self, name: str, path: Path) -> None:
        """Send a file; it may be moved afterwards."""
        file, xxh3 = source_file(name, path), digest(path)
        self._record.add(name, _copied(file, xxh3, self._store.upload(path, name)))

    def flush(self) -> None:
        """Save the record of sent files."""
        self._record.flush()


def copy_to_folder(source: BucketSource, folder: Path, files: Sequence[SourceFile], advance: Advance) -> Copied:
    """Copy objects to a new or empty folder. It appears when all of them are copied.

    Raises:
        ValueError: the folder is not empty, or another process copies to it.
        StoreError: the store fails, or the received bytes are damaged.
    """
    _check_free(folder)
    make_folder(folder.absolute().parent)
    staged, lock_file = folder.with_name(f".{folder.name}{SUFFIX}"), folder.with_name(f".{folder.name}.lock")
    lock = take_lock(lock_file)
    if lock is None:
        raise UserError(
            f"{folder}: {holder(lock_file)} is copying to it now: wait until it ends, or choose another place"
        )
    try:
        _check_free(folder)  # again under the lock: another copy may have ended meanwhile
        copied = _fill(source, staged, files, advance)
        (staged / RECORD).unlink(missing_ok=True)
        for path, _, _ in os.walk(staged):
            sync_folder(Path(path))
        _check_free(folder)  # a data set may have been written there meanwhile
        with suppress(FileNotFoundError):
            folder.rmdir()
        staged.rename(folder)
        sync_folder(folder.absolute().parent)
    finally:
        if is_lock_of(lock, lock_file):
            lock_file.unlink()
        os.close(lock)
    return copied


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: choose another place, or remove it")


def _fill(source: BucketSource, staged: Path, files: Sequence[SourceFile], advance: Advance) -> Copied:
    """Download the objects to a hidden folder, which may have some from an earlier try."""
    staged.mkdir(exist_ok=True)
    path = staged / RECORD
    record = CopyRecord(path.read_bytes() if path.exists() else None, lambda data: write_file(path, data))
    wanted = {file.name for file in files} | {RECORD}
    for left in [left for left in staged.rglob("*") if left.is_file()]:
        if left.relative_to(staged).as_posix() not in wanted:
            left.unlink()
    sent: list[int] = []

    def one(file: SourceFile) -> None:
        target, earlier = staged / file.name, record.files.get(file.name)
        if not (earlier and is_same(earlier, file) and target.is_file() and digest(target) == earlier.xxh3):
            target.parent.mkdir(parents=True, exist_ok=True)
            xxh3 = source.fetch(file, target)
            record.add(file.name, CopiedFile(size=file.size, xxh3=xxh3, source=file.version))
            sent.append(file.size)
        advance(file.size)

    try:
        _in_threads(one, files)
    finally:
        record.flush()
    return Copied(files=len(files), sent=len(sent), sent_bytes=sum(sent))


def _is_there(source: Source, store: ObjectStore, file: SourceFile, there: ObjectInfo, record: CopyRecord) -> bool:
    """Whether an object has the bytes of a file, by the record or by reading it."""
    earlier = record.files.get(file.name)
    known = earlier if earlier is not None and (there.size, there.etag) == (earlier.size, earlier.etag) else None
    if is_same(known, file):
        return True
    if there.size != file.size:
        return False
    with source.local(file) as (_, xxh3):
        if (known.xxh3 if known is not None else _digest_of(store, there)) != xxh3:
            return False
    record.add(file.name, _copied(file, xxh3, there.etag))
    return True


def _record_in(store: ObjectStore) -> CopyRecord:
    data = None
    with suppress(StoreNotFoundError):
        data = store.read(RECORD)
    return CopyRecord(data, lambda data: store.write(RECORD, data))


def _copied(file: SourceFile, xxh3: str, etag: str) -> CopiedFile:
    return CopiedFile(size=file.size, xxh3=xxh3, source=file.version, etag=etag)


def _digest_of(store: ObjectStore, info: ObjectInfo) -> str:
    """The xxh3-128 of an object without a record."""
    with BucketSource(store).local(SourceFile(name=info.key, size=info.size, version=info.etag)) as (_, xxh3):
        return xxh3


def _compare(store: ObjectStore, files: Sequence[SourceFile], record: CopyRecord) -> None:
    """Raises StoreError if the store has other objects than those sent."""
    there = {info.key: info for info in store.list()}
    for file in files:
        info, wanted = there.get(file.name), record.files[file.name]
        url = store.url.join(file.name)
        if info is None:
            raise StoreNotFoundError(f"copy {url}: it was deleted while the copy ran: start the command again")
        if (info.size, info.etag) != (wanted.size, wanted.etag):
            raise StoreError(
                f"copy {url}: it was replaced while the copy ran: start the command again when no program writes to it"
            )


def _in_threads(one: Callable[[SourceFile], None], files: Sequence[SourceFile]) -> None:
    """Run `one` for each file in threads; after the first error no other file is started."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        for _ in pool.map(one, files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
