"""One attempt at a job, from the start of its agents to the end of the last rank.

It runs in the launcher's own process, in one thread: it waits for what agents say, for signals, and for its clocks (how
long ranks may stay when another has ended, and how long a rank may stay in a step).
"""

import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.cluster.contract import EXIT_USAGE, ORDERLY
from roxxel_dist.cluster.progress import Record
from roxxel_dist.launcher.channel import Message
from roxxel_dist.launcher.hang import Hang, Watch
from roxxel_dist.launcher.job import JobSpec, Placement
from roxxel_dist.launcher.link import AGENT_END_S, Backend, Link
from roxxel_dist.launcher.logs import Logs, Screen, silence
from roxxel_dist.launcher.outcome import USAGE_S, Exit, Outcome
from roxxel_dist.launcher.signals import Signals

CHUNK = 1 << 20
LOOK_S = 0.25
DUMP_S = 1.25
"""How long ranks have to answer with their stacks before one is taken for dead."""
AFTER_DUMP_S = 0.1
STACK = "most recent call first"
"""In the first line of the stack of a thread, as faulthandler writes it."""


@dataclass(kw_only=True)
class Dump:
    """The stacks that were asked for."""

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

    @property
    def complete(self) -> bool:
        """Whether everybody has answered who can."""
        return not self.hosts_left and self.listening - self.stopped <= set(self.stacks)


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
        self._watch = Watch(job.step_timeout)
        self._look_at = 0.0
        self._dump: Dump | None = None
        self._hang: Hang | None = None
        self._reached = 0
        self.stack: list[str] = []
        """The stack of the rank that hung."""

    def run(self, backend: Backend, placed: Sequence[Placement]) -> Outcome:
        """Start all, watch until all have ended, and say what happened."""
        try:
            self._select.register(self._signals.fd, selectors.EVENT_READ)
            self._start(backend, placed)
            while not all(link.done for link in self._links):
                for key, _ in self._select.select(self._wait_s()):
                    if key.data is None:
                        self._on_signal(os.read(self._signals.fd, 1)[0])
                    else:
                        self._read(key.data)
                self._on_clock(time.monotonic())
        finally:
            self._select.close()
            for link in self._links:
                link.close()
        return Outcome(
            exits=self._exits,
            requested=self._requested,
            late=self._late,
            lost=self._lost,
            hang=self._hang,
            reached=self._reached,
        )

    def _start(self, backend: Backend, placed: Sequence[Placement]) -> None:
        for place in placed:
            link = Link(host=place.host, ranks=list(place.ranks), process=backend.start(place.host))
            self._links.append(link)
            assert link.process.stdout is not None
            self._select.register(link.process.stdout.fileno(), selectors.EVENT_READ, link)
            ranks = [{"rank": rank, "env": dict(env)} for rank, env in place.ranks.items()]
            link.send({"type": "start", "command": self._job.command, "ranks": ranks, "total": self._job.nprocs})
            for rank in place.ranks:
                self._watch.observe(rank, Record(), time.monotonic())

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
            hang = self._watch.overdue(now)
            if hang is not None and self._hang is None and not self._is_ending():
                self._dump = Dump(hang=hang, until=now + DUMP_S, hosts_left=sum(not link.done for link in self._links))
                self._order({"type": "dump"})

    def _is_ending(self) -> bool:
        """Whether the ranks are about to end for another reason: that one has its own limits."""
        failed = any(end.code not in ORDERLY for end in self._exits)
        return failed or self._late or self._lost is not None or self._requested is not None

    def _end_hang(self, dump: Dump, now: float) -> None:
        self._dump, self._look_at = None, now + LOOK_S
        if self._is_ending():
            return
        silent = dump.listening - set(dump.stacks)
        self._hang = self._watch.blame(dump.hang, stopped=dump.stopped, silent=silent, now=now)
        self.stack = dump.stacks.get(self._hang.rank, [])
        self._kill()

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
                if self._dump is not None:
                    self._dump.add(message["rank"], lines)
            case "status":
                self._screen.status(message["rank"], message["record"])
            case "progress":
                self._on_progress(message["records"])
            case "dumped":
                self._on_dumped(message["ranks"])
            case "exit":
                fields = {name: message[name] for name in ("rank", "pid", "code", "culled", "step")}
                self._on_exit(Exit(host=link.host, **fields))
            case "done":
                link.done = True

    def _on_progress(self, records: Sequence[tuple[int, dict[str, Any]]]) -> None:
        now = time.monotonic()
        for rank, values in records:
            self._watch.observe(rank, Record(**values), now)
        self._reached = max(self._reached, self._watch.reached)

    def _on_dumped(self, ranks: Sequence[tuple[int, str, bool]]) -> None:
        if self._dump is None:
            return
        self._dump.hosts_left -= 1
        self._dump.stopped |= {rank for rank, state, _ in ranks if state in "Tt"}
        self._dump.listening |= {rank for rank, _, listens in ranks if listens}

    def _on_exit(self, end: Exit) -> None:
        self._exits.append(end)
        self._watch.forget(end.rank)
        self._reached = max(self._reached, end.step)
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
            say(f"{name} again: killing the ranks")
            self._kill()
            return
        say(f"{name}: the ranks get {self._job.grace:g} s to save and leave; once more kills them")
        self._requested = number
        self._deadline = None
        self._order({"type": "stop", "grace": self._job.grace})


def say(text: str) -> None:
    """A line of the launcher itself, for people."""
    write_lines([f"roxxel-dist: {text}"])


def write_lines(lines: Sequence[str]) -> None:
    """Lines for people, on stderr."""
    if not lines:
        return
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed must not keep the ranks from saving
        silence(sys.stderr)
