"""The hosts of a job as a pure function of what happens: tables, and random histories by a clock that is not real."""

import itertools
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
from roxxel_dist.launcher.policy.outcome import AttemptSummary, Cause, Decision
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
            assert {*fleet.working} <= {*fleet.present_members}
            assert not {*fleet.waiting_hosts} & {*fleet.working}
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
        gone = [name for name in self.fleet.waiting_hosts if self.hosts[name] == AWAY]
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


@pytest.mark.parametrize(
    ("of", "lost", "asked", "is_known"),
    [
        ({"code": 137, "reached": 9}, "", "abc", True),
        ({"code": 137, "reached": 9}, "b", "ac", True),
        ({"code": 137, "reached": 9}, "a", "bc", False),  # rank 0 is on another host
        ({"code": 137, "reached": 0}, "", "abc", False),  # they never worked together
        ({"code": 77, "reached": 9}, "", "abc", False),  # it may be the network
        ({"code": 124, "reached": 9}, "", "abc", False),
    ],
)
def test_what_was_fit_in_the_last_attempt_is_asked_for_facts_and_a_port_alone(
    of: dict[str, Any], lost: str, asked: str, is_known: bool, tmp_path: Path
) -> None:
    one = world(tmp_path, "abc", min_hosts=1)
    one.hosts |= dict.fromkeys(lost, AWAY)
    one.fleet, _ = step(one.fleet, events.AttemptEnded(attempt=AttemptSummary(cause=Cause.INFRASTRUCTURE, **of)), 9.0)
    one.fleet, todo = step(one.fleet, events.Begin(), 9.0)
    one.running = False
    looks = [do for do in todo if isinstance(do, events.Look)]
    one.pending = looks[0]
    while not one.running:
        if isinstance(one.answer()[-1], events.Wait):
            one.now += 90
            one.happens(events.Tick)
        looks += [one.pending] if isinstance(one.pending, events.Look) else []
    assert one.starts[-1] == tuple(asked)
    assert (looks[-1].known is not None) == is_known


def test_a_newcomer_is_asked_with_the_others_at_once_and_a_host_that_was_lost_alone_first(tmp_path: Path) -> None:
    one = world(tmp_path, "ab", min_hosts=1)
    one.happens(events.Asked, by="join", hosts=("c",))
    one.happens(events.Tick)
    assert isinstance(one.pending, events.Look)
    assert (one.pending.assignment.hosts, one.pending.keep) == (("a", "b", "c"), ("c",))
    assert one.fleet.hosts["c"].state is State.LOOKING
    one.answer()
    assert isinstance(one.pending, events.Warm)
    one.answer()
    assert (one.fleet.hosts["c"].state, one.fleet.waiting_hosts) == (State.WARM, ("c",))
    one.passes(1.0)
    assert one.starts == [("a", "b"), ("a", "b", "c")]
    one.hosts["c"] = AWAY
    one.passes(1.0)
    assert one.starts[-1] == ("a", "b")
    assert one.fleet.hosts["c"].state is State.LOST
    one.hosts["c"] = UP
    looks: list[tuple[str, ...]] = []
    while one.starts[-1] == ("a", "b"):
        one.answer()
        one.passes(5.0)
        looks += [one.pending.assignment.hosts] if isinstance(one.pending, events.Look) else []
    assert looks[0] == ("c",)
    assert one.starts[-1] == ("a", "b", "c")


def looks_in(one: World, seconds: int) -> dict[str, list[float]]:
    """When hosts are asked alone, if each answers at once."""
    asked: dict[str, list[float]] = {}
    for _ in range(seconds):
        while isinstance(one.pending, events.Look | events.Warm):
            if isinstance(one.pending, events.Look) and len(one.pending.candidates) == 1:
                asked.setdefault(one.pending.candidates[0], []).append(one.now)
            one.answer()
        one.passes(1.0)
    return asked


def test_a_host_that_is_away_for_hours_is_asked_once_a_minute_and_at_once_when_that_can_help(tmp_path: Path) -> None:
    one = world(tmp_path, "abcd", "abcd", min_hosts=1, hosts_from="x", max_restarts=9)
    one.hosts |= dict.fromkeys("bcd", AWAY)
    times = looks_in(one, 7200)["b"]
    waits = [later - before for before, later in itertools.pairwise(times)]
    assert max(waits[:5]) <= 8, "a host that starts anew is not kept waiting"
    assert 40 <= min(waits[-50:]) <= max(waits) <= 61
    assert len(times) < 200
    assert len({*waits[-50:]}) > 5, "launchers that have lost the same host do not ask it together"
    said = len(one.said)
    looks_in(one, 300)
    assert len(one.said) == said
    one.hosts |= dict.fromkeys("bc", UP)
    looks_in(one, 65)
    assert one.starts[-1] == ("a", "b", "c"), "what kept b away kept c away too"
    one.hosts["d"] = UP
    one.happens(events.Asked, by="list", hosts=("a", "b", "c"))
    one.happens(events.Asked, by="list", hosts=("a", "b", "c", "d"))
    looks_in(one, 3)
    assert one.starts[-1] == ("a", "b", "c", "d"), "the list says that it is back"


@pytest.mark.parametrize("state", [AWAY, UNFIT])
def test_a_host_may_fail_its_looks_for_weeks(state: str, tmp_path: Path) -> None:
    """The pause is a power of the number of looks, and 2.0 ** 1024 is no number."""
    one = world(tmp_path, "ab", min_hosts=1)
    one.hosts["b"] = AWAY
    one.passes(1.0)
    one.hosts["b"] = state
    one.fleet.move(["b"], State.LOST, failures=2000, absences=20000)
    one.now += 400
    one.happens(events.Tick)
    one.answer()
    host = one.fleet.hosts["b"]
    assert host.state is State.UNFIT
    assert 40 < host.due - one.now <= 300


def test_a_host_whose_imports_fail_costs_no_restart(tmp_path: Path) -> None:
    one = world(tmp_path, "ab", min_hosts=1)
    one.hosts["c"] = COLD
    one.happens(events.Asked, by="join", hosts=("c",))
    for _ in range(40):
        one.answer()
        one.passes(1.0)
    assert (len(one.starts), one.fleet.waiting_hosts) == (1, ())
    assert one.said == ["host c does not join yet, and is asked from time to time: no jax"]


def test_a_host_that_is_set_aside_may_leave_the_list_and_joins_anew_when_it_comes_back(tmp_path: Path) -> None:
    """Its ranks failed in two attempts; what is known of it ends with its place in the list."""
    one = world(tmp_path, "abc", "abc", min_hosts=1, hosts_from="x")
    for _ in range(2):
        one.passes(1.0)
        one.ends(Cause.INFRASTRUCTURE, of={"rank": 1, "host": "b", "step": one.step})
    assert one.fleet.hosts["b"].state is State.ASIDE
    assert one.starts[-1] == ("a", "c")
    one.happens(events.Asked, by="list", hosts=("a", "c"))
    one.passes(1.0)
    assert "b" not in one.fleet.hosts
    one.ends(Cause.INFRASTRUCTURE, of={"rank": 1, "host": "c", "step": one.step})
    one.happens(events.Asked, by="list", hosts=("a", "b", "c"))
    for _ in range(10):
        one.answer()
        one.passes(1.0)
    assert one.starts[-1] == ("a", "c", "b")


def test_more_hosts_than_may_work_are_spares_and_stop_nobody(tmp_path: Path) -> None:
    one = world(tmp_path, "ab", min_hosts=1, max_hosts=2)
    one.happens(events.Asked, by="join", hosts=("c",))
    for _ in range(10):
        one.answer()
        one.passes(1.0)
    assert (len(one.starts), one.fleet.hosts["c"].state, one.fleet.members) == (1, State.SPARE, ("a", "b", "c"))
    assert one.said == ["host c is a spare: it passed the checks, and --max-hosts is 2"]
    one.hosts["a"] = AWAY
    one.passes(1.0)
    assert one.starts[-1] == ("b", "c")


def test_where_all_hosts_that_are_back_are_away_again_everybody_is_asked(tmp_path: Path) -> None:
    """An assignment to no host at all is none."""
    one = world(tmp_path, "ab", min_hosts=1)
    fleet = one.fleet
    fleet.move(["a", "b"], State.WARM)
    one.hosts |= {"a": AWAY, "b": AWAY}
    one.running = False
    one.fleet, _ = step(fleet, events.Begin(), 1.0)
    one.begins()
    assert one.ended == "host a cannot be used: No route to host\nhost b cannot be used: No route to host"


def test_a_pause_after_growths_is_short_again_after_a_day(tmp_path: Path) -> None:
    """A job of months once asked a host that had been away for minutes after an hour, for growths of months ago."""
    one = world(tmp_path, "abc", min_hosts=1)
    pauses = []
    for wait_s in (10.0, 10.0, 90_000.0):
        one.now += wait_s
        one.hosts["c"] = AWAY
        one.passes(1.0)
        one.hosts["c"] = UP
        assert one.starts[-1] == ("a", "b")
        pauses.append(one.fleet.hosts["c"].due - one.now)
        while len(one.starts[-1]) < 3:
            one.passes(1.0)
            one.answer()
    assert pauses[2] == pauses[0] < pauses[1], pauses


def test_while_a_job_waits_every_host_is_asked_that_may_be_back(tmp_path: Path) -> None:
    """It once asked only those for which it waited, and ended beside one that was there again."""
    one = world(tmp_path, "abc", spare_hosts=1, host_timeout=60.0)
    one.running = False
    one.hosts |= {"a": AWAY, "c": AWAY}
    attempt = AttemptSummary(cause=Cause.PREEMPTED, code=42, reached=9, counts=True, seconds=100.0)
    one.happens(events.AttemptEnded, attempt=attempt)
    todo = one.happens(events.Begin)
    while not isinstance(todo[-1], events.Wait):
        todo = one.answer()
    one.now += todo[-1].seconds
    one.hosts["a"] = UP  # which was let go, with c for it
    todo = one.happens(events.Tick)
    while not (one.running or isinstance(todo[-1], events.Wait)):
        todo = one.answer()
    assert one.starts[-1] == ("a", "b"), one.said
    assert one.running


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
        aside = fleet.members_in(State.ASIDE)  # ranks failed there again and again, within this day
        assert {*one.working} == {*fleet.wanted_now, *fleet.change.kept} - {*aside}, states(one)
        attempts = len(one.starts)
        for _ in range(10):
            one.answer()
            one.passes(60.0)
        assert (len(one.starts), one.pending) == (attempts, None), "then nothing happens"
