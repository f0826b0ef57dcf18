"""A mapped page whose file was cut short: an error, and not the end of the interpreter.

Touching such a page is the signal SIGBUS, raised in the middle of numpy's copying. The handler installed here puts
zeros where the file was, notes which file it is, and lets the copying go on; `check` then raises. Asking for the sizes
before each read would cost more than the reading and would still leave a gap between the question and the copy.

The handler is Python, called through ctypes. That is safe here, as it is not for other signals: SIGBUS comes at the
instruction that touches the page, so the thread is copying memory and not within the allocator or holding a lock. For
an address that is not watched the handler before this one is put back, and the fault repeats there.
"""

import ctypes
import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SA_SIGINFO = 4
_ADDRESS_IN_SIGINFO = 16
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

libc: ctypes.CDLL = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Action(ctypes.Structure):
    """The C library's `struct sigaction` on 64-bit Linux."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_watched: list[tuple[int, int, Path]] = []
"""(first address, one past the last, file)."""
lost: list[tuple[int, int, Path]] = []
"""Those of the watched files that were found to be cut short."""
_before = _Action()


def map_memory(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    """mmap(2) from offset 0; the address."""
    found = libc.mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return found


def unmap_memory(address: int, size: int) -> None:
    """munmap(2), and forget what was watched there."""
    libc.munmap(address, size)
    for ranges in (_watched, lost):
        ranges[:] = [one for one in ranges if not address <= one[0] < address + size]


def watch(ranges: Sequence[tuple[int, int, Path]]) -> None:
    """From now on a fault in one of the ranges (first address, one past the last, the file there) is an error."""
    _watched.extend(ranges)
    _install()


def check(addresses: np.ndarray, size: int) -> None:
    """Raise if one of the windows of `size` bytes is in a file that was cut short.

    Raises:
        ValueError: it is. The message names the file.
    """
    for low, high, path in lost:
        if np.any((addresses < high) & (addresses + size > low)):
            raise ValueError(
                f"{path} was cut short while it was read: {os.path.getsize(path) if path.exists() else 'no'} bytes are "
                "left. Nothing may write to a data set that is being read; write it again and start again"
            )


def _install() -> None:
    current = _Action()
    libc.sigaction(int(signal.SIGBUS), None, ctypes.byref(current))
    ours = ctypes.cast(_handler, ctypes.c_void_p).value
    if current.handler != ours:
        ctypes.memmove(ctypes.byref(_before), ctypes.byref(current), ctypes.sizeof(_Action))
        action = _Action(handler=ours, flags=_SA_SIGINFO)
        libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _handler(number: int, info: int, context: int) -> None:
    address = ctypes.c_size_t.from_address(info + _ADDRESS_IN_SIGINFO).value
    for low, high, path in _watched:
        if low <= address < high and _fill(address, high):
            lost.append((low, high, path))
            os.write(2, f"{path} was cut short while it was mapped; its missing part reads as zeros\n".encode())
            return
    libc.sigaction(int(signal.SIGBUS), ctypes.byref(_before), None)
    # That one may put this one back, if it was installed in between two data sets: then the system's own is next.
    ctypes.memset(ctypes.byref(_before), 0, ctypes.sizeof(_Action))


def _fill(address: int, end: int) -> bool:
    """Zeros from the page of `address` on."""
    start = address & -mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    return libc.mmap(start, end - start, mmap.PROT_READ, flags, -1, 0) == start
