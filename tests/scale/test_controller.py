"""The controller's loop with many hosts: what it sends is counted, and its CPU time grows with their number."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pretended import LINEAR, PretendedJob, cpu_of, exponent

from roxxel_dist.launcher.control import record
from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.driver import Driver
from roxxel_dist.process import progress

SIZES = [(32, 256), pytest.param((125, 1000), marks=pytest.mark.long)]
RANKS = 8


@pytest.mark.parametrize("hosts", [48, pytest.param(1000, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_costs_an_order_a_host(hosts: int, tmp_path: Path) -> None:
    """The end of each rank once had all hosts ordered anew: hosts x hosts x ranks / 2 orders."""
    with PretendedJob(hosts, RANKS, tmp_path) as job:
        job.orders()
        for host in range(hosts):
            first, *others = job.ranks_of(host)
            for rank in (first, *others):
                end = {"rank": rank, "pid": 1, "code": -9, "killed_by_us": rank > 0, "step": 3}
                job.say(host, {"type": "exit", **end})
            job.say(host, {"type": "done"})
            job.turn()
        assert job.orders()["kill"] == hosts
        assert not job.pool.at_work


def test_a_kill_is_ordered_again_only_for_an_earlier_moment(tmp_path: Path) -> None:
    with PretendedJob(2, 1, tmp_path) as job:
        for after in (5.0, 7.0, 0.0, 0.0, 5.0):
            job.pool.kill(after)
        assert job.orders() == {"start": 2, "kill": 4}


def report_cost(folder: Path, *, alone: bool) -> Callable[[int], float]:
    """CPU seconds of the controller for the reports of all hosts of a job, which come alone, or all together: the least
    of some steps."""

    def cost_of_step(job: PretendedJob, hosts: int, step: int) -> float:
        spent = 0.0
        for host in range(hosts):
            job.report(host, step)
            spent += cpu_of(job.turn) if alone else 0.0
        return spent if alone else cpu_of(job.turn)

    def cost(hosts: int) -> float:
        with PretendedJob(hosts, RANKS, folder) as job:
            return min(cost_of_step(job, hosts, step) for step in range(2, 7))

    return cost


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("alone", [True, False])
def test_reports_cost_as_much_as_there_are(sizes: tuple[int, int], alone: bool, tmp_path: Path) -> None:
    """A message once cost a pass over all hosts, and one over all ranks."""
    assert exponent(report_cost(tmp_path, alone=alone), *sizes) <= LINEAR


@pytest.mark.long
def test_a_thousand_hosts_report_in_a_quarter_of_the_time_that_there_is(tmp_path: Path) -> None:
    """No limit of time but the one that decides: reports that come faster than they are read pile up."""
    with PretendedJob(1000, RANKS, tmp_path) as job:
        shares = [job.cpu_share(2.0) for _ in range(4)]
    print("CPU seconds a second:", *(f"{share:.3f}" for share in shares))
    assert min(shares) <= 0.25, shares


def test_an_agent_reads_the_records_of_its_own_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd, read = progress.create(tmp_path / "progress", 8000), []
    writer = progress.Progress(str(tmp_path / "progress"), 7001)
    writer.enter(3)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or real(fd, size, at))
    assert progress.read(fd, 7001).entered == 3
    assert progress.read(fd, 7000) == progress.Record()
    assert progress.read(fd, 8001) == progress.Record(), "a file that was cut"
    assert read == [progress.RECORD.size] * 3
    os.close(fd)


def test_the_record_of_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    with PretendedJob(4, RANKS, tmp_path) as job:
        job.report(3, 9)
        job.turn()
        ranks = job.attempt._processes()
        job.recorder.update(ranks=ranks, state="stopping")
        saved = record.read(tmp_path / "logs" / "launcher.json")
        assert saved is not None
        assert saved == job.recorder.entry
        assert [rank.step for rank in saved.ranks] == [0] * 24 + [9] * 8


@pytest.mark.parametrize("grow_after", [None, 0, 5])
def test_hosts_join_after_a_step_that_no_attempt_has_done(grow_after: int | None, tmp_path: Path) -> None:
    """Else each change would begin the same steps again. A program that is not known to report steps is asked at once,
    and like the others once it has reported one."""
    drain = events.Drain(why="a host joins", then="the job goes on with it")
    fleet = SimpleNamespace(drain=lambda *, joins_too: drain, tick=lambda: None)
    with PretendedJob(2, 1, tmp_path) as job:
        job.attempt.grow_after, job.attempt.fleet = grow_after, cast("Driver", fleet)
        stops = []
        for done in (None, 0, grow_after or 0, (grow_after or 0) + 1):
            for host in range(2) if done is not None else ():
                job.report(host, done + 1)
            job.orders()
            job.attempt._check_at = job.attempt._looked = 0.0  # the next turn looks at all clocks
            job.turn()
            stops.append(job.orders()["stop"])
            job.attempt._result.host_change = ""
    first = 2 if grow_after is None else 0
    assert stops == [first, 0, 0, 2], stops
