"""Memory-mapped files: all files of a data set mapped back to back in one address range, and windows copied from there.

If a mapped file is truncated, some of its pages cannot be read; access raises the signal SIGBUS, which ends the
process. Decision 4.
"""

import ctypes
import mmap
import os
import resource
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from roxxel_dist.data.files.format import REPLACE
from roxxel_dist.process.exit_codes import UserError

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
COLD_FOR = 256
"""Batches with prefetch after one had to wait for the disk. A prefetch takes twice as long as a copy from memory."""

_libc: ctypes.CDLL = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Memory:
    """A read-only range of addresses for numpy: `count` elements, one at every `stride` bytes."""

    def __init__(self, address: int, count: int, dtype: str, stride: int, owner: object = None) -> None:
        self.owner = owner  # keeps the memory alive
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": (count,), "strides": (stride,), "typestr": dtype,
        }  # fmt: skip


def map_files(paths: Sequence[Path]) -> list[np.ndarray]:
    """The bytes of some files: a read-only uint8 array [file size] each, all in one range of addresses.

    Each begins on a page boundary. They stay mapped as long as one of the arrays or a view of one lives, without open
    file descriptors, so a data set may have thousands of shards. Raises ValueError: a file is empty or its size changes
    during the call; the message names it. OSError: a file cannot be opened or mapped.
    """
    if not paths:
        return []
    sizes = [os.stat(path).st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            raise UserError(f"{path}: the file is empty. {REPLACE}")
    arrays = _reserve_memory(sizes)
    for path, array in zip(paths, arrays, strict=True):
        _map_file(path, array)
    return arrays


def _reserve_memory(sizes: Sequence[int]) -> list[np.ndarray]:
    """Read-only uint8 arrays of zeros with these sizes in one address range, each on a page boundary."""
    pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    address = _map_memory(None, sum(pages), mmap.PROT_READ, reserved, -1)
    memory = _Memory(address, sum(pages), "|u1", 1)
    # Not at exit: threads may still read, and the system unmaps everything anyway.
    weakref.finalize(memory, _libc.munmap, address, sum(pages)).atexit = False
    whole, starts = np.asarray(memory), np.cumsum([0, *pages]).tolist()
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _map_file(path: Path, array: np.ndarray) -> None:
    """Map a file over an array of `_reserve_memory` of the same length; raises as `map_files`."""
    size = len(array)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        now = os.fstat(fd).st_size
        if now != size:
            raise UserError(
                f"{path}: {now} bytes, a moment ago {size}: something writes to it. Open it when it is done"
            )
        address = array.__array_interface__["data"][0]
        _map_memory(address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, fd)
    finally:
        os.close(fd)


def _map_memory(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    """mmap(2) from offset 0; returns the address."""
    mapped = _libc.mmap(address, size, protection, flags, fd, 0)
    if mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return mapped


def read_tokens(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Read `count` tokens of a file from a byte offset: a fresh array [count], by read(2) and not from a map.

    In a map of a truncated file the rest of the last page would be zeros. Raises ValueError: the file was truncated.
    The message names it. OSError: the file cannot be opened.
    """
    tokens = np.fromfile(path, dtype, count, offset=offset)
    if len(tokens) < count:
        raise UserError(
            f"{path} was truncated while it was read: {os.stat(path).st_size} bytes are left. "
            "Copy it or build it again, and start again"
        )
    return tokens


class WindowReader(ABC):
    """Finds the range that holds each window of a data set: the base of readers, which copy windows from there.
    `firsts` are the numbers of the ranges' first tokens in the data set, which messages call `name`."""

    def __init__(self, firsts: Sequence[int], lengths: Sequence[int], dtype: np.dtype, name: object) -> None:
        self.dtype: np.dtype = dtype
        self._name = name
        self._firsts = np.array(firsts, np.int64)
        self._stops = self._firsts + np.array(lengths, np.int64)
        self._last: dict[int, np.ndarray] = {}

    def locate(self, offsets: np.ndarray, length: int) -> np.ndarray:
        """The array that contains each window, int64 [R]. Raises ValueError if none contains it."""
        numbers = self._firsts.searchsorted(offsets, "right") - 1
        if length not in self._last:
            # One more entry for index -1, the result for offsets before the first array: no window begins there.
            self._last[length] = np.append(self._stops - min(length, 1 << 62), np.iinfo(np.int64).min)
        outside = offsets > self._last[length][numbers]
        if length >= 1 and not np.count_nonzero(outside):
            return numbers
        first = int(offsets[np.argmax(outside)]) if len(offsets) else 0
        raise UserError(
            f"a window of {length} tokens at token {first} is not within one of the {len(self._firsts)} ranges from "
            f"{self._name} on; a window has at least 1 token and crosses no shard and no cut of split()"
        )

    @abstractmethod
    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """The windows of `length` tokens from `offsets` on, int64 [R]: a fresh array [R, length] of `dtype`."""

    @property
    def is_cold(self) -> bool:
        """Whether a recent read had to wait for the disk, so that `prefetch` is worth a call."""
        return False

    def prefetch(self, offsets: np.ndarray, length: int) -> None:
        """Ask the kernel to load the pages of some windows, given as in `read`, before their use."""
        self.locate(offsets, length)


class MappedReader(WindowReader):
    """Copies windows of tokens out of arrays, anywhere in memory, with one gather.

    It does not use files: the arrays (1-D, contiguous, of one dtype, at least one) may be maps of files. `firsts` are
    the numbers of their first tokens in the data set.
    """

    def __init__(self, arrays: Sequence[np.ndarray], firsts: Sequence[int], name: object = "the data set") -> None:
        super().__init__(firsts, [len(array) for array in arrays], arrays[0].dtype, name)
        self._arrays = tuple(arrays)
        addresses = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
        self._low = int(addresses.min())
        self._high = int((addresses + [array.nbytes for array in arrays]).max())
        self._shift = addresses - self._low - self._firsts * self.dtype.itemsize
        self._views: dict[int, np.ndarray] = {}
        self._waits, self._cold_for = _major_faults(), 0

    def _view(self, length: int) -> np.ndarray:
        """All windows of `length` tokens, one at every byte of memory: numpy copies each with one memcpy."""
        if length not in self._views:
            size = length * self.dtype.itemsize
            windows = _Memory(self._low, max(0, self._high - self._low - size + 1), f"|V{size}", 1, self._arrays)
            self._views[length] = np.asarray(windows)
        return self._views[length]

    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """The windows of `length` tokens from `offsets` on, int64 [R]: a fresh array [R, length] of `dtype`."""
        numbers = self.locate(offsets, length)
        if len(numbers) == 1:  # convert without a copy first: a long row would not stay in the CPU cache
            number = numbers.item()
            start = offsets.item() - self._firsts.item(number)
            rows = self._arrays[number][start : start + length].astype(dtype)[None]
        else:
            rows = self._view(length)[offsets * self.dtype.itemsize + self._shift[numbers]]
            rows = rows.view(self.dtype).reshape(len(offsets), length).astype(dtype, copy=False)
        waits = _major_faults()
        if waits != self._waits:
            self._waits, self._cold_for = waits, COLD_FOR
        elif self._cold_for:
            self._cold_for -= 1
        return rows

    @property
    def is_cold(self) -> bool:
        """Whether a recent read had to wait for the disk."""
        return self._cold_for > 0

    def prefetch(self, offsets: np.ndarray, length: int) -> None:
        """Ask the kernel to load the pages of some windows, given as in `read`, before their use."""
        index = offsets * self.dtype.itemsize + self._shift[self.locate(offsets, length)]
        for address in (index + self._low).tolist():
            low = address & -mmap.PAGESIZE
            size = address + length * self.dtype.itemsize - low
            _libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


def _major_faults() -> int:
    """The number of major page faults of this thread, each a wait for the disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
