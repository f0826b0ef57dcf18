"""A job on hosts that fail, by a virtual clock: its rules are the real ones (`step`, `policy/`), the world is not.

What happens to the hosts is an iterator of `Happening`s. One rank runs on each host.
"""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.state import Fleet, State
from roxxel_dist.launcher.fleet.step import DEPART_S, SWAP_S, fleet_of, step
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang, HangDetector, StepTimes
from roxxel_dist.launcher.policy.outcome import REPEAT_S, AttemptResult, Decision, HostLost, RankExit, summary
from roxxel_dist.launcher.preflight.checks import CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport
from roxxel_dist.process.exit_codes import EXIT_DRAINED, EXIT_NOT_STARTED, EXIT_PREFLIGHT, EXIT_RUNTIME
from roxxel_dist.process.progress import Record

Kind = Literal["crash", "runtime", "hang", "refused", "lost", "link", "preempted", "slow", "join", "leave"]
LLAMA_3: Mapping[Kind, int] = {"lost": 268 + 21 + 32, "crash": 54 + 2, "runtime": 35, "hang": 7}
"""The 419 unexpected interruptions of Llama 3 405B on 16,384 GPUs in 54 days (arXiv 2407.21783, table 5), by what the
launcher sees. A GPU or another part of a host, and maintenance: the host is out until it is repaired. Software: a rank
ends. The network: the ranks end with an error of their runtime, on hosts that are well. A timeout of collectives: a
hang. That the parts of a host put it out is read into the table, which does not say so."""
SHARES: Mapping[Kind, float] = {kind: count / 419 for kind, count in LLAMA_3.items()}


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that happens to hosts (for `link`, to all); some kinds mean nothing where no rank runs."""

    at: float
    kind: Kind
    hosts: tuple[str, ...] = ()
    seconds: float = 0.0
    """How long they are away, or slow."""


def failures(
    rng: random.Random,
    hosts: Sequence[str],
    mtbf_s: float,
    *,
    repair_s: float = 7200.0,
    shares: Mapping[Kind, float] = SHARES,
    burst: float = 0.0,
) -> Iterator[Happening]:
    """Failures without end: each host fails once in `mtbf_s` seconds, on average, and is away for `repair_s` if it is
    lost. `burst`: the share of failures that hit neighbours too, at once or within minutes."""
    now, kinds, weights = 0.0, list[Kind](shares), [*shares.values()]
    while True:
        now += rng.expovariate(len(hosts) / mtbf_s)
        kind, first = rng.choices(kinds, weights)[0], rng.randrange(len(hosts))
        number = rng.randint(2, 4) if rng.random() < burst else 1
        near = tuple(hosts[(first + n) % len(hosts)] for n in range(min(number, len(hosts))))
        for some in (near,) if kind in ("lost", "preempted") else [(host,) for host in near]:
            yield Happening(at=now, kind=kind, hosts=some, seconds=rng.expovariate(1 / repair_s))
            now += rng.expovariate(1 / 120) if len(some) < len(near) else 0.0


ASK_S, AWAY_S = 1.0, 10.0
"""An answer of all hosts, and one that some do not give."""
WARM_S, DEPARTS_S = 15.0, 60.0
"""The imports of a host that is to join; from a system's notice to the end of a host."""
COPY_SHARE = 0.01
"""Copies in memory take this share of the steps' time, as `memory_copies: auto` does."""
CODES = {"crash": -9, "refused": EXIT_NOT_STARTED, "preempted": EXIT_DRAINED, "growth": EXIT_DRAINED}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of the ranks."""

    step_s: float
    save_s: float = 0.0
    """How long training stands still for a checkpoint."""
    checkpoint_every: int = 1000
    copy_every: int = 0
    """Steps between copies in the memory of another host; 0: none."""
    start_s: float = 60.0
    """From the start of the ranks to the first step."""
    steps: float = math.inf
    bug: int | None = None
    """The step in which the program fails always; 0: before its first step."""
    bug_rank: int | None = 0
    """The rank that fails then; None: another one each time."""


@dataclass(kw_only=True)
class Outcome:
    """The end of a job, and the way to it."""

    seconds: float = 0.0
    goodput: float = 0.0
    """The share of the time in which the hosts that were asked for did steps that are done once."""
    lost: dict[str, float] = field(default_factory=dict)
    """The other shares, by cause: that of the last interruption, `start`, `saves`, `copies`, `fewer hosts`."""
    steps: int = 0
    code: int | None = None
    """None: it still runs."""
    why: str = ""
    interruptions: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str]] = field(default_factory=list)
    """What people read, and when."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of an attempt: from step `base` on, from the time `begun` on, with a pause of `save_s` for each save."""

    base: int
    since: float
    """The time when the ranks began to start, or to train at this pace."""
    begun: float
    step_s: float
    save_s: float
    every: int

    def time_of(self, steps: float) -> float:
        """The time at which so many steps are done, and saved where that is due."""
        saves = steps // self.every - self.base // self.every if steps < math.inf else 0
        return self.begun + (steps - self.base) * self.step_s + saves * self.save_s

    def at(self, now: float) -> tuple[int, int]:
        """The steps that are done, and the last one of which a save has ended, which is at least `base`."""
        if now < self.begun:
            return self.base, self.base
        aligned = self.base // self.every * self.every  # where a cycle of steps and a save would have begun
        passed = now - self.begun + (self.base - aligned) * self.step_s
        cycles, rest = divmod(passed + 1e-6, self.every * self.step_s + self.save_s)
        saved = aligned + int(cycles) * self.every
        return saved + min(self.every, int(rest / self.step_s)), max(self.base, saved)


@dataclass(kw_only=True)
class Account:
    """The account of the time of a job: each second is counted, and once."""

    work: Work
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by what they were lost to."""
    cause: str = "start"
    """What time without new steps is due to: the last interruption."""

    def wait(self, seconds: float) -> None:
        """Time in which nothing trains."""
        self.spent[self.cause] += max(0.0, seconds)

    def undo(self, steps: int) -> None:
        """Steps that are lost, and done again."""
        self.spent[self.cause] += steps * self.work.step_s

    def train(self, pace: Pace, now: float) -> tuple[int, int]:
        """Time at a pace until now, with its start; returns `pace.at(now)`."""
        (steps, saved), spent = pace.at(now), self.spent
        done, saves = steps - pace.base, saved // pace.every - pace.base // pace.every
        copy_s = self.work.step_s * COPY_SHARE * bool(self.work.copy_every)
        self.wait(min(now, pace.begun) - pace.since)
        spent["saves"] += saves * pace.save_s
        spent["copies"] += done * copy_s
        spent["fewer hosts"] += done * max(0.0, pace.step_s - self.work.step_s - copy_s)
        rest = max(0.0, now - pace.begun) - done * pace.step_s - saves * pace.save_s
        spent["saves" if rest > pace.step_s else self.cause] += max(0.0, rest)
        return steps, saved


class Simulation:
    """One job and its hosts.

    Attributes:
        now: the virtual time, in seconds.
        fleet: as the rules have it.
        starts: when each attempt began, and on which hosts.
        running: the hosts that have ranks.
    """

    def __init__(self, job: JobSpec, hosts: Sequence[str], work: Work, happenings: Iterable[Happening]) -> None:
        self.now: float = 0.0
        self.work: Work = work
        self.outcome: Outcome = Outcome()
        self.starts: list[tuple[float, tuple[str, ...]]] = []
        self.running: tuple[str, ...] = ()
        self.fleet: Fleet
        self.fleet, todo = fleet_of(job, hosts, now=0.0)
        self._happenings = iter(happenings)
        self._next = next(self._happenings, None)
        self._away, self._slow = dict[str, float](), dict[str, float]()  # until when
        self._wanted = len(hosts) - job.spare_hosts  # so many work where all is well
        self._done = self._saved = self._copied = 0
        self._refused = ""
        self._account = Account(work=work)
        self._pending: tuple[float, events.Look | events.Warm] | None = None
        self._times = StepTimes(usual={0: deque([work.step_s] * 3)})
        self._do(todo)

    def run(self, until: float) -> Outcome:
        """Let the job run to its end, or until this time."""
        outcome, gone_by = self.outcome, dict[str, float]()
        while (start := self._select(gone_by, until)) is not None:
            begun = self.now
            result = self._attempt(start, until)
            if result is None:
                break
            lost = "" if result.lost is None else result.lost.host
            attempt = summary(result, seconds=self.now - begun, counts=True)
            todo = self.step(events.AttemptEnded(attempt=attempt, lost=lost, departing=tuple(result.departing)))
            decision, gone_by = next(do for do in todo if isinstance(do, Decision)), result.gone_by
            outcome.log.append((self.now, decision.why))
            if not decision.again:
                outcome.code, outcome.why = decision.code, decision.why
                break
            waits = any(isinstance(do, events.AwaitEnd) for do in todo)
            self._pass(self.now + max(decision.wait, min(DEPART_S, DEPARTS_S) * waits))
        outcome.seconds, outcome.steps, spent = self.now, self._done, self._account.spent
        outcome.goodput = self._done * self.work.step_s / self.now
        outcome.lost = {cause: seconds / self.now for cause, seconds in sorted(spent.items()) if seconds > 0}
        return outcome

    def step(self, event: events.Event) -> list[events.Do]:
        """Tell the fleet of something."""
        self.fleet, todo = step(self.fleet, event, self.now)
        self._do(todo)
        return todo

    def is_up(self, host: str) -> bool:
        """Whether a host answers."""
        return self._away.get(host, 0.0) <= self.now

    def _do(self, todo: Sequence[events.Do]) -> None:
        for do in todo:
            match do:
                case events.Say(text=text) | events.Answer(text=text):
                    self.outcome.log.append((self.now, text))
                case events.Look() | events.Warm() if self.running:
                    assert self._pending is None, "one look at a time"
                    self._pending = self.now + WARM_S if isinstance(do, events.Warm) else self._answers_at(do), do
                case _:
                    pass

    def _select(self, gone_by: Mapping[str, float], until: float) -> events.Start | None:
        """The driver's part before a start; None where the job, or the time, ends."""
        todo = self.step(events.Begin(gone_by=gone_by))
        while self.now < until:
            match todo[-1]:
                case events.Look() as look:
                    self._pass(self.now + (ASK_S if all(map(self.is_up, look.assignment.hosts)) else AWAY_S))
                    todo = self.step(self._answer(look))
                case events.Wait(seconds=seconds):
                    self._pass(max(self.now + seconds, self._change))
                    todo = self.step(events.Tick())
                case events.Start(wait_s=seconds) as start:
                    self._pass(self.now + seconds)
                    return start
                case events.GiveUp(text=text):
                    self.outcome.code, self.outcome.why = EXIT_PREFLIGHT, text
                    self.outcome.log.append((self.now, text))
                    return None
                case do:
                    raise AssertionError(f"nobody is waited for: {do}")
        return None

    @property
    def _change(self) -> float:
        """Until when waiting changes nothing: a host comes, goes or may be used again, or the time for it is over."""
        then = [until for until in self._away.values() if until > self.now]
        then += [] if self._next is None else [self._next.at]
        then += [] if self.fleet.search is None else [self.fleet.search.deadline]
        return min((*then, *self._forgiven), default=math.inf)

    @property
    def _forgiven(self) -> list[float]:
        """When hosts that were set aside may be used again."""
        return [host.since + REPEAT_S for host in self.fleet.hosts.values() if host.state is State.ASIDE]

    def _answers_at(self, look: events.Look) -> float:
        """When a look ends while ranks run. Of looks at hosts that are all away, one is as good as many."""
        if any(self.is_up(host.name) for host in self.fleet.candidates):
            return self.now + ASK_S
        return max(self.now + AWAY_S, self._change)

    def _answer(self, do: events.Look | events.Warm) -> events.Answered | events.Warmed:
        """What the hosts say by now."""
        hosts = do.assignment.hosts if isinstance(do, events.Look) else do.candidates
        away = {host: "No route to host" for host in hosts if not self.is_up(host)}
        if isinstance(do, events.Warm):
            return events.Warmed(failed=away)
        slow = [host for host in hosts if host in do.check and self._slow.get(host, 0.0) > self.now]
        findings = [CheckResult("warning", "devices", (host,), f"{host}: slow", suspect=True) for host in slow]
        machines = {host: host for host in hosts}
        report = PreflightReport(address="a", port=1, findings=findings, unreachable=away, machines=machines)
        return events.Answered(report=report)

    def _pass(self, until: float) -> None:
        """Time goes on while no rank runs."""
        while self._next is not None and self._next.at <= until:
            self._spend(self._next.at)
            self._strike()
        self._spend(until)

    def _spend(self, until: float) -> None:
        self._account.wait(until - self.now)
        self.now = max(self.now, until)

    def _attempt(self, start: events.Start, until: float) -> AttemptResult | None:
        """The driver's and the ranks' part while ranks run; None where the job, or the time, ends."""
        work, self.running = self.work, start.assignment.hosts
        self.starts.append((self.now, self.running))
        before, base = self._done, max(self._saved, self._copied)
        self._account.undo(before - base)
        pace = self._pace(base, self.now + work.start_s)
        fate, result = self._fate(pace), None
        self.step(events.Tick())
        while result is None:
            then = math.inf if self._next is None else self._next.at
            looks = math.inf if self._pending is None else self._pending[0]
            ends = min(until, pace.time_of(work.steps))
            at = min(ends, fate[0], then, looks, self._wake(pace.time_of(before + 1)))
            self.now, speed = max(self.now, at), self._speed
            self._done = max(base, pace.at(self.now)[0])
            if at == ends:
                self._settle(pace)
                self.outcome.code = 0 if ends < until else None
                return None
            if at == fate[0]:
                hit, entered = fate[1:3], fate[3]
            else:
                hit, entered = self._strike() if at == then else None, self._done + 1 if self.now >= pace.begun else 0
            if at == looks and self._pending is not None:
                (_, do), self._pending = self._pending, None
                self.step(self._answer(do))
            if hit is not None:
                self._settle(pace)
                result = self._end(*hit, entered)
                continue
            self.step(events.Tick())
            leaving = self.fleet.members_in(State.LEAVING)
            if speed != self._speed and self.now > pace.begun:
                self._settle(pace)
                pace = self._pace(self._done, self.now)
                fate = self._fate(pace)
            may_drain = self._done > before and (
                self.fleet.waiting_hosts or self.fleet.leaves_since is not None or leaving
            )
            drains = self.step(events.CanDrain()) if may_drain else ()
            if drain := next((do for do in drains if isinstance(do, events.Drain)), None):
                self._settle(pace)
                result = self._end("growth", self.running, self._done + 1)
                result.host_change = drain.then
        self.running, self._pending = (), None
        return result

    def _fate(self, pace: Pace) -> tuple[float, str, tuple[str, ...], int]:
        """When an attempt ends whatever happens to the hosts; by what, on which host, in which step."""
        bug, refused, self._refused = self.work.bug, self._refused, ""
        if refused in self.running:
            return (self.now + pace.begun) / 2, "refused", (refused,), 0
        if bug is None or 0 < bug <= pace.base:
            return math.inf, "", (), 0
        rank = len(self.starts) if self.work.bug_rank is None else self.work.bug_rank
        host = self.running[rank % len(self.running)]
        return pace.time_of(bug - 1) if bug else pace.begun, "bug", (host,), bug

    @property
    def _speed(self) -> float:
        """Of a step, beside that where all is well."""
        slow = any(self._slow.get(host, 0.0) > self.now for host in self.running)
        return min(1.0, len(self.running) / self._wanted) * (0.5 if slow else 1.0)

    def _pace(self, base: int, begun: float) -> Pace:
        step_s = self.work.step_s * (1 + COPY_SHARE * bool(self.work.copy_every)) / self._speed
        every, save_s = self.work.checkpoint_every, self.work.save_s
        return Pace(base=base, since=self.now, begun=begun, step_s=step_s, save_s=save_s, every=every)

    def _wake(self, new_step: float) -> float:
        """When a tick changes something."""
        fleet, now = self.fleet, self.now
        dues = [host.due for host in fleet.hosts.values() if host.state is not State.WORKING]
        dues += self._forgiven
        dues += [new_step] + ([] if fleet.leaves_since is None else [fleet.leaves_since + SWAP_S])
        dues += [until for host, until in self._away.items() if host in fleet.waiting_hosts]
        return min((due for due in dues if due > now), default=math.inf)

    def _settle(self, pace: Pace) -> None:
        """Note what was done at this pace until now."""
        self._done, saved = self._account.train(pace, self.now)
        self._saved = max(self._saved, saved if saved > pace.base else 0)
        if every := self.work.copy_every:
            self._copied = max(self._copied, self._done // every * every)

    def _strike(self) -> tuple[str, tuple[str, ...]] | None:
        """Let the next thing happen; returns what ends the attempt by it, and the hosts that do, if any."""
        one = self._next
        assert one is not None
        self._next = next(self._happenings, None)
        hosts = one.hosts or tuple(self.fleet.hosts)
        if one.kind in ("lost", "link", "preempted"):
            end = self.now + one.seconds + DEPARTS_S * (one.kind == "preempted")
            self._away |= {host: max(end, self._away.get(host, 0.0)) for host in hosts}
            for host in hosts:
                if self.running and host in self.fleet.waiting_hosts:
                    self.step(events.Lost(host=host, why="its agent ended"))
        elif one.kind == "slow":
            self._slow |= dict.fromkeys(hosts, self.now + one.seconds)
            return None
        elif one.kind in ("join", "leave"):
            self.step(events.Asked(by=one.kind, hosts=hosts))
            return None
        elif one.kind == "refused":
            self._refused = hosts[0]
            return None
        hit = tuple(host for host in hosts if host in self.running)
        return (one.kind, hit) if hit else None

    def _end(self, kind: str, hosts: tuple[str, ...], entered: int) -> AttemptResult:
        """How an attempt ends by these hosts in this step, when the launcher has seen it."""
        self.outcome.interruptions[kind] += 1
        self._account.cause, ranks, job, now = kind, self.running, self.fleet.given, self.now
        result = AttemptResult(hosts=len(ranks), reached=entered)
        rank = ranks.index(hosts[0])
        if kind == "hang":
            detector = HangDetector(step_timeout=job.step_timeout, times=self._times, still_s=0.0)
            limit = detector.limit(Record(entered=entered, activity="step" if entered else "start"))
            self._spend(now + limit)
            result.hang = Hang(rank=rank, step=entered, phase=0, activity="step", seconds=limit, limit=limit)
            result.hang_host = hosts[0]
        elif kind in ("lost", "link"):
            self._spend(now + (job.host_lease if kind == "link" else job.limits.silent_s))
            result.gone_by = dict.fromkeys(hosts, self.now + job.limits.gone_s)
            text = f"host {hosts[0]} is silent"
            result.lost = HostLost(host=hosts[0], code=137, text=text, last_seen=now, with_host=True)
            result.cut = {*ranks} if kind == "link" else set()
            self._copied = self._copied if len(hosts) == 1 < len(ranks) else 0
        elif kind in ("preempted", "growth"):
            self._spend(now + self.work.save_s)
            self._saved, result.host_change = self._done, f"{hosts[0]} was asked to end"
            result.departing = [*hosts] if kind == "preempted" else []
        if not (result.hang or result.lost):
            code = CODES.get(kind, EXIT_RUNTIME)
            end = RankExit(rank=rank, host=hosts[0], pid=1, code=code, killed_by_us=False, step=entered)
            result.exits = [end]
        result.saved = self._saved
        return result
