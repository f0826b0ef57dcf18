"""`--notify COMMAND`: the events of a job, each as one JSON object on the standard input of the user's command.

The commands run in the background, one for each event. A command that fails is one line, and never disturbs the job.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.launcher.host.process_tree import die_with_parent
from roxxel_dist.launcher.job.limits import Limits

AT_ONCE = 8
"""Commands that run at the same time, at most; further events are left out."""
LOOK_S = 0.05
TAIL_BYTES, LINE = 4096, 200
"""What is kept of the output of a command, and how long a quoted line may be."""

EventName = Literal["restart", "set_aside", "hang", "end"]


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event of a job, as `--notify COMMAND` of a launch gives it to the command."""

    event: EventName
    """restart: another attempt follows. set_aside: the next attempt goes without hosts that it was given. hang: a rank
    was stuck. end: the job is over."""
    number: int
    """Of the events of this launcher, from 0."""
    time: float
    """Seconds since 1970."""
    job: str
    """The run id."""
    run: str
    """The run directory."""
    command: str
    """Secrets are masked."""
    hosts: tuple[str, ...]
    """All hosts of the job."""
    about: tuple[str, ...]
    """The host of the rank that failed or hung, or the hosts that are set aside. Empty if no host is known."""
    rank: int | None
    """The rank that failed or hung; null if no rank is known."""
    step: int
    """The largest step that any rank has entered."""
    attempt: int
    """The newest attempt, from 0."""
    code: int | None
    """The exit code of the attempt that ended, or of the job; null for set_aside."""
    words: str
    """What the launcher prints about it, in one line."""


class Notifier:
    """Runs the command of a job for each of its events.

    Args:
        command: for `/bin/sh -c`.
        record: the record of the job as it is now.
        info: shows a line to a person.
        limits: of the job.
    """

    def __init__(
        self, command: str, record: Callable[[], JobRecord], info: Callable[[str], None], limits: Limits
    ) -> None:
        self._command, self._record, self._info = command, record, info
        self._limits = limits
        self._count = 0
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._said: set[str] = set()
        self._is_over = False
        self.said_late: bool = False
        """Whether a problem was shown after the event `end`."""

    def send(
        self,
        event: EventName,
        words: str,
        *,
        about: Sequence[str] = (),
        rank: int | None = None,
        code: int | None = None,
    ) -> None:
        """Start the command for an event, and return at once."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= AT_ONCE and event != "end":
            self._say(f"{AT_ONCE} commands still run, so an event is left out")
            return
        now = self._record()
        message = JobEvent(
            event=event,
            number=self._count,
            time=time.time(),
            job=now.run_id,
            run=now.run_dir,
            command=now.command,
            hosts=now.hosts,
            about=tuple(host for host in about if host),
            rank=rank,
            step=now.step,
            attempt=now.attempt,
            code=code,
            words=" ".join(words.split()),
        )
        self._count += 1
        self._is_over = event == "end"
        text = json.dumps(dataclasses.asdict(message)) + "\n"
        thread = threading.Thread(target=self._run, args=(text,), name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, wait: Callable[[float], Sequence[int]]) -> None:
        """Wait for the commands that still run, at most `Limits.notify_end_s`, or until `wait` returns a signal.

        `wait` waits so many seconds, less if there is a signal. Commands that still run then are killed.
        """
        end = time.monotonic() + self._limits.notify_end_s
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < end:
            if wait(LOOK_S):
                break
        self._stop.set()
        for thread in self._threads:
            thread.join(self._limits.notify_s)  # it kills its command now

    def _run(self, text: str) -> None:
        stdin = os.memfd_create("event")  # no pipe: a command need not read it
        try:
            with os.fdopen(stdin, "wb", closefd=False) as file:
                file.write(text.encode())
            os.lseek(stdin, 0, os.SEEK_SET)
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C on the terminal is for the launcher
                preexec_fn=die_with_parent,  # noqa: PLW1509 - a system call, no lock; this thread waits for the end
            )
        except OSError as error:
            self._say(f"the command cannot be started ({error.strerror})")
            return
        finally:
            os.close(stdin)
        if problem := self._watch(process):
            self._say(problem)

    def _watch(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the end of a command; what is wrong with it, or empty."""
        assert process.stdout is not None
        begun, tail, out = time.monotonic(), b"", process.stdout.fileno()
        os.set_blocking(out, False)
        why, is_open = "", True
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(out, select.POLLIN)
        with process.stdout:
            while True:
                has_ended = process.poll() is not None  # before the look at its output, which is then complete
                ready = bool(is_open and poll.poll(0 if has_ended else 1000 * LOOK_S))
                part = os.read(out, 1 << 16) if ready else b""
                is_open = is_open and bool(part or not ready)
                tail = (tail + part)[-TAIL_BYTES:]
                if has_ended and not part:
                    break
                if not is_open and not has_ended:
                    time.sleep(LOOK_S)
                if self._stop.is_set():
                    why = f"the job was over, and the command ran for {time.monotonic() - begun:.0f} s"
                elif time.monotonic() - begun >= self._limits.notify_s:
                    why = f"the command did not end within {self._limits.notify_s:g} s"
                if why:
                    with suppress(ProcessLookupError):  # it has ended meanwhile
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return f"{why}: it was killed"
        lines = tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:LINE]
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the command failed with {how}: {last or 'it printed nothing'}" if code else ""

    def _say(self, problem: str) -> None:
        """Show each problem once."""
        if problem not in self._said:
            self._said.add(problem)
            self.said_late = self._is_over
            self._info(f"--notify: {problem}")
