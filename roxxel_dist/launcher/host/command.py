"""One way to run a command of the user's, or a tool of the host; why a program cannot be run."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from roxxel_dist.launcher.host.process_tree import die_with_parent

MOST = 1 << 24
"""Bytes that a command may print."""
PIPE = 1 << 20
"""Bytes that it may print between two looks, without waiting."""
LOOK_S = 0.05
TAIL_BYTES, LINE = 4096, 200
"""Bytes in which the last line is looked for, and letters of it that are shown."""
KILLED_S = 0.5
"""How long the end of a killed command is waited for: one that waits for a driver may stay."""


class Command:
    """A command in a session of its own, which dies with the thread that started it.

    No thread reads its output, for a process that uses this may fork: it is read at each look. What the command leaves
    behind holds up nobody.

    Args:
        argv: the program and its arguments.
        limit_s: seconds after which it is killed.
        text: its standard input.
        most: bytes that it may print before it is killed.
        env: its variables; None for those of this process.
        splits: whether its standard error is kept beside its output, and not in it.
        spares: whether what it leaves behind goes on after it has ended by itself; else that is killed.
        forks: whether this process may fork; else the command itself is to ask to die with its parent.

    Raises OSError or ValueError where it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        limit_s: float,
        *,
        text: str = "",
        most: int = MOST,
        env: Mapping[str, str] | None = None,
        splits: bool = False,
        spares: bool = False,
        forks: bool = True,
    ) -> None:
        self._limit_s, self._most, self._spares = limit_s, most, spares
        self.why: str = ""
        """Why it was killed, such as "did not end within 5 s"; empty where it ended by itself."""
        self.timed_out: bool = False
        self._is_over = False
        stdin = os.memfd_create("input")  # no pipe: a command need not read it
        try:
            os.pwrite(stdin, text.encode(), 0)
            self._process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if splits else subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C on the terminal is for the launcher
                preexec_fn=die_with_parent if forks else None,  # noqa: PLW1509 - a system call, no lock
            )
        finally:
            os.close(stdin)
        self._begun = time.monotonic()
        pipes = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]
        self._streams = [(pipe, bytearray()) for pipe in pipes]
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # a limit of the user
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)

    @property
    def seconds(self) -> float:
        """Seconds for which it has run."""
        return time.monotonic() - self._begun

    @property
    def has_ended(self) -> bool:
        """Whether it ended, or was killed because of a limit."""
        if not self._is_over:
            # It is not reaped: so its number is still that of its group.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if not self._read():
                self.why = f"printed more than {self._most:,} bytes"
            elif not ended and self.seconds >= self._limit_s:
                self.why, self.timed_out = f"did not end within {self._limit_s:g} s", True
            if ended or self.why:
                self.kill(group=not (ended and self._spares))
        return self._is_over

    def _read(self) -> bool:
        """Take what is there of its output. False where that is too much."""
        for pipe, data in self._streams:
            while len(data) <= self._most and (part := pipe.read(PIPE)):
                data.extend(part)
        return all(len(data) <= self._most for _, data in self._streams)

    def wait(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for its end; where it is to be stopped, kill it."""
        while not self.has_ended and not is_stopped():
            time.sleep(LOOK_S)
        self.kill()

    def kill(self, *, group: bool = True) -> None:
        """End it with all of its group, once."""
        if self._is_over:
            return
        self._is_over = True
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
        for pipe, _ in self._streams:
            pipe.close()

    @property
    def code(self) -> int:
        """The exit code; that of a kill where it does not end."""
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    @property
    def end(self) -> str:
        """Words for how it failed by itself: "exit code 3", "signal 9"; empty for exit code 0."""
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}" if self.code else ""

    @property
    def text(self) -> str:
        """The text that it printed."""
        return self._streams[0][1].decode(errors="backslashreplace")

    @property
    def last_line(self) -> str:
        """The last line of its standard error, or of its output where that is not kept apart, for people."""
        lines = self._streams[-1][1][-TAIL_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip()[:LINE] for line in reversed(lines) if line.strip()), "it printed nothing")


def answer_of(
    words: Sequence[str], limit_s: float, *, text: str = "", env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a tool of the system, such as squeue, and wait for its answer.

    Its code is 127 where it cannot be started, and 124 where it takes longer than `limit_s` seconds; `stderr` says so.
    """
    try:
        return subprocess.run(words, input=text, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        why, code = f"{words[0]} did not answer within {limit_s:g} s; try again later", 124
    except FileNotFoundError:
        why, code = f"there is no `{words[0]}` on this machine", 127
    except OSError as error:
        why, code = f"{words[0]} cannot be started: {error.strerror}", 127
    return subprocess.CompletedProcess(words, code, "", why)


SCRIPT = b"#!"
HEAD = 256
"""Bytes of the first line that the kernel reads."""


def why_not_started(word: str, error: OSError) -> str:
    """Words for what is wrong with the program of a command, and the fix.

    Args:
        word: the first word of the command, as `execvp` took it.
        error: what `execvp` raised.
    """
    path = word if "/" in word else shutil.which(word) or _on_path(word)
    if path is None or not os.path.lexists(path):
        return f"program not found: {word!r}; check the first word after `--`, or give its full path"
    return f"cannot run {word!r}: {_why_not_run(path, word, error)}"


def _why_not_run(path: str, word: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    if not os.path.exists(path):
        return f"it is a link to {os.path.realpath(path)!r}, which is not there; correct the link"
    if os.path.isdir(path):
        return "it is a folder; name a program in it"
    if not os.access(path, os.X_OK):
        return f"{reason}; make it executable (chmod +x)"
    interpreter = _interpreter(path)
    if error.errno == errno.EACCES and _is_noexec(path):
        start = f"`-- {interpreter or 'bash'} {word}`"
        return f"its file system is mounted noexec; start it by its interpreter, as in {start}"
    return _of_script(word, interpreter, reason) if interpreter else _of_binary(error.errno, reason)


def _of_script(word: str, interpreter: str, reason: str) -> str:
    if interpreter.endswith("\r"):
        return f"its lines end as on Windows (CR LF); save it with Unix line ends: sed -i 's/\\r$//' {word}"
    if not os.path.exists(interpreter):
        return f"its first line names {interpreter!r}, which is not there; correct that line"
    return f"{reason}; its first line names {interpreter!r}: see that it can be run"


def _of_binary(number: int | None, reason: str) -> str:
    if number == errno.ENOEXEC:
        return "it is no program, and its first line names none; write one there, such as #!/bin/bash"
    if number == errno.ENOENT:
        return "it is there, and the loader that it names is not: it was built for another system"
    return f"{reason}; check the file"


def _on_path(word: str) -> str | None:
    """A file of this name in PATH that cannot be run."""
    places = (os.path.join(folder, word) for folder in os.get_exec_path())
    return next((place for place in places if os.path.isfile(place)), None)


def _interpreter(path: str) -> str | None:
    """What the first line of a script names; None for another file."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(HEAD)
        if head.startswith(SCRIPT):
            line = head[len(SCRIPT) :].split(b"\n")[0].strip(b" \t")
            return os.fsdecode(line.split(b" ")[0].split(b"\t")[0])
    return None


def _is_noexec(path: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False
