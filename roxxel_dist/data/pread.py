"""Windows of files by read calls instead of a map: the memory of the process stays flat, whatever has been read."""

import os
import resource
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

THREADS = 4
KEPT_OPEN = 256
ASKED_AT_MOST = 16
"""Batches that are read ahead; the oldest is dropped if it was never fetched."""


class Files:
    """Some files, of which windows of bytes are read into fresh buffers.

    At most 256 files are held open, and at most an eighth of what the process may open. A file that was replaced since
    this object was made is an error, not other data.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._identities = [_identity(os.stat(path)) for path in paths]
        self._descriptors: dict[int, int] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._kept_open = KEPT_OPEN if limit == resource.RLIM_INFINITY else min(KEPT_OPEN, limit // 8)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[bytes, Future[np.ndarray]] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False

    def copy(self, numbers: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
        """A fresh uint8 array [R, size]: the bytes of each window.

        Args:
            numbers: int64 [R], which file.
            positions: int64 [R], its first byte.
            size: bytes a window.

        Raises:
            ValueError: a file was cut short or replaced. The message names it.
            OSError: a file cannot be opened or read.
        """
        future = self._asked.pop(_name(numbers, positions, size), None)
        return future.result() if future else self._read(numbers, positions, size)

    def ask(self, numbers: np.ndarray, positions: np.ndarray, size: int) -> None:
        """Let a thread read what `copy` will be called with."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "roxxel-pread")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        while len(self._asked) >= ASKED_AT_MOST:
            self._asked.pop(next(iter(self._asked))).cancel()
        # A weak reference: a batch that nobody fetches must not keep the files open.
        self._asked[_name(numbers, positions, size)] = self._pool.submit(
            _read_if_alive, weakref.ref(self), numbers, positions, size
        )

    def _read(self, numbers: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
        out = np.empty((len(numbers), size), np.uint8)
        for row, number, position in zip(out, numbers.tolist(), positions.tolist(), strict=True):
            kept = self._descriptors.get(number)
            fd = self._open(number) if kept is None else kept
            try:
                self._fill(row.data, fd, number, position)
            finally:
                if kept is None and self._descriptors.get(number) != fd:
                    os.close(fd)
        return out

    def _fill(self, buffer: memoryview, fd: int, number: int, position: int) -> None:
        done = 0
        while done < len(buffer):
            got = os.preadv(fd, [buffer[done:]], position + done)
            if not got:
                raise ValueError(
                    f"{self._paths[number]} was cut short while it was read: {os.fstat(fd).st_size} bytes are left. "
                    "Nothing may write to a data set that is being read; write it again and start again"
                )
            done += got

    def _open(self, number: int) -> int:
        path = self._paths[number]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found, expected = _identity(os.fstat(fd)), self._identities[number]
        if found != expected:
            os.close(fd)
            raise ValueError(f"{path} was replaced since the data set was opened; open it again with Roxxel(...)")
        with self._lock:
            if len(self._descriptors) < self._kept_open and number not in self._descriptors:
                self._descriptors[number] = fd
        return fd


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _name(numbers: np.ndarray, positions: np.ndarray, size: int) -> bytes:
    return b"%d " % size + numbers.tobytes() + positions.tobytes()


def _read_if_alive(files: "weakref.ref[Files]", numbers: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    alive = files()
    return np.empty((0, size), np.uint8) if alive is None else alive._read(numbers, positions, size)


def _close_all(descriptors: dict[int, int]) -> None:
    for fd in descriptors.values():
        os.close(fd)
