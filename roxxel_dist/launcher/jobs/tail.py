"""The lines of one run in a log, as they come."""

import math
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from roxxel_dist.launcher.control.record import JobRecord, read
from roxxel_dist.launcher.jobs.queued import ASK_S, look, words
from roxxel_dist.launcher.output.console import info, printable

PAUSE_MS = 100
BLOCK = 1 << 18
HEADER = re.compile(rb"# [0-9-]{10} [0-9:]{8} (?:attempt [0-9]+, )?run ([^:]*): ")
"""How each attempt begins in the log of a rank, and each job in that of a launcher."""


def header(record: JobRecord) -> str:
    """The line with which a job begins in the log of its launcher."""
    command = record.command.replace("\n", "\\n")
    return f"# {time.strftime('%Y-%m-%d %H:%M:%S')} run {record.run_id}: {command}\n"


def run_lines(path: Path, run_id: str, last: int | None = None) -> Iterator[bytes | None]:
    """The lines of one run in a log, with their ends; None where there is no more yet, as often as it is asked.

    Other runs in the same directory may have begun the file, or gone on with it: `--resume` is another run.
    `last`: of the lines that are there, only so many; they are looked for from the end of the file.
    """
    while not path.exists():
        yield None
    line, is_of_run = b"", False
    with path.open("rb") as file:
        if last is not None:
            lines, end, is_of_run = _last_lines(file, run_id, last)
            yield from lines
            file.seek(end)
        while True:
            line += file.readline()
            if not line.endswith(b"\n"):
                yield None
                continue
            if match := HEADER.match(line):
                is_of_run = match[1] == os.fsencode(run_id)
            if is_of_run:
                yield line
            line = b""


def _last_lines(file: BinaryIO, run_id: str, count: int) -> tuple[list[bytes], int, bool]:
    """(the last complete lines of a run, where the complete lines end, whether what follows is of the run)."""
    end = stop = _find_before(file, b"\n", file.seek(0, os.SEEK_END)) + 1
    found: deque[bytes] = deque()
    is_of_run: bool | None = None
    while stop > 0 and (len(found) < count or is_of_run is None):
        begin, of_run = _section(file, stop, run_id)
        is_of_run = of_run if is_of_run is None else is_of_run
        while of_run and stop > begin and len(found) < count:
            start = max(begin, _find_before(file, b"\n", stop - 1) + 1)
            file.seek(start)
            found.appendleft(file.read(stop - start))
            stop = start
        stop = begin
    return list(found), end, bool(is_of_run)


def _section(file: BinaryIO, stop: int, run_id: str) -> tuple[int, bool]:
    """(where the last header before `stop` begins, or 0; whether it is of this run)."""
    while True:
        stop = _find_before(file, b"\n# ", stop - 1) + 1
        file.seek(stop)
        match = HEADER.match(file.readline())
        if match or stop == 0:  # else a line of a program that looks like one
            return stop, match is not None and match[1] == os.fsencode(run_id)


def _find_before(file: BinaryIO, text: bytes, stop: int) -> int:
    """Where `text` begins last in a file so that it begins before `stop`; -1 if it does not."""
    while stop > 0:
        start = max(0, stop - BLOCK)
        file.seek(start)
        if (at := file.read(stop - start + len(text) - 1).rfind(text)) >= 0:
            return start + at
        stop = start
    return -1


def show(lines: Iterable[bytes]) -> None:
    """Lines on stdout, byte for byte; on a terminal without what could command it, but for colours."""
    if sys.stdout.isatty():
        lines = (
            printable(line.decode(errors="backslashreplace"), colours=True).encode("utf-8", "backslashreplace")
            for line in lines
        )
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def follow(lines: Iterator[bytes | None], job: JobRecord) -> JobRecord:
    """Show new lines until the job is over, and return its record then.

    Raises BrokenPipeError when the reader of stdout is gone.
    """
    asked, said, waits = -math.inf, job.queue_reason, job.is_queued  # of a batch system that has the job
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # only to learn that its reader is gone
    while True:
        record = read(job.path)  # before the log: the last output must not be missed
        show(iter(lambda: next(lines), None))
        if record is None:
            return job
        if record.is_over or record.is_queued or not record.is_known:
            if time.monotonic() >= asked + ASK_S:
                asked, record = time.monotonic(), look(record)
                waits = record.is_queued
                if waits and record.queue_reason != said:
                    info(words(record))
                    said = record.queue_reason
            if record.is_over and not waits:
                return record
        else:
            waits, said = False, ""
        if reader.poll(PAUSE_MS):
            raise BrokenPipeError
