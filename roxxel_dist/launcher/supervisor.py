"""The controller: one attempt at a job, from the start of its agents to its exit code.

It runs in the launcher's own process, in one thread: it waits for what agents say, for signals, and for the one clock
it has (how long ranks may stay when another has ended).
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol

from roxxel_dist.cluster.contract import EXIT_DRAINED, EXIT_HANG, EXIT_USAGE, ORDERLY
from roxxel_dist.launcher.channel import Decoder, Message, encode
from roxxel_dist.launcher.job import JobSpec, coordinator_port, rank_environment
from roxxel_dist.launcher.logs import Logs, Screen, silence
from roxxel_dist.launcher.outcome import (
    USAGE_S,
    Exit,
    Outcome,
    exit_code,
    failure_report,
    first_failure,
    how,
    late_report,
)

CHUNK = 1 << 20
AGENT_END_S = 10.0


class Backend(Protocol):
    """Where the ranks run."""

    @property
    def hosts(self) -> Sequence[str]:
        """One agent each; ranks are dealt to them in blocks."""
        ...

    @property
    def coordinator_host(self) -> str:
        """The address of rank 0's host, as the other ranks reach it."""
        ...

    def start(self, host: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host, its stdin and stdout being pipes to here."""
        ...


@dataclass(eq=False, kw_only=True)
class Link:
    """The controller's end of one agent."""

    host: str
    ranks: list[int]
    process: subprocess.Popen[bytes]
    decoder: Decoder = field(default_factory=Decoder)
    done: bool = False

    def send(self, message: Message) -> None:
        """Give an order; an agent that is gone needs none."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def close(self) -> int:
        """End the agent (and what ranks it has), and say how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            return self.process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Signals:
    """SIGINT, SIGTERM and SIGHUP as bytes in a pipe (`fd`) instead of exceptions, while the context is open."""

    def __enter__(self) -> "Signals":
        self.fd, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._wakeup = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        names = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to stay
            names.append(signal.SIGHUP)
        self._before = {name: signal.signal(name, self._noted) for name in names}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.fd)
        os.close(self._writes)

    @staticmethod
    def _noted(number: int, frame: FrameType | None) -> None:
        """The wake-up descriptor has the number already."""


class Attempt:
    """The state machine of one attempt."""

    def __init__(self, job: JobSpec, logs: Logs, screen: Screen, signals: Signals) -> None:
        self._job = job
        self._logs = logs
        self._screen = screen
        self._signals = signals
        self._select = selectors.DefaultSelector()
        self._links: list[Link] = []
        self._exits: list[Exit] = []
        self._requested: int | None = None
        self._deadline: float | None = None
        self._late = False
        self._lost: tuple[str, int] | None = None

    def run(self, backend: Backend, coordinator: str) -> Outcome:
        """Start all, watch until all have ended, and say what happened."""
        try:
            self._select.register(self._signals.fd, selectors.EVENT_READ)
            self._start(backend, coordinator)
            while not all(link.done for link in self._links):
                for key, _ in self._select.select(self._wait_s()):
                    if key.data is None:
                        self._on_signal(os.read(self._signals.fd, 1)[0])
                    else:
                        self._read(key.data)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._deadline = None
                    self._late = True
                    self._kill()
        finally:
            self._select.close()
            for link in self._links:
                link.close()
        return Outcome(exits=self._exits, requested=self._requested, late=self._late, lost=self._lost)

    def _start(self, backend: Backend, coordinator: str) -> None:
        hosts = backend.hosts
        for number, host in enumerate(hosts):
            first, end = (self._job.nprocs * n // len(hosts) for n in (number, number + 1))
            link = Link(host=host, ranks=list(range(first, end)), process=backend.start(host))
            self._links.append(link)
            assert link.process.stdout is not None
            self._select.register(link.process.stdout.fileno(), selectors.EVENT_READ, link)
            ranks = [
                {"rank": rank, "env": rank_environment(self._job, rank, coordinator, os.environ)} for rank in link.ranks
            ]
            link.send({"type": "start", "command": self._job.command, "ranks": ranks, "total": self._job.nprocs})

    def _wait_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _order(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def _kill(self, after: float = 0) -> None:
        self._order({"type": "kill", "after": after})

    def _read(self, link: Link) -> None:
        assert link.process.stdout is not None
        fd = link.process.stdout.fileno()
        data = os.read(fd, CHUNK)
        if not data:
            self._select.unregister(fd)
            if not link.done:
                self._on_lost(link)
        for message in link.decoder.feed(data):
            self._on_message(link, message)

    def _on_message(self, link: Link, message: Message) -> None:
        match message["type"]:
            case "lines":
                lines = message["text"].split("\n")
                self._logs.write(message["rank"], link.host, message["time"], lines)
                self._screen.lines(message["rank"], message["time"], lines)
            case "status":
                self._screen.status(message["rank"], message["record"])
            case "exit":
                fields = {name: message[name] for name in ("rank", "pid", "code", "culled", "step")}
                self._on_exit(Exit(host=link.host, **fields))
            case "done":
                link.done = True

    def _on_exit(self, end: Exit) -> None:
        self._exits.append(end)
        if end.code not in ORDERLY:
            if self._requested is None:  # the agent of this rank does so by itself; this is for the others
                self._kill(USAGE_S if end.code == EXIT_USAGE else 0)
        elif self._deadline is None and not self._late and self._requested is None:
            self._deadline = time.monotonic() + self._job.exit_timeout

    def _on_lost(self, link: Link) -> None:
        """The agent ended by itself; its guard has killed its ranks (it holds the channel until it has)."""
        link.done = True
        self._lost = self._lost or (link.host, link.process.wait(AGENT_END_S))
        self._kill()

    def _on_signal(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._requested is not None:
            _say(f"{name} again: killing the ranks")
            self._kill()
            return
        _say(f"{name}: the ranks get {self._job.grace:g} s to save and leave; once more kills them")
        self._requested = number
        self._deadline = None
        self._order({"type": "stop", "grace": self._job.grace})


def run(job: JobSpec, backend: Backend) -> int:
    """Run a job to its end and return its exit code. Call it from the main thread.

    Raises ValueError, before anything was started, where the port of the job is in use.
    """
    coordinator = f"{backend.coordinator_host}:{coordinator_port(job.port)}"
    logs = Logs(job)
    try:
        with Signals() as signals, Screen(all_ranks=job.all_ranks) as screen:
            outcome = Attempt(job, logs, screen, signals).run(backend, coordinator)
    finally:
        logs.close()
    code = exit_code(outcome)
    _report(job, outcome, code, logs)
    if code == EXIT_USAGE:
        logs.remove()
    return code


def _report(job: JobSpec, outcome: Outcome, code: int, logs: Logs) -> None:
    failure = first_failure(outcome)
    if code in (0, EXIT_DRAINED):
        if code == EXIT_DRAINED:
            _say("stopped on request; every rank saved and left")
    elif failure is not None and failure.code == EXIT_USAGE:
        tail = logs.tail(failure.rank)
        if not (job.all_ranks or failure.rank == 0 or set(tail[-1:]) & set(logs.tail(0))):
            _print(tail)
    elif failure is not None and failure.code == EXIT_HANG and any(end.culled for end in outcome.exits):
        _say(late_report(outcome, job.exit_timeout))
    elif failure is not None:
        _print(failure_report(failure, logs.tail(failure.rank), logs.path(failure.rank)))
    elif outcome.lost is not None:
        host, end = outcome.lost
        _say(f"the agent on host {host} ended before its ranks ({how(end)}); they were killed")
    elif outcome.late:
        _say(late_report(outcome, job.exit_timeout))
    else:
        _say(f"stopped on request ({how(-(outcome.requested or 0))}) before the ranks had saved")


def _say(text: str) -> None:
    _print([f"roxxel-dist: {text}"])


def _print(lines: Sequence[str]) -> None:
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed must not keep the ranks from saving
        silence(sys.stderr)
