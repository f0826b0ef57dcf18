"""The lines of the ranks: cut from their bytes, and kept in one file a rank."""

import os
import shlex
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

from roxxel_dist.launcher.job.environment import masked_words
from roxxel_dist.launcher.job.spec import JobSpec

MAX_LINE_BYTES = 8 << 20
TAIL_LINES = 200
"""Of a rank: enough for a long traceback from its first line on."""
TAIL_COLUMNS = 2000


class LineSplitter:
    """Cuts the output of a process into lines of text.

    Of what `\\r` overwrote only the last part stays, as on a terminal. Bytes that are not UTF-8 become \\xNN. A line of
    more than `MAX_LINE_BYTES` bytes is cut there, so that memory is bounded.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = _text(self._rest + head)
            self._rest = _visible(rest)
            return lines
        self._rest = _visible(self._rest + rest)
        return self.close() if len(self._rest) > MAX_LINE_BYTES else []

    def close(self) -> list[str]:
        """The last line, if it did not end with a newline."""
        rest, self._rest = self._rest, b""
        return _text(rest) if rest else []


def _visible(rest: bytes) -> bytes:
    """The part of an unfinished line behind its last `\\r` (one at the end may belong to `\\r\\n`)."""
    body = rest.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + (b"\r" if len(body) < len(rest) else b"")


def _text(block: bytes) -> list[str]:
    lines = block.decode("utf-8", "backslashreplace").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines] if b"\r" in block else lines


class Logs:
    """One file a rank under `job.log_dir`, made with its first line, and the last lines of each in memory.

    Use it as a context, and `begin` each attempt.
    """

    def __init__(self, job: JobSpec, log: Callable[[str], None]) -> None:
        self._log = log
        self._folder = Path(job.log_dir)
        self._run = f"run {job.run_id}: " + shlex.join(masked_words(job.command)).replace("\n", "\\n")
        self._files: dict[int, TextIO] = {}
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Begin a new attempt: each file gets its header, and the lines before are not kept in memory."""
        self.close()
        self._header = f"# {time.strftime('%Y-%m-%d %H:%M:%S')} attempt {attempt}, {self._run}\n"
        self._tails = defaultdict[int, deque[str]](lambda: deque(maxlen=TAIL_LINES))
        self._broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def path(self, rank: int) -> Path:
        """The log of a rank."""
        return self._folder / f"rank-{rank}.log"

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank, at most `TAIL_LINES`."""
        return list(self._tails[rank])

    def write(self, rank: int, host: str, when: float, lines: list[str]) -> None:
        """Append lines that arrived at `when` (seconds since 1970)."""
        self._tails[rank].extend(line[:TAIL_COLUMNS] for line in lines[-TAIL_LINES:])
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        prefix = f"{clock}.{int(when * 1000) % 1000:03d} {host} {rank} | "
        try:
            if rank in self._files and not self._is_in_place(rank):
                self._close(rank)
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = self.path(rank).open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
                self._files[rank] = file
                file.write(self._header)
            self._files[rank].write(prefix + f"\n{prefix}".join(lines) + "\n")
            self._files[rank].flush()
        except OSError as error:  # a full disk must not end the job, and may have room again
            self._close(rank)
            if not self._broken:
                self._broken = True
                self._log(f"cannot write {self.path(rank)} ({error.strerror}): lines are missing there from now on")

    def _is_in_place(self, rank: int) -> bool:
        """Whether the open file of a rank still has its name: a person, or logrotate, may have moved or deleted it."""
        try:
            return os.path.samestat(os.stat(self.path(rank)), os.fstat(self._files[rank].fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the files."""
        for rank in list(self._files):
            self._close(rank)

    def _close(self, rank: int) -> None:
        with suppress(OSError, KeyError):  # its buffered lines found no room, which was already reported
            self._files.pop(rank).close()
