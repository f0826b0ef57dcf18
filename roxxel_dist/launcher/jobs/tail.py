"""The lines of one run in a log, as they come."""

import os
import re
import select
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from roxxel_dist.launcher.jobs.record import JobRecord, read
from roxxel_dist.launcher.output.printable import printable

PAUSE_MS = 100
HEADER = re.compile(rb"# [0-9-]{10} [0-9:]{8} (?:attempt [0-9]+, )?run ([^:]*): ")
"""How each attempt begins in the log of a rank, and each job in that of a launcher."""


def header(record: JobRecord) -> str:
    """The line with which a job begins in the log of its launcher."""
    command = record.command.replace("\n", "\\n")
    return f"# {time.strftime('%Y-%m-%d %H:%M:%S')} run {record.run_id}: {command}\n"


def run_lines(path: Path, run_id: str) -> Iterator[bytes | None]:
    """The lines of one run in a log, with their ends; None where there is no more yet, as often as it is asked.

    Other runs in the same directory may have begun the file, or gone on with it: `--resume` is a run of its own.
    """
    while not path.exists():
        yield None
    line, is_own = b"", False
    with path.open("rb") as file:
        while True:
            line += file.readline()
            if not line.endswith(b"\n"):
                yield None
                continue
            if match := HEADER.match(line):
                is_own = match[1] == os.fsencode(run_id)
            if is_own:
                yield line
            line = b""


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
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # only to learn that its reader is gone
    while True:
        record = read(job.path)  # before the log: what the job says last must not be missed
        show(iter(lambda: next(lines), None))
        if record is None or record.is_over:
            return record or job
        if reader.poll(PAUSE_MS):
            raise BrokenPipeError
