"""What the end of the ranks means: one exit code for the job, and the words for it. Pure functions."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_HANG, EXIT_USAGE, OK_CODES
from roxxel_dist.launcher.control.hang import Hang
from roxxel_dist.launcher.output.console import NOISE_PREFIXES

FOLLOWING = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)
"""Signals by which a rank ends because of another: jax aborts when the coordinator is gone."""
TAIL_WITHOUT_TRACEBACK = 15
CRASH_HEADERS = ("Traceback (most recent call last)", "Fatal Python error")


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int
    host: str
    pid: int
    code: int
    """Negative: the signal that killed it."""
    killed_by_us: bool
    """Killed by the launcher; its code says nothing."""
    step: int
    """The step it had entered; 0 when it never said."""


@dataclass(frozen=True, kw_only=True)
class HostLost:
    """An agent that is gone, or out of reach: its ranks are dead, or will be when it has heard nothing for long."""

    host: str
    code: int
    """The exit code of a job that ends by it."""
    text: str
    """What happened, for people."""
    heard: float = 0.0
    """When it said something last, by the launcher's clock."""
    with_host: bool = False
    """The host is out of reach; an agent that ended by itself leaves a host that can be used."""
    died: bool = False
    """The agent ended before its ranks: that is no consequence of what a rank does."""


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """All that decides the code of a job."""

    exits: Sequence[RankExit]
    """In the order of the ends."""
    requested: int | None = None
    """The signal by which somebody asked the launcher to stop."""
    late: bool = False
    """Ranks were killed because they stayed after another had ended with 0."""
    lost: HostLost | None = None
    """The first agent that was lost before its ranks had ended."""
    failed: float = 0.0
    """When the first failure of a rank was heard of, by the launcher's clock."""
    hang: Hang | None = None
    """A rank did not go on within its limit; all were killed."""
    hang_host: str = ""
    """Where that rank ran."""
    reached: int = 0
    """The largest step that any rank had entered."""


def first_failure(outcome: AttemptResult) -> RankExit | None:
    """The rank whose end is the job's: the first that failed by itself. A rank that a requested stop ended has not.

    The first failure ends everybody, so where several failed by themselves they did so within moments, and one that
    crashed is the cause of one that gave up: it closes its connections before its end can be seen. So is a lost host
    that was silent already by then, or whose agent died: what it had said before may be read after the failure.
    """
    failures = [end for end in outcome.exits if end.code not in OK_CODES and not end.killed_by_us]
    if not failures:
        return None
    first = failures[0]
    if outcome.requested is not None:
        return None if as_code(first.code) in (128 + signal.SIGTERM, 128 + signal.SIGINT) else first
    if first.code == EXIT_USAGE:
        return first
    lost = outcome.lost
    if lost is not None and first.code > 0 and (lost.died or lost.heard <= outcome.failed):
        return None
    return next((end for end in failures if end.code < 0 and -end.code not in FOLLOWING), first)


def as_code(code: int) -> int:
    """The exit code a shell would see: 128 + s for signal s."""
    return code if code >= 0 else 128 - code


def exit_code(outcome: AttemptResult) -> int:
    """The job's exit code."""
    if outcome.hang is not None and outcome.requested is None:
        return EXIT_HANG
    failure = first_failure(outcome)
    if failure is not None:
        return as_code(failure.code)
    if outcome.lost is not None:
        return outcome.lost.code
    if outcome.late and any(end.killed_by_us for end in outcome.exits):
        return EXIT_HANG
    codes = {end.code for end in outcome.exits}
    if outcome.requested is not None and not codes <= set(OK_CODES):
        return 128 + outcome.requested
    return EXIT_DRAINED if EXIT_DRAINED in codes else 0


def how(code: int) -> str:
    """`exit code 7`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGBUS:
        return "signal SIGBUS (a mapped file, such as a shard of the data, was cut short, or its disk failed)"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_words(tail: Sequence[str]) -> Sequence[str]:
    """Of the last lines of a rank, those that tell why it ended: from its traceback on, if there is one."""
    lines = [line for line in tail if not NOISE_PREFIXES.match(line)] or tail  # a thread may write behind a traceback
    for number, line in enumerate(lines):
        if line.startswith(CRASH_HEADERS):
            return lines[number:]
    return lines[-TAIL_WITHOUT_TRACEBACK:]


def failure_report(failure: RankExit, tail: Sequence[str], log: Path) -> list[str]:
    """What a person reads last: who failed first, where its log is, and its last lines."""
    step = f", in step {failure.step}" if failure.step > 0 else ""
    who = f"rank {failure.rank} failed first: {how(failure.code)}{step} (host {failure.host}, pid {failure.pid})"
    if not tail:
        return [f"roxxel-dist: {who}; it printed nothing"]
    return [f"roxxel-dist: {who}; log {log}, last lines:", *last_words(tail)]


def late_report(outcome: AttemptResult, exit_timeout: float) -> str:
    """Who stayed when others had ended."""
    stayed = [end for end in outcome.exits if end.killed_by_us]
    ended = next(end.rank for end in outcome.exits if end.code in (*OK_CODES, EXIT_HANG))
    names = ", ".join(f"{end.rank}" + (f" (in step {end.step})" if end.step > 0 else "") for end in stayed)
    return (
        f"rank {ended} had ended, but rank {names} still ran {exit_timeout:g} s later and was killed; "
        "--exit-timeout sets this limit"
    )
