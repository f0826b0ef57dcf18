"""The hosts of a job as a pure function of what happens: tables, and random histories by a clock that is not real."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.state import Fleet, State
from roxxel_dist.launcher.fleet.step import fleet_of, step
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.restart import AttemptSummary, Cause, Decision
from roxxel_dist.launcher.preflight.checks import CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport

NAMES = "abcdef"
HISTORIES = 15
UP, AWAY, UNFIT, COLD = "up", "away", "unfit", "cold"


@dataclass
class World:
    """Hosts that come and go, and a job on them, by a clock of its own."""

    fleet: Fleet
    hosts: dict[str, str]
    """Up; away; there and unfit; or there, and its imports fail."""
    now: float = 0.0
    step: int = 0
    pending: events.Look | events.Warm | None = None
    running: bool = False
    ended: str = ""
    starts: list[tuple[str, ...]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def happens(self, kind: Callable[..., events.Event], **values: Any) -> Sequence[events.Do]:
        """Let it happen, and do what follows."""
        self.fleet, todo = step(self.fleet, kind(**values), self.now)
        self.check()
        for do in todo:
            match do:
                case events.Look() | events.Warm():
                    assert self.pending is None, "one look at a time"
                    self.pending = do
                case events.Say(text=text):
                    self.said.append(text)
                case events.Start(assignment=assignment):
                    assert all(self.hosts[name] in (UP, COLD) for name in assignment.hosts), "only fit hosts start"
                    self.starts.append(assignment.hosts)
                    self.running = True
                case events.GiveUp(text=text):
                    self.ended = text
                case Decision(again=False, why=why):
                    self.ended = why or "done"
                case _:
                    pass
        return todo

    def check(self) -> None:
        """What holds at any time."""
        fleet = self.fleet
        assert len({*fleet.members}) == len(fleet.members) > 0
        assert {*fleet.members} <= fleet.hosts.keys()
        if self.running:
            assert {*fleet.working} <= {*fleet.there}
            assert not {*fleet.kept} & {*fleet.working}
            asked = () if fleet.look is None else fleet.look.candidates
            looking = {name for name, host in fleet.hosts.items() if host.state is State.LOOKING}
            assert looking <= {*asked}, "whoever is asked gets an answer"

    def answer(self) -> Sequence[events.Do]:
        """What the hosts say by now to the look, or the warm-up, that goes on."""
        do, self.pending = self.pending, None
        if isinstance(do, events.Warm):
            failed = {name: "no jax" for name in do.plan.hosts if self.hosts[name] != UP and name not in self.working}
            return self.happens(events.Warmed, failed=failed)
        if isinstance(do, events.Look):
            hosts = do.assignment.hosts
            away = {name: "No route to host" for name in hosts if self.hosts[name] == AWAY}
            wrong = [
                CheckResult("error", "disk", (name,), f"{name}: full") for name in hosts if self.hosts[name] == UNFIT
            ]
            machines = {name: name for name in hosts}
            report = PreflightReport(address="10.0.0.1", port=1, findings=wrong, unreachable=away, machines=machines)
            return self.happens(events.Answered, report=report)
        return ()

    @property
    def working(self) -> tuple[str, ...]:
        return self.fleet.working if self.running else ()

    def ends(self, cause: Cause, **more: Any) -> None:
        """All ranks end."""
        self.running, self.pending = False, None
        attempt = AttemptSummary(
            cause=cause, code=1, reached=self.step, counts=True, seconds=100.0, **more.pop("of", {})
        )
        self.happens(events.AttemptEnded, attempt=attempt, **more)
        if not self.ended:
            self.begins()

    def begins(self) -> None:
        """Seek hosts, until some start, or too few are there."""
        todo = self.happens(events.Begin)
        for _ in range(1000):
            if self.running or self.ended:
                return
            if isinstance(todo[-1], events.Wait):
                self.now += todo[-1].seconds
                todo = self.happens(events.Tick)
            else:
                todo = self.answer()
        raise AssertionError("a search without an end")

    def passes(self, seconds: float) -> None:
        """Time goes on; ranks that can save and leave do so."""
        self.now += seconds
        self.step += 3
        self.happens(events.Tick)
        lost = [name for name in self.working if self.hosts[name] == AWAY]
        if lost:
            self.ends(Cause.INFRASTRUCTURE, lost=lost[0])
            return
        gone = [name for name in self.fleet.kept if self.hosts[name] == AWAY]
        if gone and self.pending is None:
            self.happens(events.Lost, host=gone[0], why="its agent ended")
        if any(isinstance(do, events.Drain) for do in self.happens(events.CanDrain)):
            self.ends(Cause.PREEMPTED, of={"changes_hosts": True})


def world(tmp_path: Path, hosts: str = "abc", listed: str = "", **more: Any) -> World:
    """A job that runs on these hosts."""
    job = JobSpec(
        command=("true",), nprocs=len(hosts) - more.get("spare_hosts", 0), run_id="r", log_dir=tmp_path, **more
    )
    fleet, _ = fleet_of(job, list(hosts), now=0.0, given=[*hosts] if not listed else (), listed=[*listed])
    one = World(fleet, dict.fromkeys(NAMES, UP))
    one.begins()
    assert one.running
    return one


def states(one: World) -> str:
    return " ".join(f"{name}:{host.state.name.lower()}" for name, host in sorted(one.fleet.hosts.items()))


def act(one: World, rng: random.Random) -> None:
    """Something happens to the hosts, or is asked for."""
    some = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
    match rng.randrange(8):
        case 0 | 1:
            one.hosts[rng.choice(NAMES)] = rng.choice((UP, UP, AWAY, UNFIT, COLD))
        case 2:
            one.happens(events.Asked, by="list", hosts=some)
        case 3:
            one.happens(events.Asked, by="join", hosts=some[:2])
        case 4:
            one.happens(events.Asked, by="leave", hosts=some[:2])
        case 5 if one.working:
            host = rng.choice(one.working)
            one.ends(Cause.INFRASTRUCTURE, of={"rank": 0, "host": host, "step": one.step})
        case _:
            one.answer()


@pytest.mark.parametrize("seed", range(4))
def test_after_any_history_the_hosts_are_those_that_are_wanted(seed: int, tmp_path: Path) -> None:
    """Thousands of joins, leaves, losses and failures. Whatever happened: once hosts are up and nothing is asked for
    any more, those that are wanted work, and then nothing happens."""
    rng = random.Random(seed)
    for _ in range(HISTORIES):
        one = world(tmp_path, listed="abc", min_hosts=1, max_restarts=10**6, host_timeout=100, hosts_from="x")
        for _ in range(rng.randint(1, 60)):
            act(one, rng)
            if rng.random() < 0.7 and not one.ended:
                one.passes(rng.choice((0.25, 1.0, 20.0, 700.0)))
            if one.ended:
                break
        if one.ended:  # no host was there for 100 s, or a rank failed again in the same step
            continue
        one.hosts = dict.fromkeys(NAMES, UP)
        for second in range(3 * 3600 // 60):
            one.answer()
            one.passes(60.0 if second else 0.25)
        fleet = one.fleet
        aside = fleet.members_in(State.ASIDE)  # ranks failed there again and again, or a spare host took its place
        assert {*one.working} == {*fleet.wanted_now, *fleet.change.kept} - {*aside}, states(one)
        attempts = len(one.starts)
        for _ in range(10):
            one.answer()
            one.passes(60.0)
        assert (len(one.starts), one.pending) == (attempts, None), "then nothing happens"
