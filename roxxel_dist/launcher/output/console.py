"""What a person sees: lines of ranks and of the launcher, above a live bar where stdout is a terminal.

A terminal may take nothing for hours (Ctrl-S, a pager that nobody scrolls). The launcher must watch its ranks
meanwhile, so a thread of its own does the writing, and what is too much for it is left out: the logs have it.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from roxxel_dist.launcher.output.logs import NOISE

if TYPE_CHECKING:
    from roxxel_dist.train.bar import Bar

MOST = 4 << 20
"""Characters of ranks that wait for the terminal at most."""
LAST_S = 2.0
"""How long the terminal may take for the last words."""

Kind = Literal["rank", "launcher", "status"]


class Console:
    """Shows the lines of rank `first` (or of all ranks) and those of the launcher, while the context is open."""

    def __init__(self, *, all_ranks: bool, first: int = 0) -> None:
        self._all = all_ranks
        self._first = first
        self._waiting: deque[tuple[Kind, Any]] = deque()
        self._size = self._left_out = 0
        self._idle = True
        self._closing = False
        self._change = threading.Condition()
        self._bar: Bar | None = None
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def shows(self, rank: int) -> bool:
        """Whether the lines of this rank are shown."""
        return self._all or rank == self._first

    def lines(self, rank: int, when: float, lines: Sequence[str]) -> None:
        """Show lines of a rank, if there is room."""
        lines = [line for line in lines if not NOISE.match(line)]
        if not self.shows(rank) or not lines:
            return
        prefix = f"{time.strftime('%H:%M:%S', time.localtime(when))} {rank} | "
        text = prefix + f"\n{prefix}".join(lines)
        with self._change:
            if self._size > MOST:
                self._left_out += len(lines)
                return
            self._size += len(text)
            self._put("rank", text)

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self.write([f"roxxel-dist: {text}"])

    def write(self, lines: Sequence[str]) -> None:
        """Lines for people, on stderr."""
        if lines:
            with self._change:
                self._put("launcher", "\n".join(lines))

    def status(self, rank: int, record: dict[str, Any]) -> None:
        """Move the bar by a record of rank 0."""
        if rank == 0 and sys.stdout.isatty():
            with self._change:
                if self._waiting and self._waiting[-1][0] == "status":
                    self._waiting.pop()  # only the newest counts
                self._put("status", record)

    def flush(self) -> None:
        """Wait until all was shown, or the terminal has taken nothing for a while."""
        with self._change:
            self._change.wait_for(lambda: self._idle and not self._waiting, LAST_S)

    def _put(self, kind: Kind, what: Any) -> None:
        self._waiting.append((kind, what))
        self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._idle = True
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                kind, what = self._waiting.popleft()
                self._idle = False
                missing, self._left_out = (self._left_out, 0) if self._size < MOST // 2 else (0, self._left_out)
                self._size -= len(what) if kind == "rank" else 0
            self._show(kind, what)
            if missing:
                self._show("launcher", f"roxxel-dist: {missing} lines were too many for this terminal: see the logs")
        if self._bar is not None:
            self._safely(sys.stdout, self._bar.close)

    def _show(self, kind: Kind, what: Any) -> None:
        if kind == "status":
            self._safely(sys.stdout, lambda: self._move(what))
        elif self._bar is not None and (kind == "rank" or sys.stderr.isatty()):
            self._safely(sys.stdout, lambda: self._bar and self._bar.print(what))
        else:
            stream = sys.stdout if kind == "rank" else sys.stderr
            self._safely(stream, lambda: _write(stream, what + "\n"))

    def _move(self, record: dict[str, Any]) -> None:
        if self._bar is None:
            from roxxel_dist.train.bar import Bar

            # A file of its own: who waits in it must not hold a lock that the interpreter needs at its end.
            self._bar = Bar(open(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace"))  # noqa: SIM115
        self._bar.update(record)

    def _safely(self, stream: TextIO, act: Any) -> None:
        """Without an end of the job where the terminal or the pipe is gone; the logs go on."""
        if stream.fileno() in self._gone:
            return
        try:
            act()
        except OSError:
            self._gone.add(stream.fileno())
            silence(stream)

    def __enter__(self) -> "Console":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join(LAST_S)


def _write(stream: TextIO, text: str) -> None:
    """Past the stream's buffer, whose lock the interpreter needs at its end."""
    rest = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while rest:
        rest = rest[os.write(stream.fileno(), rest) :]


def silence(stream: TextIO) -> None:
    """Send what is buffered, and all that follows, nowhere: its reader is gone, and it would fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
