"""The cache of objects on a disk of the host, shared by its processes without locks: each chunk of an object is a file.

`chunks/XX/HASH-N` has the bytes of chunk N of an object and nothing else; HASH is of the object's address, ETag and
size, XX of HASH-N. A file is written under another name and renamed, so it is there whole or not at all. After a power
failure it may have lost bytes: a reader compares it with the checksums of its object (`fetch`).

- *Once a host*: `HASH-N.part` means that a process fetches the chunk. Others wait for it, but not for longer than
  `CLAIM_S`: it may have been killed. Two that fetch the same chunk do no harm: their bytes are the same.
- *Eviction*: a read sets the time of a file. A process that has written enough looks at the files of the same set, and
  unlinks the least recently used. A process that has a file open still reads all of it.
- *A full disk* takes nothing more: `write` unlinks old files, and if that is not enough the cache is left alone for
  `PAUSE_S`, after one line in the log.
"""

import errno
import logging
import os
import random
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError

PART = ".part"
CLAIM_S = 5.0
STALE_S = 60.0
"""Age of a `.part` file whose process is taken for dead."""
PAUSE_S = 60.0
FOLDERS = 256
SET_BYTES = 1 << 26
"""The least size of a set of folders. Each set has its share of the cache, so that eviction looks at few files."""
LOOK = 16
"""A process looks after it has written 1 / this part of a set."""
HIGH, LOW = 7 / 8, 3 / 4
"""Of the size of a set, what begins an eviction, and what it leaves: several processes write between two looks."""
DISK_BLOCK = 4096
UNUSED_S = 30 * 86400.0
"""Indexes that were not used for so long are deleted."""
FULL = (errno.ENOSPC, errno.EDQUOT)

log: logging.Logger = logging.getLogger(__name__)


class CacheError(UserError):
    """The folder cannot be used as a cache: the message names cache_dir."""


class ChunkCache:
    """Files in `folder`, of about `capacity` bytes in all. Thread-safe; other processes may use the folder too. Raises
    CacheError: the folder cannot be created or written."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder: Path = folder
        self.capacity: int = capacity
        self.sets: int = 1 << max(0, min(FOLDERS, capacity // SET_BYTES).bit_length() - 1)
        self._chunks, self._indexes = str(folder / "chunks"), folder / "indexes"
        # Where processes begin together, they must not all look at the same time.
        self._written = [int(random.random() * self._set_bytes / LOOK) for _ in range(self.sets)]
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._has_failed = False
        try:
            os.makedirs(self._chunks, exist_ok=True)
            if not os.access(self._chunks, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if error.errno not in FULL:
                raise CacheError(
                    f"cache_dir {folder} cannot be used ({error.strerror}): name a folder that can be written on a "
                    f"local disk"
                ) from error
            self._fail(error)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written now, because the disk is full or has failed."""
        return time.monotonic() < self._paused_until

    @property
    def _set_bytes(self) -> int:
        return self.capacity // self.sets

    # -- chunks

    def read(self, name: str, size: int) -> bytes | None:
        """The `size` bytes of a file, or None; the bytes are not verified."""
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(size + 1)
            os.utime(path)
        except FileNotFoundError:  # or unlinked meanwhile: then it was read, and is fetched once more
            return None
        except OSError as error:
            self._fail(error)
            return None
        return data if len(data) == size else None

    def touch(self, name: str) -> bool:
        """Whether a file is there; it then counts as used."""
        try:
            os.utime(self._path(name))
        except OSError:
            return False
        return True

    def claim(self, name: str) -> bool:
        """Tell other processes that this one fetches a chunk; False if another does."""
        if self.is_paused:
            return True
        path = self._path(name) + PART
        for _ in range(2):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            except FileExistsError:
                with suppress(OSError):
                    if abs(time.time() - os.stat(path).st_mtime) < CLAIM_S:
                        return False
                    os.utime(path)  # its process was killed: this one takes it over
                return True
            except FileNotFoundError:
                with suppress(OSError):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                continue
            except OSError as error:
                self._fail(error)
            return True
        return True

    def release(self, name: str) -> None:
        """Take a claim back."""
        with suppress(OSError):
            os.unlink(self._path(name) + PART)

    def write(self, name: str, data: bytes | memoryview) -> bool:
        """Write a file, and evict old ones where there are too many. Returns whether it was written."""
        if self.is_paused:
            return False
        path, which = self._path(name), zlib.crc32(name.encode()) % self.sets
        try:
            try:
                _write(path, data)
            except OSError as error:
                if error.errno not in FULL or not self._evict(which, used_share=0.75):
                    raise
                _write(path, data)  # others have filled the disk: the cache is smaller than it may be
        except OSError as error:
            self._fail(error)
            self.release(name)
            return False
        with self._lock:
            self._written[which] += _on_disk(len(data))
            is_due = self._written[which] >= self._set_bytes // LOOK
            if is_due:
                self._written[which] = 0
        if is_due:
            self._evict(which)
        return True

    def drop(self, name: str) -> None:
        """Delete a damaged file."""
        with suppress(OSError):
            os.unlink(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._chunks}/{zlib.crc32(name.encode()) % FOLDERS:02x}/{name}"

    def _evict(self, which: int, used_share: float = 1.0) -> int:
        """Unlink the least recently used files of a set, down to `LOW` of its size or `used_share` of its files.
        Returns the number of files."""
        files: list[tuple[float, int, str]] = []
        now = time.time()
        # FOLDERS is a multiple of `sets`: these folders have all names of the set.
        for folder in range(which, FOLDERS, self.sets):
            for entry in _entries(f"{self._chunks}/{folder:02x}"):
                with suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(PART):
                        files.append((stat.st_mtime, _on_disk(stat.st_size), entry.path))
                    elif now - stat.st_mtime > STALE_S:
                        os.unlink(entry.path)
        used = sum(size for _, size, _ in files)
        if used_share == 1.0 and used <= self._set_bytes * HIGH:
            return 0
        files.sort()
        count, most = 0, min(self._set_bytes * LOW, used * used_share)
        while used > most and count < len(files):
            _, size, path = files[count]
            with suppress(OSError):  # another process evicts too
                os.unlink(path)
            used -= size
            count += 1
        return count

    # -- indexes

    def index_file(self, key: str) -> Path:
        """The path of an index of shards; `key` identifies its contents."""
        return self._indexes / f"{xxhash.xxh3_64_hexdigest(key.encode())}.index"

    def write_index(self, path: Path, data: bytes) -> None:
        """Write an index, and delete those that were not used for a month. On a full disk it is not written."""
        try:
            self._indexes.mkdir(parents=True, exist_ok=True)
            for entry in _entries(str(self._indexes)):
                with suppress(FileNotFoundError):  # a process that begins too has renamed, or deleted, it
                    if time.time() - entry.stat().st_mtime > UNUSED_S:
                        os.unlink(entry.path)
            write_file(path, data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Go on without the cache for a while."""
        self._paused_until = time.monotonic() + PAUSE_S
        if not self._has_failed:
            self._has_failed = True
            what = "the disk is full" if error.errno in FULL else error.strerror
            log.warning(
                "cache_dir %s: %s. Data from the bucket is used without the cache, and fetched again when it is needed "
                "again: make room, lower cache_gb, or name a cache_dir on another disk",
                self.folder,
                what,
            )


def _entries(folder: str) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def _write(path: str, data: bytes | memoryview) -> None:
    with open(path + PART, "wb", buffering=0) as file:  # its folder was made by `claim`
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
    with suppress(FileNotFoundError):  # another process has taken the claim over, and has renamed the same bytes
        os.rename(path + PART, path)
