"""The cache of blocks of objects on a disk of the host, shared by its processes.

A folder `blocks-BOOT` in the user's folder has one sparse file for each object, as long as the object, with blocks at
the same offsets as in the object; after them, one byte per cell (a block, or a part of a table) says whether it is
present. Files are mapped read-only and written with pwrite(2), data before its presence bytes, so a process may be
killed at any time.

- *Claims*: a process that fetches cells locks their range of the file (OFD locks, which belong to an open file and end
  with its process). A process that needs the same cells waits for the lock and then finds them in the cache: each host
  fetches them once.
- *Eviction*: every write is a record in the file `order`; a writer evicts the oldest records while the cache is too
  large. It clears the cells' presence bytes, increments `evictions`, and only then makes a hole. If a reader finds the
  same count after its copy as before, its copy is valid.
- Pages reach the disk in any order: after the host has stopped, a cache cannot be trusted, so each boot has a new
  cache, and the caches of earlier boots are deleted.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.reader import map_file, map_files

PAGE = 4096
HEADER = struct.Struct("<4q")
"""The file `cache`: the end and the beginning of `order`, the bytes of its records, and the number of evictions.
"""
RECORD = struct.Struct("<16s5q")
"""A record of the file `order`: the file, the first cell, cells, offset of their presence bytes, the first byte,
bytes."""
ORDER_BYTES = 1 << 20
"""Bytes of the file `order` that are freed at a time."""
PUNCH_HOLE, KEEP_SIZE = 2, 1
FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux with offsets of 64 bits."""
_libc: ctypes.CDLL = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class CacheError(UserError):
    """The cache is not usable: the message names cache_dir or cache_gb."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheFile:
    """The file of one object."""

    name: bytes
    path: Path
    size: int
    """Bytes of the object."""
    cells: int

    @property
    def cells_at(self) -> int:
        """The offset of the presence bytes of the cells."""
        return -(-self.size // PAGE) * PAGE

    @property
    def whole(self) -> int:
        """Bytes of the file."""
        return self.cells_at + -(-self.cells // PAGE) * PAGE


class Claim:
    """An exclusive lock on some cells of a file, to fetch them."""

    def __init__(self, cache: "BlockCache", file: CacheFile, descriptor: int) -> None:
        self._cache, self._file, self._descriptor = cache, file, descriptor

    def put(self, cell: int, cells: int, offset: int, data: bytes | memoryview) -> None:
        """Write `cells` cells from `cell`, with the contents `data`, which begin at the object's byte `offset`.

        Raises CacheError if the disk is full.
        """
        self._cache.make_room(RECORD.pack(self._file.name, cell, cells, self._file.cells_at, offset, len(data)))
        with self._cache.disk_errors():
            _write(self._descriptor, data, offset)
            _write(self._descriptor, b"\1" * cells, self._file.cells_at + cell)

    def forget(self, cell: int, cells: int) -> None:
        """Remove damaged cells."""
        _write(self._descriptor, bytes(cells), self._file.cells_at + cell)


class BlockCache:
    """Blocks in `folder`, of at most `capacity` bytes.

    Raises:
        CacheError: the folder cannot be created or written, or its file system lacks a required feature.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.user_folder: Path = folder
        self.capacity: int = capacity
        self.folder: Path = folder / f"blocks-{_boot()}"
        with self.disk_errors():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # raised by file systems without new folders, such as /proc
                raise self._unusable(error) from error
            users = os.open(self.folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            weakref.finalize(self, os.close, users)
            fcntl.flock(users, fcntl.LOCK_SH)  # held as long as this object lives, at most until the process ends
            self._delete_older()
            with self._lock():
                header = self.folder / "cache"
                if not header.exists():
                    self._check_file_system()
                    write_file(header, bytes(PAGE))
            self._header = map_files([header])[0][: HEADER.size].view(np.int64)

    @property
    def evictions(self) -> int:
        """The number of evictions."""
        return int(self._header[3])

    @property
    def used(self) -> int:
        """Bytes of the blocks in the cache."""
        return int(self._header[2])

    def file(self, key: str, size: int, cells: int) -> CacheFile:
        """The file of an object, which `map` creates. `key` identifies the object."""
        path = self.path(key, ".data")
        return CacheFile(name=path.stem.encode(), path=path, size=size, cells=cells)

    def map(self, file: CacheFile, array: np.ndarray) -> None:
        """Create a file if it is missing, and map it over an array of `reserve_memory`, uint8 [file.whole]."""
        with self.disk_errors(), _opened(file.path) as descriptor:
            if os.fstat(descriptor).st_size != file.whole:
                os.ftruncate(descriptor, file.whole)
            map_file(file.path, array)

    def path(self, key: str, ending: str) -> Path:
        """The path of the file for a key."""
        return self.folder / f"{xxhash.xxh3_64_hexdigest(key.encode())}{ending}"

    @contextmanager
    def claim(self, file: CacheFile, cell: int, cells: int) -> Iterator[Claim]:
        """Wait until no other process fetches any of the cells, and hold their lock within this context."""
        with self.disk_errors():
            descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            with self.disk_errors():
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, cell, cells, 0))
            yield Claim(self, file, descriptor)
        finally:
            os.close(descriptor)

    def make_room(self, record: bytes) -> None:
        """Record a coming write, and evict the oldest blocks while the cache would be too large."""
        with (
            self.disk_errors(), self._lock(), _opened(self.folder / "cache") as header,
            _opened(self.folder / "order") as order,
        ):  # fmt: skip
            stop, first, used, evictions = HEADER.unpack(os.pread(header, HEADER.size, 0))
            _write(order, record, stop)
            stop, used = stop + RECORD.size, used + RECORD.unpack(record)[5]
            _write(header, HEADER.pack(stop, first, used, evictions), 0)
            # Do not evict the new record; cells that others are fetching again move to the end.
            begin, limit = first, stop - RECORD.size
            while used > self.capacity and first < limit:
                oldest = os.pread(order, RECORD.size, first)
                first += RECORD.size
                if self._evict(oldest, header, evictions + 1):
                    evictions, used = evictions + 1, used - RECORD.unpack(oldest)[5]
                else:
                    _write(order, oldest, stop)
                    stop += RECORD.size
                _write(header, HEADER.pack(stop, first, used, evictions), 0)
            if begin // ORDER_BYTES != first // ORDER_BYTES:
                _punch(order, 0, first // ORDER_BYTES * ORDER_BYTES)

    def _evict(self, record: bytes, header: int, evictions: int) -> bool:
        """Evict the cells of a record; False if another process is fetching some of them."""
        name, cell, cells, cells_at, offset, size = RECORD.unpack(record)
        try:
            descriptor = os.open(self.folder / f"{name.decode()}.data", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, cell, cells, 0))
            except (BlockingIOError, PermissionError):
                return False
            _write(descriptor, bytes(cells), cells_at + cell)
            _write(header, struct.pack("<q", evictions), 24)
            _punch(descriptor, offset, size)
        finally:
            os.close(descriptor)
        return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with _opened(self.folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _delete_older(self) -> None:
        """Delete the unused caches of earlier boots."""
        for folder in self.user_folder.glob("blocks-*"):
            if folder == self.folder:
                continue
            with suppress(OSError), _opened(folder / "users") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

    def _check_file_system(self) -> None:
        """Raises CacheError if files cannot have holes or range locks."""
        path = self.folder / "check"
        try:
            with _opened(path) as descriptor:
                os.ftruncate(descriptor, 2 * PAGE)
                _write(descriptor, b"\1" * PAGE, 0)
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
                _punch(descriptor, 0, PAGE)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"cache_dir {self.user_folder} is on a file system that cannot make holes in files, or lock parts of "
                f"them ({error.strerror}): name a folder on a local disk of the host"
            ) from error
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Within it, errors of the disk become a CacheError."""
        try:
            yield
        except OSError as error:
            where = f"cache_dir {self.user_folder}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free, gb = _free(self.user_folder), self.capacity / 1e9
                raise CacheError(
                    f"{where}: the disk is full ({free / 1e9:.2g} GB are free, and blocks of data may take cache_gb = "
                    f"{gb:g}): make room, use a lower cache_gb, or a cache_dir on a larger disk"
                ) from error
            if error.errno == errno.ENOENT:
                raise CacheError(f"{where}: the cache was deleted while it was in use; start again") from error
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> CacheError:
        return CacheError(
            f"cache_dir {self.user_folder} cannot be used ({error.strerror}): name a folder that can be written on a "
            f"local disk"
        )


def _free(folder: Path) -> int:
    try:
        disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` with pwrite(2)."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _punch(descriptor: int, offset: int, size: int) -> None:
    """Free the disk space of a range of a file, which then reads as zeros."""
    if size and _libc.fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
