"""One attempt at a job, from the start of its agents to the end of the last rank.

It runs in the launcher's own process, in one thread: it waits for what agents say, for signals, and for its clocks (how
long ranks may stay when another has ended, and how long a rank may stay in a step).
"""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_USAGE, OK_CODES, USAGE_S
from roxxel_dist.cluster.progress import Record
from roxxel_dist.launcher.control.hang import Hang, HangDetector
from roxxel_dist.launcher.control.outcome import AttemptResult, HostLost, RankExit
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.launcher.jobs.record import JobRecorder
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.output.logs import Logs
from roxxel_dist.launcher.placement import Placement
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.connection import HostConnection
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.protocol import Message

DUMP_S = 1.25
"""How long ranks have to answer with their stacks before one is taken for dead."""
AFTER_DUMP_S = 0.1
STACK = "most recent call first"
"""In the first line of the stack of a thread, as faulthandler writes it."""


@dataclass(kw_only=True)
class Dump:
    """Who was asked, and what came."""

    hang: Hang
    until: float
    stacks: dict[int, list[str]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    listening: set[int] = field(default_factory=set)
    hosts_left: int = 0

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Lines of a rank; what comes before its first stack is left out."""
        known = self.stacks.get(rank)
        if known is None:
            start = next((number for number, line in enumerate(lines) if STACK in line), None)
            if start is not None:
                self.stacks[rank] = list(lines[start:])
        else:
            known.extend(lines)

    def asked(self, ranks: Sequence[tuple[int, str, bool]]) -> None:
        """A host's answer: for each rank its state as in /proc, and whether it listens to the question."""
        self.hosts_left -= 1
        self.stopped |= {rank for rank, state, _ in ranks if state in "Tt"}
        self.listening |= {rank for rank, _, listens in ranks if listens}

    @property
    def complete(self) -> bool:
        """Whether everybody has answered who can."""
        return not self.hosts_left and self.listening - self.stopped <= set(self.stacks)

    @property
    def silent(self) -> set[int]:
        """Who was asked and has not answered."""
        return self.listening - set(self.stacks)


LOOK_S = 0.25
QUIET_S = 2.0


class Attempt:
    """The state machine of one attempt."""

    def __init__(
        self, job: JobSpec, pool: HostPool, logs: Logs, screen: Console, signals: SignalPipe, entry: JobRecorder
    ) -> None:
        self._job = job
        self._logs = logs
        self._screen = screen
        self._signals = signals
        self._entry = entry
        self._links = pool
        self._exits: list[RankExit] = []
        self._requested: int | None = None
        self._deadline: float | None = None
        self._late = False
        self._lost: HostLost | None = None
        self._failed = 0.0
        self._watch = HangDetector(job.step_timeout)
        self._look_at = 0.0
        self._dump: Dump | None = None
        self._hang: Hang | None = None
        self._reached = 0
        self.stack: list[str] = []
        """The stack of the rank that hung."""

    def run(self, placed: Sequence[Placement]) -> AttemptResult:
        """Start all, watch until all have ended, and say what happened."""
        self._links.start(self._job, placed)
        for place in placed:
            for rank in place.ranks:
                self._watch.observe(rank, Record(), time.monotonic())
        while not self._links.done:
            for link, event in self._links.events(self._wait_s()):
                self._on_event(link, event)
            self._on_signals()
            self._on_clock(time.monotonic())
        return AttemptResult(
            exits=self._exits,
            requested=self._requested,
            late=self._late,
            lost=self._lost,
            failed=self._failed,
            hang=self._hang,
            hang_host=next((link.host for link in self._links.all if self._hang and self._hang.rank in link.ranks), ""),
            reached=self._reached,
        )

    def _wait_s(self) -> float:
        waits = [self._look_at if self._dump is None else self._dump.until]
        if self._deadline is not None:
            waits.append(self._deadline)
        return max(0.0, min(waits) - time.monotonic())

    def _on_clock(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._late = True
            self._kill()
        if self._dump is not None:
            if self._dump.complete:
                self._dump.until = min(self._dump.until, now + AFTER_DUMP_S)
            if now >= self._dump.until:
                self._end_hang(self._dump, now)
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            self._entry.update(step=self._reached)
            hang = self._watch.overdue(now)
            if hang is not None and self._hang is None and not self._is_ending() and self._is_heard(hang.rank, now):
                living = sum(not link.done for link in self._links.all)
                self._dump = Dump(hang=hang, until=now + DUMP_S, hosts_left=living)
                self._links.order({"type": "dump"})

    def _is_heard(self, rank: int, now: float) -> bool:
        """Whether its host speaks: else nothing is known of its ranks, and the limit of the host decides."""
        return all(now - link.heard < QUIET_S for link in self._links.all if rank in link.ranks)

    def _is_ending(self) -> bool:
        """Whether the ranks are about to end for another reason: that one has its own limits."""
        failed = any(end.code not in OK_CODES for end in self._exits)
        return failed or self._late or self._lost is not None or self._requested is not None

    def _end_hang(self, dump: Dump, now: float) -> None:
        self._dump, self._look_at = None, now + LOOK_S
        if self._is_ending():
            return
        self._hang = self._watch.blame(dump.hang, stopped=dump.stopped, silent=dump.silent, now=now)
        self.stack = dump.stacks.get(self._hang.rank, [])
        self._kill()

    def _kill(self, after: float = 0) -> None:
        self._links.order({"type": "kill", "after": after}, within=after)

    def _on_event(self, link: HostConnection, event: Message | HostLost | str) -> None:
        if isinstance(event, HostLost):
            self._lost = self._lost or event
            for rank in link.ranks:
                self._watch.forget(rank)
            self._kill()
        elif isinstance(event, str):
            self._screen.print([f"{link.host}: {event}"])
        else:
            self._on_message(link, event)

    def _on_message(self, link: HostConnection, message: Message) -> None:
        match message["type"]:
            case "lines":
                lines = message["text"].split("\n")
                self._logs.write(message["rank"], link.host, message["time"], lines)
                self._screen.lines(message["rank"], message["time"], lines)
                if self._dump is not None:
                    self._dump.add(message["rank"], lines)
            case "status":
                self._screen.status(message["rank"], message["record"])
            case "progress":
                self._on_progress(message["records"])
            case "dumped":
                if self._dump is not None:
                    self._dump.asked(message["ranks"])
            case "exit":
                fields = {name: message[name] for name in ("rank", "pid", "code", "killed_by_us", "step")}
                self._on_exit(RankExit(host=link.host, **fields))

    def _on_progress(self, records: Sequence[tuple[int, dict[str, Any]]]) -> None:
        now = time.monotonic()
        for rank, values in records:
            self._watch.observe(rank, Record(**values), now)
        self._reached = max(self._reached, self._watch.reached)

    def _on_exit(self, end: RankExit) -> None:
        self._exits.append(end)
        if end.code not in OK_CODES and not end.killed_by_us:
            self._failed = self._failed or time.monotonic()
        self._watch.forget(end.rank)
        self._reached = max(self._reached, end.step)
        if end.code not in OK_CODES:
            if self._requested is None:  # the agent of this rank does so by itself; this is for the others
                self._kill(USAGE_S if end.code == EXIT_USAGE else 0)
        elif self._deadline is None and not self._late and self._requested is None:
            self._deadline = time.monotonic() + self._job.exit_timeout

    def _on_signals(self) -> None:
        for number in self._signals.take():
            self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        names: dict[int, str] = {signal.SIGINT: "Ctrl-C or stop", signal.SIGQUIT: "Ctrl-\\ or stop --kill"}
        name = names.get(number) or signal.Signals(number).name
        again = self._requested is not None
        self._requested = self._requested or number
        self._entry.update(state="stopping")
        self._deadline = None
        if again or number == signal.SIGQUIT:
            self._screen.info(f"{name}{' again' * again}: killing the ranks")
            self._kill()
            return
        self._screen.info(f"{name}: the ranks get {self._job.grace:g} s to save and leave; once more kills them")
        self._links.order({"type": "stop", "grace": self._job.grace}, within=self._job.grace)
