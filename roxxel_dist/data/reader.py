"""Files as memory: all of a data set mapped back to back in one range of addresses, and windows copied from there.

A file that is cut short while it is mapped leaves pages that cannot be read; touching one is the signal SIGBUS, which
ends the process.
"""

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from roxxel_dist.data.format import REPLACE

PROT_NONE = 0
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
COLD_FOR = 256
"""Batches for which pages are asked ahead after one had to wait. Asking takes twice as long as a copy from memory."""

_libc: ctypes.CDLL = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """Whole files in one range of addresses, each from a page's start; unmapped when the last array into it is gone.

    No file stays open: a data set of thousands of shards takes no file descriptors.

    Args:
        paths: the files; none is empty.

    Raises:
        ValueError: a file is empty, or changed its size in this moment. The message names it.
        OSError: a file cannot be opened or mapped.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        sizes = [os.stat(path).st_size for path in paths]
        pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        self.size: int = sum(pages)
        for path, size in zip(paths, sizes, strict=True):
            if not size:
                raise ValueError(f"{path}: the file is empty. {REPLACE}")
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.address: int = _map_memory(None, self.size, PROT_NONE, reserved, -1)
        # Not at exit: threads may still read then, and the system unmaps everything anyway.
        weakref.finalize(self, _libc.munmap, self.address, self.size).atexit = False
        self.starts: list[int] = []
        start = self.address
        for path, size, length in zip(paths, sizes, pages, strict=True):
            _map_file(path, size, start)
            self.starts.append(start)
            start += length
        self.sizes = sizes

    @property
    def __array_interface__(self) -> dict[str, object]:
        """The range as numpy takes it: read-only uint8."""
        return {"version": 3, "data": (self.address, True), "shape": (self.size,), "typestr": "|u1"}


def _map_memory(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    """mmap(2) from offset 0; the address."""
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return found


def _map_file(path: Path, size: int, address: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        now = os.fstat(fd).st_size
        if now != size:
            raise ValueError(
                f"{path}: {now} bytes, a moment ago {size}: something writes to it. Open it when it is done"
            )
        _map_memory(address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, fd)
    finally:
        os.close(fd)


def map_files(paths: Sequence[Path]) -> list[np.ndarray]:
    """The bytes of some files: a read-only uint8 array [file size] each, all in one range of addresses.

    The files stay mapped, and are not held open, as long as one of the arrays or a view of one lives.

    Raises:
        ValueError: a file is empty or changes its size now; the message names it.
        OSError: a file cannot be opened or mapped.
    """
    if not paths:
        return []
    mapping = Mapping(paths)
    whole = np.asarray(mapping)
    return [
        whole[start - mapping.address : start - mapping.address + size]
        for start, size in zip(mapping.starts, mapping.sizes, strict=True)
    ]


def read_tokens(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """So many tokens of a file from a byte on: a fresh array [count], filled by read(2) and not from a map.

    Of a mapped file that is cut short the rest of the last page is zeros.

    Raises:
        ValueError: the file was cut short. The message names it.
        OSError: the file cannot be opened.
    """
    tokens = np.fromfile(path, dtype, count, offset=offset)
    if len(tokens) < count:
        raise ValueError(
            f"{path} was cut short while it was read: {os.stat(path).st_size} bytes are left. "
            "Get it whole again and start again"
        )
    return tokens


class Windows:
    """Copies windows of bytes from some arrays, wherever they are in memory, with one index operation.

    Args:
        arrays: 1-D, contiguous, at least one. Mapped together they are neighbours, but they need not be.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        addresses = [address_of(array) for array in arrays]
        self._arrays = tuple(arrays)  # what keeps the memory there
        self._low = min(addresses)
        self._high = max(address + array.nbytes for address, array in zip(addresses, arrays, strict=True))
        self.starts: np.ndarray = np.array(addresses, np.int64) - self._low
        """int64 [arrays]: where each array begins, in bytes from the first."""
        self._of_length: dict[int, np.ndarray] = {}
        self._waits, self._cold_for = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt, 0

    def copy(self, index: np.ndarray, size: int) -> np.ndarray:
        """A fresh uint8 array [R, size]: the bytes from `index` on, int64 [R], counted like `starts`.

        The caller has checked that each window is within one of the arrays.
        """
        windows = self._of_length.get(size)
        if windows is None:
            windows = self._of_length[size] = self._view(size)
        rows = windows[index]
        self.note_waits()
        return rows.view(np.uint8).reshape(len(index), size)

    @property
    def cold(self) -> bool:
        """Whether copying had to wait for the disk not long ago."""
        return self._cold_for > 0

    def note_waits(self) -> None:
        """To be called when windows were read: remembers whether the disk was waited for."""
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        if waits != self._waits:
            self._waits, self._cold_for = waits, COLD_FOR
        elif self._cold_for:
            self._cold_for -= 1

    def ask(self, index: np.ndarray, size: int) -> None:
        """Let the kernel read the pages of some windows, given as to `copy`, from the disk ahead of their use."""
        for address in (index + self._low).tolist():
            low = address & -mmap.PAGESIZE
            _libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(address + size - low), mmap.MADV_WILLNEED)

    def _view(self, size: int) -> np.ndarray:
        # Elements of `size` bytes, one at every byte: numpy copies each with one memcpy, whatever its alignment.
        count = max(0, self._high - self._low - size + 1)
        return np.asarray(_Memory(self._low, count, size, self._arrays))


class _Memory:
    """Any range of addresses as numpy takes it."""

    def __init__(self, address: int, count: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{size}",
        }


def address_of(array: np.ndarray) -> int:
    """Where the array's first byte is."""
    return array.__array_interface__["data"][0]
