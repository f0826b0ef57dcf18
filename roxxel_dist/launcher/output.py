"""The output for the user: lines of ranks and of the launcher above a live bar, and a log of each rank.

A terminal may accept nothing for hours (Ctrl-S, a pager that is not scrolled). The launcher must watch its ranks
meanwhile, so a separate thread writes, and lines that exceed its queue are left out: the logs have them.
"""

import math
import os
import re
import shlex
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from roxxel_dist.launcher.job.spec import JobSpec

MAX_WAITING = 4 << 20
"""Characters of ranks that wait for the terminal at most."""
LAST_S = 2.0
"""How long the terminal may take for the last words."""
NOISE_PREFIXES = re.compile(r"\[Gloo\] |[IW]\d{4} \S+ +\d+ preemption_notifier\.cc:\d+\] ")
"""How lines begin by which a library reports connections, or a SIGTERM: kept in the log, not shown."""
LIBRARY_LOG = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\] |\d{4}-\d\d-\d\d [\d:.]+: [IWEF] \S+:\d+\] ")
"""How entries of absl's and TSL's logs begin, which threads of jax write; one without belongs to the last."""
QUOTED = 240
"""Characters of a line that a message quotes."""
SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
COLOUR = r"\x1b\[[0-9;:]*m"
COMMANDS = re.compile(
    # Control characters but for tab and line end, marks that reorder a line, invisible ones, parts of no character.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
COLOUR_OR_COMMAND = re.compile(f"({COLOUR})|{COMMANDS.pattern}")


def printable(text: str, *, colours: bool = False) -> str:
    """A text in which what could command a terminal is escaped as Python writes it, but for line ends and tabs.

    With `colours`, sequences that only set colours and weights (`ESC[…m`) stay; a text that has one ends plain.
    """
    if not colours:
        return COMMANDS.sub(lambda match: _escaped(match[0]), text)
    shown, count = COLOUR_OR_COMMAND.subn(lambda match: match[1] or _escaped(match[0]), text)
    return f"{shown}\x1b[0m" if count and re.search(COLOUR, shown) and not shown.endswith("\x1b[0m") else shown


def shorten(line: str) -> str:
    """A line for a message, without colours: its beginning and its end, where it is long."""
    line = SEQUENCE.sub("", line)
    return line if len(line) <= QUOTED else f"{line[: QUOTED // 2]} … {line[-QUOTED // 2 :]}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def info(text: str) -> None:
    """A line of this command's own on stderr, at once."""
    print(f"roxxel-dist: {printable(text)}", file=sys.stderr, flush=True)


class Console:
    """Shows the lines of rank `first` (or of all ranks) and those of the launcher, while the context is open."""

    def __init__(self, *, all_ranks: bool, first: int = 0) -> None:
        self._all = all_ranks
        self._first = first
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queued = self._left_out = 0  # characters and lines of ranks, counted by the callers
        self._written = self._reported = 0  # the same, by the thread: no lock is needed
        self._bar: Bar | None = None
        self._status: dict[str, Any] = {}
        self._status_is_queued = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def lines(self, rank: int, when: float, lines: Sequence[str]) -> None:
        """Show lines of a rank, if there is room."""
        lines = [line for line in lines if not NOISE_PREFIXES.match(line)]
        if not lines or not (self._all or rank == self._first):
            return
        if self._queued - self._written > MAX_WAITING:
            self._left_out += len(lines)
            return
        prefix = f"{time.strftime('%H:%M:%S', time.localtime(when))} {rank} | "
        if sys.stdout.isatty():
            lines = [printable(line, colours=True) for line in lines]
        text = prefix + f"\n{prefix}".join(lines)
        self._queued += len(text)
        self._queue.put(partial(self._show, sys.stdout, text))

    def info(self, text: str) -> None:
        """A line of the launcher itself."""
        self.print([f"roxxel-dist: {text}"])

    def print(self, lines: Sequence[str]) -> None:
        """Lines for people, on stderr."""
        if lines:
            text = "\n".join(printable(line, colours=True) for line in lines)
            self._queue.put(partial(self._show, sys.stderr, text))

    def status(self, rank: int, record: dict[str, Any]) -> None:
        """Move the bar by a record of rank 0; of those that wait for the terminal only the newest counts."""
        if rank == 0 and sys.stdout.isatty():
            self._status = record
            if not self._status_is_queued:
                self._status_is_queued = True
                self._queue.put(partial(self._safely, sys.stdout, self._move))

    def flush(self) -> None:
        """Wait until all was shown, or the terminal has taken nothing for a while."""
        done = threading.Event()
        self._queue.put(done.set)
        done.wait(LAST_S)

    def _run(self) -> None:
        for act in iter(self._queue.get, None):
            try:
                act()
            except Exception as error:  # the thread would end, and with it all that people read
                self._fail(error)
            missing = self._left_out - self._reported
            if missing and self._queued - self._written < MAX_WAITING // 2:
                self._reported += missing
                self._show(sys.stderr, f"roxxel-dist: {missing} lines were too many for this terminal: see the logs")
        if self._bar is not None:
            self._safely(sys.stdout, self._bar.close)

    def _fail(self, error: Exception) -> None:
        """Say, once, that something could not be shown; what may be wrong is the bar."""
        if not self._has_failed:
            self._has_failed, self._bar = True, None
            self._show(sys.stderr, f"roxxel-dist: a line could not be shown ({error!r}); the job goes on, see its logs")

    def _show(self, stream: TextIO, text: str) -> None:
        """Lines of ranks, which are counted, on stdout, others on stderr; above the bar where both are one terminal."""
        if self._bar is not None and (stream is sys.stdout or sys.stderr.isatty()):
            self._safely(sys.stdout, self._bar.print, text)
        else:
            self._safely(stream, _write, stream, text + "\n")
        self._written += len(text) if stream is sys.stdout else 0

    def _move(self) -> None:
        if self._bar is None:
            # A separate file object: a blocked writer must not hold a lock that the interpreter needs at exit.
            self._bar = Bar(open(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace"))  # noqa: SIM115
        self._status_is_queued = False  # before it is read: a newer one is queued again
        self._bar.update(self._status)

    def _safely(self, stream: TextIO, act: Callable[..., None], *args: Any) -> None:
        """Write without ending the job if the terminal or pipe is gone: the stream then leads to /dev/null."""
        try:
            act(*args)
        except OSError:  # and the buffered text must not fail again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            self._bar = None if stream is sys.stdout else self._bar

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.put(None)
        self._thread.join(LAST_S)


def _write(stream: TextIO, text: str) -> None:
    """Past the stream's buffer, whose lock the interpreter needs at its end."""
    rest = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while rest:
        rest = rest[os.write(stream.fileno(), rest) :]


class Bar:
    """A progress bar moved by records of one step; the bottom line is its own from the first to `close`.

    A record: step, total, start (ints), phase (str), loss, tokens_per_s, eta_s (floats or None).
    """

    def __init__(self, file: TextIO | None = None) -> None:
        """Draw on `file`; by default on stdout, and have what others print appear above it."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=file, markup=False, emoji=False, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            expand=True,
            redirect_stdout=file is None,
            redirect_stderr=file is None,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=1, facts="")
        self._first: tuple[int, float] | None = None

    def update(self, record: dict[str, Any]) -> None:
        """Show a record."""
        now = time.monotonic()
        step, total = int(record["step"]), int(record["total"])
        first_step, first_time = self._first = self._first or (int(record["start"]), now)
        left = record.get("eta_s")
        if (left is None or not math.isfinite(left)) and step > first_step:
            left = (now - first_time) / (step - first_step) * (total - step)
        facts = [
            f"loss {record['loss']:.4f}" if record.get("loss") is not None else "",
            f"{scaled(record['tokens_per_s'])} tok/s" if record.get("tokens_per_s") is not None else "",
            f"{clock(left)} left" if left is not None and math.isfinite(left) else "",
        ]
        self._progress.update(
            self._task,
            description=str(record.get("phase") or "train"),
            completed=step,
            total=max(total, 1),
            facts="  ".join(fact for fact in facts if fact),
        )
        self._progress.start()  # with something to show; again and again it does nothing

    def print(self, line: str) -> None:
        """Print text above the bar, as it stands."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal; the bar stays where it was."""
        self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def scaled(number: float) -> str:
    """12345 -> 12.3k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """125 -> 2:05; an hour and more with hours."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


MAX_LINE_BYTES = 8 << 20
TAIL_LINES = 200
"""Lines of a rank that are kept: enough for a long traceback from its first line on."""
TAIL_COLUMNS = 2000


class LineSplitter:
    """Cuts the output of a process into lines of text.

    Of what `\\r` overwrote only the last part stays, as on a terminal. Bytes that are not UTF-8 become \\xNN. A line of
    more than `MAX_LINE_BYTES` bytes is cut there, so that memory is bounded.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = _text(bytes(self._rest) + head)
            self._rest = bytearray(_visible(rest))
            return lines
        is_overwritten = b"\r" in rest or self._rest.endswith(b"\r")
        self._rest += rest  # no copy of what was there: a rank may print dot after dot
        if is_overwritten:
            self._rest = bytearray(_visible(bytes(self._rest)))
        return self.close() if len(self._rest) > MAX_LINE_BYTES else []

    def close(self) -> list[str]:
        """The last line, if it did not end with a newline."""
        rest, self._rest = bytes(self._rest), bytearray()
        return _text(rest) if rest else []


def _visible(rest: bytes) -> bytes:
    """The part of an unfinished line behind its last `\\r` (one at the end may belong to `\\r\\n`)."""
    body = rest.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + (b"\r" if len(body) < len(rest) else b"")


def _text(block: bytes) -> list[str]:
    lines = block.decode("utf-8", "backslashreplace").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines] if b"\r" in block else lines


HEADER = re.compile(rb"# [0-9-]{10} [0-9:]{8} (?:attempt [0-9]+, )?run ([^:]*): ")
"""The beginning of a `header`."""


def header(run_id: str, command: str, attempt: int | None = None) -> str:
    """The line with which an attempt begins in the log of a rank, and a job in that of its launcher."""
    of_rank = "" if attempt is None else f"attempt {attempt}, "
    command = command.replace("\n", "\\n")
    return f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {of_rank}run {run_id}: {command}\n"


class Logs:
    """One file a rank under `job.log_dir`, made with its first line, and the last lines of each in memory.

    Use it as a context, and `begin` each attempt.
    """

    def __init__(self, job: "JobSpec", log: Callable[[str], None]) -> None:
        from roxxel_dist.launcher.job.placement import masked_words  # late: most commands keep no logs

        self._log = log
        self._folder = Path(job.log_dir)
        self._run_id, self._command = job.run_id, shlex.join(masked_words(job.command))
        self._files: dict[int, TextIO] = {}
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Begin a new attempt: each file gets its header, and the lines before are not kept in memory."""
        self.close()
        self._header = header(self._run_id, self._command, attempt)
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
