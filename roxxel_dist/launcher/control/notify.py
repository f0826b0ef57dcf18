"""`--notify COMMAND`: the events of a job, each as one JSON object on the standard input of the user's command.

The commands run in the background, one for each event. A command that fails is one line, and never disturbs the job.
"""

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.launcher.host.command import LOOK_S, Command
from roxxel_dist.launcher.job.spec import Limits

AT_ONCE = 8
"""Commands that run at the same time, at most; further events are left out."""

EventName = Literal["restart", "set_aside", "hang", "end"]


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event of a job, as `--notify COMMAND` of a launch gives it to the command."""

    event: EventName
    """restart: another attempt follows. set_aside: the next attempt goes without hosts that it was given. hang: a rank
    was stuck. end: the job is over."""
    number: int
    """Its number among the events of this launcher, from 0."""
    time: float
    """Seconds since 1970."""
    job: str
    """The run id."""
    run: str
    """The run directory."""
    command: str
    """Secrets are masked."""
    hosts: tuple[str, ...]
    """The hosts of the job."""
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
        try:
            thread.start()
        except RuntimeError as error:
            self._say(f"an event is left out ({error}): this machine allows no more processes (ulimit -u, pids.max)")
            return
        self._threads.append(thread)

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
        try:
            command = Command(["/bin/sh", "-c", self._command], self._limits.notify_s, text=text, spares=True)
        except OSError as error:
            self._say(f"the command cannot be started ({error.strerror})")
            return
        command.wait(self._stop.is_set)
        if command.why:
            self._say(f"the command {command.why}: it was killed")
        elif self._stop.is_set() and command.code == -signal.SIGKILL:
            self._say(f"the job was over, and the command ran for {command.seconds:.0f} s: it was killed")
        elif command.end:
            self._say(f"the command failed with {command.end}: {command.last_line}")

    def _say(self, problem: str) -> None:
        """Show each problem once."""
        if problem not in self._said:
            self._said.add(problem)
            self.said_late = self._is_over
            self._info(f"--notify: {problem}")
