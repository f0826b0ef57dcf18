"""The lines of the ranks: cut from their bytes, kept in one file a rank, shown on the screen."""

import json
import os
import shlex
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from roxxel_dist.cluster.contract import STATUS_MARK
from roxxel_dist.launcher.job import JobSpec
from roxxel_dist.launcher.variables import masked_words

if TYPE_CHECKING:
    from roxxel_dist.train.bar import Bar

LONGEST = 8 << 20
CHATTER = ("[Gloo] Rank ",)
"""How lines begin that a library prints without being asked: kept in the log, not shown."""
TAIL_LINES = 200
"""Of a rank: enough for a long traceback from its first line on."""
TAIL_COLUMNS = 2000


class Lines:
    """Cuts the output of a process into lines of text.

    Of what `\\r` overwrote only the last part stays, as on a terminal. Bytes that are not UTF-8 become \\xNN. A line of
    more than `LONGEST` bytes is cut there, so that memory is bounded.
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
        return self.close() if len(self._rest) > LONGEST else []

    def close(self) -> list[str]:
        """The last line, if it did not end with a newline."""
        rest, self._rest = self._rest, b""
        return _text(rest) if rest else []


def _visible(rest: bytes) -> bytes:
    """What `\\r` has left of an unfinished line (a last `\\r` may belong to `\\r\\n`)."""
    body = rest.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + (b"\r" if len(body) < len(rest) else b"")


def _text(block: bytes) -> list[str]:
    lines = block.decode("utf-8", "backslashreplace").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines] if b"\r" in block else lines


def take_status(lines: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Part the text from the status records: the lines of text, and the newest record."""
    text: list[str] = []
    newest = None
    for line in lines:
        before, mark, after = line.partition(STATUS_MARK)
        record = _record(after) if mark else None
        if record is None:
            text.append(line)
            continue
        newest = record
        if before:
            text.append(before)
    return text, newest


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not all(
        isinstance(record.get(name), int) for name in ("step", "total", "start")
    ):
        return None
    numbers = (record.get(name) for name in ("loss", "tokens_per_s", "eta_s"))
    return record if all(isinstance(number, int | float | None) for number in numbers) else None


class Logs:
    """One file a rank under `job.log_dir`, made with its first line, and the last lines of each in memory."""

    def __init__(self, job: JobSpec, attempt: int = 0) -> None:
        self._folder = Path(job.log_dir)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        command = shlex.join(masked_words(job.command)).replace("\n", "\\n")
        self._header = f"# {started} attempt {attempt}, run {job.run_id}: {command}\n"
        self._files: dict[int, TextIO] = {}
        self._sizes: dict[Path, int] = {}
        # A rank may make the run directory before its first line makes `logs` in it: what is new is told beforehand.
        self._new = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._tails: dict[int, deque[str]] = {}
        self._broken = False

    def path(self, rank: int) -> Path:
        """Where the lines of a rank are."""
        return self._folder / f"rank-{rank}.log"

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank, at most `TAIL_LINES`."""
        return list(self._tails.get(rank, ()))

    def write(self, rank: int, host: str, when: float, lines: list[str]) -> None:
        """Append lines that arrived at `when` (seconds since 1970)."""
        tail = self._tails.setdefault(rank, deque(maxlen=TAIL_LINES))
        tail.extend(line[:TAIL_COLUMNS] for line in lines[-TAIL_LINES:])
        if self._broken:
            return
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        prefix = f"{clock}.{int(when * 1000) % 1000:03d} {host} {rank} | "
        try:
            file = self._files.get(rank) or self._open(rank)
            file.write(prefix + f"\n{prefix}".join(lines) + "\n")
            file.flush()
        except OSError as error:  # a full disk must not end the job
            self._broken = True
            print(
                f"roxxel-dist: cannot write {self.path(rank)} ({error.strerror}): no logs from here on", file=sys.stderr
            )

    def _open(self, rank: int) -> TextIO:
        path = self.path(rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sizes[path] = path.stat().st_size if path.exists() else 0
        self._files[rank] = file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        file.write(self._header)
        return file

    def remove(self) -> None:
        """Take away the lines, files and folders that came with this launch; a folder that holds more stays."""
        self.close()
        for path, size in self._sizes.items():
            os.truncate(path, size) if size else path.unlink(missing_ok=True)
        self._sizes.clear()
        with suppress(OSError):  # not empty, or never made
            for folder in self._new:
                folder.rmdir()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def silence(stream: TextIO) -> None:
    """Send what is buffered, and all that follows, nowhere: its reader is gone, and it would fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Screen:
    """What a person sees: the lines of rank 0 (or of all ranks), above a live bar where stdout is a terminal."""

    def __init__(self, *, all_ranks: bool) -> None:
        self._all = all_ranks
        self._bar: Bar | None = None
        self._gone = False

    def shows(self, rank: int) -> bool:
        """Whether the lines of this rank are shown."""
        return self._all or rank == 0

    def lines(self, rank: int, when: float, lines: list[str]) -> None:
        """Show lines of a rank."""
        lines = [line for line in lines if not line.startswith(CHATTER)]
        if not self.shows(rank) or not lines:
            return
        prefix = f"{time.strftime('%H:%M:%S', time.localtime(when))} {rank} | "
        self._print(prefix + f"\n{prefix}".join(lines))

    def status(self, rank: int, record: dict[str, Any]) -> None:
        """Move the bar by a record of rank 0."""
        if rank != 0 or self._gone or not sys.stdout.isatty():
            return
        if self._bar is None:
            from roxxel_dist.train.bar import Bar

            self._bar = Bar()
        self._bar.update(record)

    def _print(self, text: str) -> None:
        if self._gone:
            return
        try:
            if self._bar is not None:
                self._bar.print(text)
                return
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            sys.stdout.flush()
        except OSError:  # the terminal or the pipe is gone; the logs go on
            self._gone = True
            silence(sys.stdout)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
