"""The record that each rank writes and its launcher reads: a memory-mapped file, 32 bytes a rank, no locks.

A rank names the step it enters before it waits for anybody, so the rank whose `entered` is the smallest is the one that
the others wait for. Standard library only: the launcher reads this without importing jax.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<qqdq")  # entered, done, time of the last change, phase
ENV = "ROXXEL_PROGRESS"


@dataclass(frozen=True, kw_only=True)
class Record:
    """How far one rank is: the step it entered last, the step it finished last, when, and in which phase."""

    entered: int = 0
    done: int = 0
    time: float = 0.0
    phase: int = 0


def create(path: str | Path, ranks: int) -> None:
    """Write a file of `ranks` empty records."""
    Path(path).write_bytes(bytes(RECORD.size * ranks))


def read(path: str | Path) -> list[Record]:
    """The record of every rank; an empty list where there is no file."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [Record(entered=e, done=d, time=t, phase=p) for e, d, t, p in RECORD.iter_unpack(data)]


class Progress:
    """Writes the record of one rank. Without a file (nobody launched this process) every call is free."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._map: mmap.mmap | None = None
        self._offset = rank * RECORD.size
        self._now = Record()
        if path:
            fd = os.open(path, os.O_RDWR)
            try:
                self._map = mmap.mmap(fd, 0)
            finally:
                os.close(fd)

    @classmethod
    def from_env(cls, rank: int) -> "Progress":
        """The record named by ROXXEL_PROGRESS, if any."""
        return cls(os.environ.get(ENV), rank)

    def enter(self, step: int, phase: int = 0) -> None:
        """This rank starts `step` (its done-count stays)."""
        self._write(Record(entered=step, done=self._now.done, time=time.time(), phase=phase))

    def finish(self, step: int) -> None:
        """This rank finished `step`."""
        self._write(Record(entered=self._now.entered, done=step, time=time.time(), phase=self._now.phase))

    def _write(self, record: Record) -> None:
        self._now = record
        if self._map is not None:
            RECORD.pack_into(self._map, self._offset, record.entered, record.done, record.time, record.phase)
