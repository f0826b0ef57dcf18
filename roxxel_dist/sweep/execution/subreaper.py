"""Runs one program and leaves nothing of it behind: `leash.py CMD…`, with a pipe of its parent as standard input.

When that pipe ends, the parent is gone, however it died, and the program is killed with all that it has started: a
worker of Ray outlives its driver by seconds, and a trial that outlives its worker would hold a device that the next one
needs. Signals that ask to stop are for the program, which is in the same process group; this one waits for its end.

The exit code is the program's, 128 + N where signal N ended it. It imports no other file of the package: it starts
within milliseconds, without site-packages.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINGER_S = 5.0
"""What the program has started and left gets so long to end by itself, once the program has ended."""
PAUSE_S = 0.01
NOT_FOUND, NOT_RUNNABLE = 127, 126
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def main(command: list[str]) -> int:
    """Run it to its end, or to the end of the parent."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parent dies becomes a child of this process
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: the program would inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # as a worker of Ray has it (see local_ray)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)  # noqa: PLW1509 (no threads)
    except FileNotFoundError:
        print(f"roxxel-dist: program not found: {command[0]!r}", file=sys.stderr, flush=True)
        return NOT_FOUND
    except OSError as error:
        print(f"roxxel-dist: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_RUNNABLE
    ended = os.pidfd_open(child.pid)
    parent_lives = _wait([ended], None)
    if parent_lives:
        child.wait()
        _let_end()
    _kill_all()
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(files: list[int], limit_s: float | None) -> bool:
    """Wait until one of the files can be read, or the limit is over; false where the parent has gone meanwhile."""
    return 0 not in select.select([0, *files], [], [], limit_s)[0]


def _let_end() -> None:
    end = time.monotonic() + LINGER_S
    while _children() and time.monotonic() < end and _wait([], PAUSE_S):
        _reap()


def _kill_all() -> None:
    """Round after round: the children of one that is killed become children of this process."""
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(PAUSE_S)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _children() -> list[int]:
    found, own = [], str(os.getpid()).encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    code: int = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
