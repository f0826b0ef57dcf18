"""`python -m roxxel_dist` and the console script `roxxel-dist`."""

import os
import signal
import sys

RANK = "ROXXEL_PROCESS_ID" in os.environ


def _leave(number: int, _: object) -> None:
    """End for a signal that comes while nothing has begun. The first process of a container needs a handler for it."""
    os._exit(128 + number)


if not RANK:  # until `begin`, and again until the launcher listens
    if os.environ.get("ENVIRONMENT") == "BATCH" and sys.argv[1:3] == ["launch", "slurm"]:
        # SLURM's request waits until somebody listens: the job is to be queued again, not to fail.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(_number, _leave)

import errno
import io
import select
import stat
from typing import Any

from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import OutputError
from roxxel_dist.process.interrupt import collect_seldom, limit_the_end


def main() -> None:
    """Run the command line and exit with its code."""
    open_streams()  # first: files that are opened later must not get the numbers of the standard streams
    collect_seldom()
    if not RANK:  # the launcher ends its ranks
        interrupt.begin(_leave)
    from roxxel_dist.cli import main as run

    code = 1
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        closed = [number for number in (1, 2) if _has_no_reader(number)]
        if not closed:
            raise
        for number in closed:  # nothing may be left to flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        code = 128 + signal.SIGPIPE  # `| head` has read enough; the output was cut
    except OSError as error:
        if not isinstance(error, OutputError) and (error.errno != errno.ENOSPC or error.filename is not None):
            raise
        print(f"roxxel-dist: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = code or 1  # it may be the last flush that failed
    limit_the_end(code)
    sys.exit(code)


def open_streams() -> None:
    """Set up the standard streams so that no output fails, except to a pipe whose reader has left.

    A stream that was closed at the start (`>&-`, some daemons) gets the null device: otherwise the first file that is
    opened gets its number, here and in child processes. A terminal may disappear later.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
        elif number:
            stream = getattr(sys, name)
            if stream.encoding.lower() != "utf-8":
                stream.reconfigure(errors="backslashreplace")  # a locale with ASCII only
            if os.isatty(number):
                setattr(sys, name, _over(Terminal(number, "w", closefd=False), stream))
            elif stat.S_IFMT(os.fstat(number).st_mode) in (stat.S_IFREG, stat.S_IFCHR):
                setattr(sys, name, _over(Output(number, "w", closefd=False), stream))


def _over(raw: io.FileIO, stream: Any) -> io.TextIOWrapper:
    """A text stream as Python's own over the same file, which is written to by way of `raw`."""
    is_terminal = os.isatty(raw.fileno())
    lines = {"line_buffering": is_terminal or stream.line_buffering, "write_through": stream.write_through}
    whole: Any = io.BufferedWriter(raw) if is_terminal or not stream.write_through else raw  # as `python -u` has it
    return io.TextIOWrapper(whole, stream.encoding, stream.errors, **lines)


class Output(io.FileIO):
    """Standard output or error as a file. An error of the first is known from one of another file; what the second
    cannot take is dropped, and the exit code stays."""

    def write(self, data: Any, /) -> int:
        """As `FileIO.write`; raises OutputError."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() != 1:
                return memoryview(data).nbytes
            raise OutputError(error.errno, error.strerror) from error


class Terminal(io.FileIO):
    """A terminal. It drops output if it is gone (it was closed, or the connection was lost)."""

    def write(self, data: Any, /) -> int:
        """As `FileIO.write`."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENXIO, errno.EPIPE):
                raise
            return memoryview(data).nbytes


def _has_no_reader(number: int) -> bool:
    """Whether a descriptor is a pipe, or a socket, whose other end is closed."""
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


if __name__ == "__main__":
    main()
