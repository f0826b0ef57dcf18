"""Rules of the fleet with many hosts: CPU time that grows with their number."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pretended import LINEAR, cpu_of, exponent

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.step import fleet_of, step
from roxxel_dist.launcher.job.placement import assign
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.outcome import AttemptSummary, Cause, next_action
from roxxel_dist.launcher.preflight.run import PreflightReport

SIZES = [(200, 1600), pytest.param((1000, 8000), marks=pytest.mark.long)]


AWAY = "No route to host"


def job_on(hosts: int) -> JobSpec:
    return JobSpec(command=("true",), nprocs=hosts, run_id="r", log_dir=Path("logs"), min_hosts=1, max_restarts=9)


def report_of(hosts: Sequence[str], **away: str) -> PreflightReport:
    return PreflightReport(address="10.0.0.1", port=1, machines={host: host for host in hosts}, unreachable=away)


def join(count: int) -> None:
    """So many hosts come to a job of four; at the second look one of them is away."""
    base = [f"a{number}" for number in range(4)]
    fleet, _ = fleet_of(job_on(4), base, now=0.0, given=base)
    fleet, todo = step(fleet, events.Begin(), 0.0)
    look = todo[-1]
    assert isinstance(look, events.Look)
    fleet, _ = step(fleet, events.Answered(report=report_of(look.assignment.hosts)), 0.0)
    fleet, _ = step(fleet, events.Asked(by="list", hosts=tuple(f"h{number}" for number in range(count))), 1.0)
    fleet, todo = step(fleet, events.Tick(), 1.0)
    for away in ({"h1": "No route to host"}, {}):
        look = next(do for do in todo if isinstance(do, events.Look))
        fleet, todo = step(fleet, events.Answered(report=report_of(look.assignment.hosts, **away)), 1.0)
    assert any(isinstance(do, events.Warm) for do in todo)
    fleet, _ = step(fleet, events.Warmed(failed={}), 1.0)
    fleet, todo = step(fleet, events.CanDrain(), 1.0)
    assert any(isinstance(do, events.Drain) for do in todo)


def lose_half(count: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    assert len(assign(job_on(count), hosts, hosts[::2]).hosts) == count // 2


def start_again(count: int) -> None:
    """A job of which half of the hosts are away at a restart, and then at another one the other half."""
    hosts = [f"h{number}" for number in range(count)]
    fleet, _ = fleet_of(job_on(count), hosts, now=0.0)
    attempt = AttemptSummary(cause=Cause.PREEMPTED, code=42, reached=9, counts=True, seconds=600.0)
    now = 0.0
    for away in ({}, dict.fromkeys(hosts[::2], AWAY), dict.fromkeys(hosts[1::2], AWAY)):
        if away:
            fleet, _ = step(fleet, events.AttemptEnded(attempt=attempt), now)
        fleet, todo = step(fleet, events.Begin(), now)
        while not isinstance(todo[-1], events.Start):
            if isinstance(look := todo[-1], events.Look):
                asked = look.assignment.hosts
                gone = {name: away[name] for name in asked if name in away}
                fleet, todo = step(fleet, events.Answered(report=report_of(asked, **gone)), now)
            else:
                now += 4000.0  # longer than a host is waited for
                fleet, todo = step(fleet, events.Tick(), now)
        assert len(fleet.working) == (count // 2 if away else count)


def leave(count: int) -> None:
    """Half of the hosts of a list are not in it any more, while the ranks run."""
    hosts = [f"h{number}" for number in range(count)]
    fleet, _ = fleet_of(replace(job_on(count), hosts_from="list"), hosts, now=0.0, given=(), listed=hosts)
    fleet, _ = step(fleet, events.Begin(), 0.0)
    fleet, _ = step(fleet, events.Answered(report=report_of(hosts)), 0.0)
    fleet, _ = step(fleet, events.Asked(by="list", hosts=tuple(hosts[: count // 2])), 1.0)
    for now in (2.0, 3.0, 1000.0):
        fleet, _ = step(fleet, events.Tick(), now)
        fleet, todo = step(fleet, events.CanDrain(), now)
    assert any(isinstance(do, events.Drain) for do in todo)


def decide(count: int) -> None:
    """A job that has lost a host so many times, and got on each time."""
    each = {"cause": Cause.INFRASTRUCTURE, "code": 137, "counts": True, "seconds": 600.0}
    attempts = [AttemptSummary(reached=number, saved=number, **each) for number in range(1, count + 1)]
    for _ in range(20):
        assert next_action(attempts, 3).again


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("act", [join, lose_half, start_again, leave, decide])
def test_the_rules_cost_as_much_as_there_are_hosts(act, sizes: tuple[int, int]) -> None:
    assert exponent(lambda count: cpu_of(partial(act, count)), *sizes) <= LINEAR
