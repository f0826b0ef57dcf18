"""The lines of one run in a log, as they come."""

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.launcher.jobs.record import JobRecord

CHUNK = 1 << 20
PAUSE_MS = 100
HEADER = re.compile(rb"# [0-9-]{10} [0-9:]{8} (?:attempt [0-9]+, )?run ([^:]*): ")
"""How each attempt begins in the log of a rank, and each job in that of a launcher."""


def header(entry: JobRecord) -> str:
    """The line with which a job begins in the log of its launcher."""
    return f"# {time.strftime('%Y-%m-%d %H:%M:%S')} run {entry.run_id}: {entry.one_line}\n"


class RunLines:
    """The lines of one run in a file that other runs in the same directory may have begun, or gone on with."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = os.fsencode(run_id)
        self._at = 0
        self._rest = b""
        self._own = False

    def new(self) -> list[bytes]:
        """The next lines, with their ends, at most a MiB of them; none where there are none yet. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._at = min(self._at, size)  # the launcher takes back the lines of a command it refused
                file.seek(self._at)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines if self._is_own(line)]

    def last(self, count: int) -> list[bytes]:
        """The last lines so far."""
        kept: deque[bytes] = deque(maxlen=count)
        while True:
            before = self._at
            kept.extend(self.new())
            if self._at == before:
                return list(kept)

    def _is_own(self, line: bytes) -> bool:
        if line.startswith(b"# ") and (header := HEADER.match(line)):
            self._own = header[1] == self._run_id
        return self._own


def show(lines: list[bytes]) -> None:
    """Lines on stdout, byte for byte."""
    if lines:
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()


def follow(lines: RunLines, look: Callable[[], JobRecord | None]) -> JobRecord | None:
    """Show what comes until the job is over, and return what `look` then says of it.

    Raises BrokenPipeError when nobody reads stdout any more.
    """
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # no event but that its reader is gone
    while True:
        entry = look()  # before the last look at the log: what the job says last must not be missed
        while new := lines.new():
            show(new)
        if entry is None or entry.is_over:
            return entry
        if reader.poll(PAUSE_MS):
            raise BrokenPipeError
