"""From a fault to the last process of the job: kills, exceptions, cut links, hangs."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

from hosts import Cluster
from launch_jobs import BEHIND_A_SHELL, JAX_RANK, RANK, Ends, Job, MissedError, local, over_ssh
from launch_table import Row, Setting, Tally, at_once, repeated

STEP_LIMIT_S = 2.0
BLIP_S = 5.0
AFTER_BLIP_S = 7.0
"""Longer than any silence that the launcher could still be counting."""
RANKS = 4


def kills(setting: Setting) -> Iterator[Row]:
    """Kill -9 of one rank, each in turn."""
    what = "kill -9 of a rank, every rank gone: one host, 4 ranks"
    tally = repeated(what, setting.count, lambda number: _kill(Job(local(RANKS, RANK), RANKS), number))
    yield _row(tally, 0.5)
    with Cluster(4) as hosts:
        what = "kill -9 of a rank, every rank gone: 4 hosts by ssh"
        tally = repeated(what, setting.count, lambda number: _kill(Job(over_ssh(hosts, RANK), 4, hosts), number))
    yield _row(tally, 1)


def _kill(job: Job, number: int) -> float:
    with job:
        pids = job.up()
        with closing(Ends(pids.values())) as ends:
            begun = time.monotonic()
            os.kill(pids[number % job.ranks], signal.SIGKILL)
            taken = ends.wait() - begun
        job.end(code=137)
        job.check_nothing_left()
        return taken


def exceptions(setting: Setting) -> Iterator[Row]:
    """An exception in a rank whose jax waits for the others, to the end of the launcher and all else."""
    command = lambda number: [*JAX_RANK, number % RANKS]  # noqa: E731
    what = "exception in a rank, all gone, code 1, its traceback last: one host, 4 ranks"
    simulated = ("--devices-per-proc", 1)
    tally = repeated(
        what, setting.count, lambda number: _raise(Job(local(RANKS, command(number), *simulated), RANKS), number)
    )
    yield _row(tally, 1)
    with Cluster(4) as hosts:
        what = "exception in a rank, all gone, code 1, its traceback last: 4 hosts by ssh"
        tally = repeated(
            what,
            setting.count,
            lambda number: _raise(Job(over_ssh(hosts, command(number), *simulated), 4, hosts), number),
        )
    yield _row(tally, 1)


def _raise(job: Job, number: int) -> float:
    with job:
        job.wait_said("up", range(job.ranks))
        with closing(Ends(job.everything())) as ends:
            ((_, begun),) = job.wait_said("raised", [number % job.ranks]).values()
            taken = ends.wait() - begun
        job.end(code=1, last="RuntimeError: broken on purpose")
        if f"rank {number % job.ranks} failed first" not in job.said:
            raise MissedError(f"another rank is named: {job.said[-2000:]}")
        job.check_nothing_left()
        return taken


def links(setting: Setting) -> Iterator[Row]:
    """The link of a host: cut (or silent), and a blip."""
    tally = at_once("link of a host cut, all gone: 4 hosts", setting, 4, _cut)
    yield _row(tally, 15)
    tally = at_once(f"a {BLIP_S:g} s blip: 4 hosts", setting, 4, _blip)
    good = setting.count - len(tally.missed)
    row = _row(tally, 0.0, target="survived, all of them")
    yield Row(**{**vars(row), "times": [0.0] * good, "unit": "", "note": f"survived {good} of {setting.count}"})


def _cut(hosts: Cluster, number: int) -> float:
    host = hosts.names[number % 4]
    with Job(over_ssh(hosts, BEHIND_A_SHELL), 4, hosts) as job:
        job.up()
        try:
            with closing(Ends(job.everything())) as ends:
                begun = time.monotonic()
                _lose(hosts, number)
                taken = ends.wait() - begun
            job.end(code=137)
            job.check_nothing_left()
        finally:
            hosts.restore(host)
        return taken


def _lose(hosts: Cluster, number: int) -> None:
    """A cable that is pulled, or one that loses everything in silence: each host has both."""
    lose = hosts.cut if (number + number // 4) % 2 else hosts.drop
    lose(hosts.names[number % 4])


def _blip(hosts: Cluster, number: int) -> None:
    host = hosts.names[number % 4]
    with Job(over_ssh(hosts, BEHIND_A_SHELL), 4, hosts) as job:
        pids = job.up()
        _lose(hosts, number)
        time.sleep(BLIP_S)
        hosts.restore(host)
        time.sleep(AFTER_BLIP_S)
        gone = [rank for rank, pid in pids.items() if pid not in job.everything()]
        if gone or job.process.poll() is not None:
            raise MissedError(f"ranks {gone} did not survive: {job.said[-2000:]}")
        (job.folder / "end").touch()
        job.end(code=0)
        job.check_nothing_left()


def hangs(setting: Setting) -> Iterator[Row]:
    """A rank that never comes out of a step, and one that is stopped, each in turn; to the end of all."""
    for what, once in (("a stuck rank", _stuck), ("a SIGSTOPped rank", _stopped)):
        tally = repeated(f"{what}, all gone: one host, 4 ranks", setting.count, once)
        right = setting.count - len(tally.missed)
        target = f"limit ({STEP_LIMIT_S:g} s) + 2 s, the right rank named"
        row = _row(tally, STEP_LIMIT_S + 2, target)
        yield Row(**{**vars(row), "note": f"right rank named {right} of {setting.count}"})


def _steps(*rank: object) -> Job:
    return Job(local(RANKS, [*RANK, "steps", *rank], "--step-timeout", STEP_LIMIT_S), RANKS)


def _stuck(number: int) -> float:
    rank = number % RANKS
    with _steps(rank) as job:
        begun = job.wait_said("up", range(RANKS))[rank][1]
        with closing(Ends(job.everything())) as ends:
            return _named(job, rank, ends.wait() - begun)


def _stopped(number: int) -> float:
    rank = number % RANKS
    with _steps() as job:
        ups = job.wait_said("up", range(RANKS))
        os.kill(ups[rank][0], signal.SIGSTOP)
        with closing(Ends(job.everything())) as ends:  # the limit counts from when all had entered the step
            return _named(job, rank, ends.wait() - max(when for _, when in ups.values()))


def _named(job: Job, rank: int, taken: float) -> float:
    job.end(code=124)
    if f"roxxel-dist: rank {rank} on host " not in job.said:
        raise MissedError(f"rank {rank} is not named: {job.said[-2000:]}")
    job.check_nothing_left()
    return taken


def controllers(setting: Setting) -> Iterator[Row]:
    """Kill -9 of those who watch, with the ranks behind a shell."""
    for who in ("launcher", "agent"):
        what = f"{who} killed with -9, no process left: one host, 4 ranks"
        once = lambda number, who=who: _kill_watcher(Job(local(RANKS, BEHIND_A_SHELL), RANKS), who)  # noqa: E731
        yield _row(repeated(what, setting.count, once), 2)
    with Cluster(4) as hosts:
        for who in ("launcher", "agent"):
            what = f"{who} killed with -9, no process left: 4 hosts by ssh"
            once = lambda number, who=who: _kill_watcher(  # noqa: E731
                Job(over_ssh(hosts, BEHIND_A_SHELL), 4, hosts), who, hosts.names[number % 4]
            )
            yield _row(repeated(what, setting.count, once), 2)
    for who in ("launcher", "agent"):
        what = f"{who} killed with -9 while a host is cut off, no process left: 4 hosts"
        yield _row(at_once(what, setting, 4, lambda hosts, number, who=who: _kill_cut_off(hosts, number, who)), 12)


def _kill_watcher(job: Job, who: str, host: str | None = None) -> float:
    with job:
        job.up()
        return _kill_now(job, who, host)


def _kill_now(job: Job, who: str, host: str | None) -> float:
    victim = job.process.pid if who == "launcher" else job.agent(host)
    with closing(Ends(job.everything())) as ends:
        begun = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        taken = ends.wait() - begun
    job.end(code=-signal.SIGKILL if who == "launcher" else 137)
    job.check_nothing_left()
    return taken


def _kill_cut_off(hosts: Cluster, number: int, who: str) -> float:
    """The launcher dies and cannot tell that host; or the agent there dies and cannot report it."""
    host = hosts.names[number % 4]
    with Job(over_ssh(hosts, BEHIND_A_SHELL), 4, hosts) as job:
        job.up()
        hosts.drop(host)
        try:
            return _kill_now(job, who, host)
        finally:
            hosts.restore(host)


def _row(tally: Tally, limit: float, target: str | None = None) -> Row:
    return Row(what=tally.what, target=target or f"{limit:g} s", limit=limit, times=tally.times, missed=tally.missed)
