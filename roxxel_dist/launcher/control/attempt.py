"""One attempt at a job, from the start of its agents to the end of the last rank.

It runs in the launcher's own process, in one thread: it waits for messages of agents, for signals, and for its clocks
(how long ranks may stay when another has ended, and how long a rank may stay in a step).
"""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.launcher.control.members import MemberHangs
from roxxel_dist.launcher.control.record import JobRecorder, RankProcess
from roxxel_dist.launcher.fleet.driver import Driver
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.placement import Placement
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import Console, Logs
from roxxel_dist.launcher.policy.hang import Hang, HangDetector, StepTimes
from roxxel_dist.launcher.policy.outcome import AttemptResult, CodeDiffers, HostLost, LateRank, RankExit, is_drain
from roxxel_dist.launcher.transport.connection import HostConnection
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.exit_codes import EXIT_USAGE, OK_CODES
from roxxel_dist.process.interrupt import AGAIN, SignalPipe, in_batch_job, kills
from roxxel_dist.process.progress import Record

AFTER_DUMP_S = 0.1
STACK = "most recent call first"
"""Words in the first line of the stack of a thread, as faulthandler writes it."""
CHECK_S = 0.25
END_S = 5.0
"""Seconds, of the time that a system leaves a host, for the ends of launcher and agents."""
START_S = 600.0
"""Ranks of a program that reports no steps are taken for started then."""


@dataclass(kw_only=True)
class StackDump:
    """The ranks were asked for their stacks, because one hangs: which ranks listen, and the stacks received."""

    hang: Hang | None
    """None where the time to end is over (--exit-timeout)."""
    until: float
    hosts_left: int
    least: float = 0.0
    """The earliest end of the wait, although all have answered."""
    stacks: dict[int, list[str]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    listening: set[int] = field(default_factory=set)
    suspects: dict[str, str] = field(default_factory=dict)
    """Variables of ranks that may keep them from each other."""

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Add lines of a rank, except those before its first stack."""
        starts = (number for number, line in enumerate(lines) if STACK in line)
        start = 0 if rank in self.stacks else next(starts, None)
        if start is not None:
            self.stacks.setdefault(rank, []).extend(lines[start:])

    def answer(self, ranks: Sequence[tuple[int, str, bool]], suspects: Mapping[str, str]) -> None:
        """Take in what an agent has asked its ranks."""
        self.hosts_left -= 1
        self.stopped |= {rank for rank, state, _ in ranks if state in "Tt"}  # as in /proc
        self.listening |= {rank for rank, _, listens in ranks if listens}
        self.suspects.update(suspects)

    @property
    def complete(self) -> bool:
        """Whether all ranks that can answer have answered."""
        return not self.hosts_left and self.listening - self.stopped <= self.stacks.keys()


@dataclass(eq=False, kw_only=True, slots=True)
class RunningRank:
    """A rank that has been started and has not ended; as `RankProcess`, which is written once a second."""

    host: str
    pid: int
    record: Record = field(default_factory=Record)
    changed_at: float = 0.0

    def process(self, rank: int) -> RankProcess:
        """The entry of the job's record about it."""
        return RankProcess(
            rank=rank,
            host=self.host,
            pid=self.record.pid or self.pid,
            step=self.record.entered,
            activity=self.record.activity,
            changed_at=self.changed_at,
        )


@dataclass(kw_only=True)
class Attempt:
    """The state machine of one attempt."""

    job: JobSpec
    pool: HostPool
    logs: Logs
    console: Console
    signals: SignalPipe
    recorder: JobRecorder
    key: str = field(repr=False)
    """The key of the job's folders in memory; a secret."""
    address: str
    """The address of the first host, as the others reach it."""
    spares: str
    """Whether hosts keep warm spares: on, off, auto."""
    fleet: Driver | None = None
    """The hosts of the job, which may join it and leave it; None where they never change."""
    times: StepTimes = field(default_factory=StepTimes)
    """Those of earlier attempts on as many devices; kept up to date."""
    grow_after: int | None = None
    """The step that all ranks must have done before hosts join or leave, so that each attempt comes to a new one; None
    where the program is not known to report steps."""
    _exits: list[RankExit] = field(default_factory=list)
    _has_failure: bool = False
    """Whether a rank has not ended well."""
    _deadline: float | None = None
    _check_at: float = 0.0
    _dump: StackDump | None = None
    _running: dict[int, RunningRank] = field(default_factory=dict)
    members: MemberHangs | None = None
    """The hangs of other hosts, where these have launchers of their own."""
    _silent_since: float | None = None
    """Since when no host has sent anything; None while any does."""
    _looked: float = 0.0
    _said: set[str] = field(default_factory=set)
    """What agents have noted."""
    _requests: list[tuple[int, float]] = field(default_factory=list)
    """Signals that asked for the end, and when."""

    def run(self, placed: Sequence[Placement]) -> AttemptResult:
        """Start all, watch until all have ended, and return what happened."""
        self._result = AttemptResult(exits=self._exits, hosts=len(placed))
        self._code: dict[str, tuple[str, int, str, str]] = {}  # checksum, rank, host, path of each module
        self._begun = time.monotonic()
        self._detector = HangDetector(self.job.step_timeout, self.times, still_s=self.job.limits.still_s)
        self._result.lost = self.pool.start(self.job, placed, self.key, self.spares, self.address)
        for place in placed:
            for rank in place.ranks:
                self._detector.observe(rank, Record(), time.monotonic())
        while self.pool.at_work:
            clocks = [self._check_at if self._dump is None else self._dump.until]
            if self._deadline is not None:
                clocks.append(self._deadline)
            for host, event in self.pool.events(max(0.0, min(clocks) - time.monotonic())):
                self._on_event(host, event)
            for number in self.signals.take() if self.pool.woken else ():
                self._on_signal(number)
            self._on_clock(time.monotonic())
        return self._result

    def _on_event(self, host: HostConnection, event: Message | HostLost | str) -> None:
        match event:
            case {"type": "progress", "records": records}:  # first: most are of this kind, and cases are tried in order
                self._on_progress(records)
            case HostLost():
                self._on_lost(host, event)
            case str() | {"type": "note"}:
                self._tell(host, event)
            case {"type": "lines", "rank": rank, "time": when, "text": text}:
                self._on_lines(host, rank, when, text.split("\n"))
            case {"type": "started", "rank": rank, "pid": pid}:
                self._running[rank] = RunningRank(host=host.host, pid=pid)
            case {"type": "signal", "number": number}:
                self._on_host_signal(host.host, number)
            case {"type": "saved", "step": step}:
                self._result.saved = max(self._result.saved, step)
                self._change_hosts()
            case {"type": "status", "rank": rank, "record": record}:
                self.console.status(rank, record)
            case {"type": "code", "files": files}:
                self._on_code(host, files)
            case {"type": "dumped", **values} if self._dump is not None:
                self._dump.answer(**values)
            case {"type": "exit", **values}:
                self._on_exit(RankExit(host=host.host, **values))

    def _on_lines(self, host: HostConnection, rank: int, when: float, lines: list[str]) -> None:
        self.logs.write(rank, host.host, when, lines)
        self._detector.hear(time.monotonic())
        self.console.lines(rank, when, lines)
        if self._dump is not None:
            self._dump.add(rank, lines)

    def _tell(self, host: HostConnection, said: Message | str) -> None:
        """Show a line of a client, or what an agent has noted, which each host may say."""
        text = said if isinstance(said, str) else said["text"]
        if isinstance(said, str) or text not in self._said:
            self._said.add(text)
            self.console.print([f"{host.host}: {text}"])

    def _on_lost(self, host: HostConnection, event: HostLost) -> None:
        self._result.gone_by[event.host] = event.gone_by
        if event.by_link:
            self._result.cut.add(event.host)
        for rank in host.ranks:
            self._running.pop(rank, None)
        if host.unfinished:
            self._result.lost = self._result.lost or event
            self.pool.kill()

    def _on_progress(self, records: Sequence[Sequence[Any]]) -> None:
        now, when, reached = time.monotonic(), time.time(), self._result.reached
        for rank, *values in records:
            record = Record(*values)
            is_new = self._detector.observe(rank, record, now)
            if (running := self._running.get(rank)) is not None:
                running.record = record
                if is_new:
                    running.changed_at = when
            if record.activity == "exit":
                self._start_exit_timeout()
            reached = max(reached, record.entered)
        self._result.reached = reached

    def _on_code(self, host: HostConnection, files: Sequence[tuple[int, str, str, str]]) -> None:
        """End a start in which ranks run different sources; later it would cost more than it is worth."""
        for rank, name, path, checksum in files:
            first = self._code.setdefault(name, (checksum, rank, host.host, path))
            if first[0] == checksum or self._is_ending():
                continue
            there = f"rank {first[1]} on host {first[2]}" + f" ({first[3]})" * (first[3] != path)
            text = f"rank {rank} on host {host.host} runs another {path} than {there}"
            if self._is_starting:
                text += "; all ranks must run the same code: let a change of it end, or bring it to all hosts"
                self._result.differs = CodeDiffers(rank=rank, host=host.host, text=text)
                self.pool.kill()
            else:
                self.console.info(f"warning: {text}: it was changed while the job ran")

    @property
    def _is_starting(self) -> bool:
        """Whether ranks may still be kept from going on: none has entered a step."""
        return not self._result.reached and time.monotonic() - self._begun <= START_S

    def _on_exit(self, end: RankExit) -> None:
        result = self._result
        self._exits.append(end)
        self._running.pop(end.rank, None)
        result.reached = max(result.reached, end.step)
        if end.code not in OK_CODES:
            self._has_failure = True
            if not end.killed_by_us:
                result.failed = result.failed or time.monotonic()
            if not is_drain(result):  # the agent of this rank does so by itself; this is for the others
                self.pool.kill(self.job.limits.usage_s if end.code == EXIT_USAGE else 0)
        elif not is_drain(result):  # nor after a failure: then no rank can hang any more
            self._detector.forget(end.rank)
            self._start_exit_timeout()

    def _start_exit_timeout(self) -> None:
        """Start --exit-timeout: a rank has ended well, and the others are to follow."""
        if self._deadline is None and self.job.exit_timeout and not self._result.late and not is_drain(self._result):
            self._deadline = time.monotonic() + self.job.exit_timeout

    def _on_signal(self, number: int, host: str = "") -> None:
        """Follow a request; `host` handed it on, and may have more time than --grace."""
        names: dict[int, str] = {signal.SIGINT: "Ctrl-C or stop", signal.SIGQUIT: "Ctrl-\\ or stop --kill"}
        name = (names.get(number) or signal.Signals(number).name) + f" at {host}" * bool(host)
        again = self._result.requested is not None
        self._result.requested = self._result.requested or number
        self._deadline = None
        if (again or number == signal.SIGQUIT) and kills(
            number, self._requests, time.monotonic(), batch_job=in_batch_job()
        ):
            self.console.info(f"{name}{' again' * again}: killing the ranks")
            self.pool.kill()
        elif not again:
            grace = max(self.job.grace, ((host and self.pool.backend.left_s(host)) or 0.0) - END_S)
            self.console.info(f"{name}: the ranks get {round(grace, 1):g} s to save and exit; {AGAIN}")
            self.pool.order({"type": "stop", "grace": grace}, within=grace)
        self._requests.append((number, time.monotonic()))  # only now: what came meanwhile is of the same moment

    def _on_host_signal(self, host: str, number: int) -> None:
        """Follow a signal to an agent: a system ends the job (its batch system), or that host alone."""
        result = self._result
        if result.requested is not None or host in result.departing:
            return  # it tells all processes of a host, or all hosts, and the launcher too
        if number != signal.SIGTERM or self.fleet is None or self.pool.backend.ends_with(host):
            self._on_signal(number, host)
            return
        is_ending = self._is_ending()
        result.departing.append(host)
        if is_ending:
            return
        grace = max(self.job.grace, (self.pool.backend.left_s(host) or 0.0) - END_S)
        self.console.info(
            f"SIGTERM at {host}: that host is to end; the ranks get {round(grace, 1):g} s to save and exit"
        )
        result.host_change = f"host {host} was asked to end (SIGTERM)"
        self._deadline = None
        self.pool.order({"type": "stop", "grace": grace}, within=grace)

    def _on_clock(self, now: float) -> None:
        if now - self._looked >= self.job.limits.heartbeat_s / 4:  # a clock: each look is one at all hosts
            self._note_silence(now)
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._result.late = True
            self._ask_for_stacks(None, now)
        if self._dump is not None:
            if self._dump.complete:
                self._dump.until = max(self._dump.least, min(self._dump.until, now + AFTER_DUMP_S))
            if now >= self._dump.until:
                self._end_dump(self._dump, now)
        elif now >= self._check_at:
            self._note_progress(now)
            self._check_for_a_hang(now)
            self._check_at = now + max(CHECK_S, 10 * (time.monotonic() - now))  # it looks at all ranks

    def _note_progress(self, now: float) -> None:
        """Keep the record of the job, and look at what others have found meanwhile."""
        self.recorder.note_progress(
            "running" if self._result.requested is None else "stopping", self._result.reached, self._processes
        )
        if self.fleet is not None:
            self.fleet.tick()
        self._change_hosts(joins_too=not self.job.grow_at_checkpoint)

    def _processes(self) -> tuple[RankProcess, ...]:
        return tuple(running.process(rank) for rank, running in sorted(self._running.items()))

    def _check_for_a_hang(self, now: float) -> None:
        if self._result.hang is not None or self._is_ending() or self.pool.silence(now) > self.job.limits.common_s:
            return  # a detector that is not asked takes no silence of the link for one of the ranks
        hang = self._detector.check(now)
        if hang is not None and now - self._host_of(hang.rank).last_seen < self.job.limits.quiet_s:
            self._ask_for_stacks(hang, now)  # else nothing is known of its ranks: the limit of the host decides

    def _ask_for_stacks(self, hang: Hang | None, now: float) -> None:
        self._dump = StackDump(hang=hang, until=now + self.job.limits.dump_s, hosts_left=len(self.pool.at_work))
        if hang is not None and self.members is not None:
            self.members.write(hang, self._host_of(hang.rank).host)
            self._dump.until = self._dump.least = now + self.job.limits.members_s
        self.pool.order({"type": "dump"})

    def _note_silence(self, now: float) -> None:
        """Say once that this machine's own link is cut, and once that it is back. Time in between does not count."""
        silence, silent_s = self.pool.silence(now), self.job.limits.silent_s
        if self._deadline is not None and silence > self.job.limits.common_s:
            self._deadline += now - self._looked
        self._looked = now
        if self._silent_since is None and silence >= silent_s and not self._is_ending():
            self._silent_since = now - silence
            lease = max(self.job.host_lease, silent_s) - silent_s
            hosts = "no host has" if len(self.pool.all) > 1 else f"host {next(iter(self.pool.all)).host} has not"
            self.console.info(
                f"{hosts} sent anything for {silent_s:g} s: this machine seems to be disconnected; the ranks "
                f"continue without it for {lease:g} s more (--host-lease)"
            )
        elif self._silent_since is not None and self.pool.is_whole(now):
            self.console.info(f"all hosts respond again, after {now - self._silent_since:.0f} s; the job goes on")
            self._silent_since = None

    def _change_hosts(self, *, joins_too: bool = True) -> None:
        """Have the ranks save and leave, where hosts are to join or leave the job: the next attempt has others.

        Not before a new step is done: until then there is nothing to save, and a compilation would begin again.
        """
        if self.fleet is None or self._is_ending() or not self._has_new_step:
            return
        if (drain := self.fleet.drain(joins_too=joins_too)) is None:
            return
        grace = self.job.grace
        self.console.info(f"{drain.why}: the ranks get {grace:g} s to save and exit; {drain.then}")
        self._result.host_change = drain.then
        self.pool.order({"type": "stop", "grace": grace}, within=grace)

    @property
    def _has_new_step(self) -> bool:
        """Whether the ranks have done a step beyond `grow_after`; also true of a program that reports none."""
        finished = self._detector.finished
        if finished is None:
            return self.grow_after is None
        return finished > (self.grow_after or 0)

    def _end_dump(self, dump: StackDump, now: float) -> None:
        self._dump, self._check_at = None, now + CHECK_S
        if dump.hang is None:
            self._end_late(dump)
        if dump.hang is None or self._is_ending():
            return
        silent = dump.listening - dump.stacks.keys()
        hang = self._result.hang = self._detector.refine(dump.hang, stopped=dump.stopped, silent=silent, now=now)
        self._result.hang_host = self._host_of(hang.rank).host
        if self.members is not None:
            hang, self._result.hang_host = self.members.first(hang, self._result.hang_host)
            self._result.hang = hang
        self._result.stack = dump.stacks.get(hang.rank, ())
        self._result.suspects = dump.suspects
        self.pool.kill()

    def _end_late(self, dump: StackDump) -> None:
        """The time to end is over: kill the ranks that stay."""
        self._result.stayed = [
            LateRank(
                rank=process.rank,
                host=process.host,
                pid=process.pid,
                step=process.step,
                exits=process.activity == "exit",
                stack=tuple(dump.stacks.get(process.rank, ())),
            )
            for process in self._processes()
        ]
        self.pool.kill()

    def _is_ending(self) -> bool:
        """Whether the ranks are about to end for another reason: that one has its own limits."""
        result = self._result
        ends = (result.lost, result.requested, result.differs)
        return bool(self._has_failure or result.late or result.host_change) or any(end is not None for end in ends)

    def _host_of(self, rank: int) -> HostConnection:
        return next(host for host in self.pool.all if rank in host.ranks)
