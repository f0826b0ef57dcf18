"""What the end of the ranks means: which failed first, and one exit code for the job. Pure functions."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_HANG,
    EXIT_PREFLIGHT,
    EXIT_RUNTIME,
    EXIT_USAGE,
    OK_CODES,
    SCHEDULER_SIGNALS,
)

IN_SHUTDOWN = re.compile(r'distributed\.py", line \d+ in shutdown')
"""A frame of a stack in which jax waits for the other ranks."""
FOLLOWING = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)
"""Signals by which a rank ends because of another: jax aborts when the coordinator is gone."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of one rank."""

    rank: int
    host: str
    pid: int
    code: int
    """Negative: the signal that killed it."""
    killed_by_us: bool
    """Killed by the launcher; its code says nothing."""
    step: int
    """The step it had entered; 0 when it never reported one."""


@dataclass(frozen=True, kw_only=True)
class HostLost:
    """An agent that is gone, or out of reach: its ranks are dead, or will be when it has received nothing for long."""

    host: str
    code: int
    """The exit code of a job that ends by it."""
    text: str
    """A description for the user."""
    last_seen: float = 0.0
    """When it sent its last message, by the launcher's clock."""
    with_host: bool = False
    """The host is out of reach; an agent that ended by itself leaves a host that can be used."""
    gone_by: float = 0.0
    """When its ranks have ended, wherever they are, by the launcher's clock; 0: they have."""
    by_link: bool = False
    """The near end of its connection ended, so nothing is known of the host."""
    died: bool = False
    """The agent ended before its ranks: no rank can have caused that."""


@dataclass(frozen=True, kw_only=True)
class CodeDiffers:
    """A rank that runs other sources than another one."""

    rank: int
    host: str
    text: str
    """A description for the user."""


@dataclass(frozen=True)
class Imported:
    """A source as a rank imported it."""

    checksum: str
    rank: int
    host: str
    path: str

    def difference(self, first: "Imported") -> CodeDiffers:
        """The finding that this rank runs another source than `first`."""
        text = f"rank {self.rank} on host {self.host} runs another {self.path} than rank {first.rank} on host "
        text += first.host + (f" ({first.path})" if first.path != self.path else "")
        return CodeDiffers(rank=self.rank, host=self.host, text=text)


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A rank that still ran when its time to end was over."""

    rank: int
    host: str
    pid: int
    step: int
    """The step it had entered; 0 when it never reported one."""
    exits: bool
    """Its program has ended: something keeps its process, or it waits for others."""
    stack: Sequence[str] = ()
    """Empty where it gave none."""

    @property
    def waits(self) -> bool:
        """Whether it waits for others, in the end of jax.distributed."""
        return self.exits and any(IN_SHUTDOWN.search(line) for line in self.stack)


@dataclass(kw_only=True)
class AttemptResult:
    """Everything that determines the exit code of a job, and the report about it."""

    exits: Sequence[RankExit] = field(default_factory=list)
    """In the order in which the ranks ended."""
    requested: int | None = None
    """The signal that asked the launcher to stop."""
    late: bool = False
    """Ranks were killed because they stayed after another had ended well."""
    stayed: Sequence["LateRank"] = ()
    """Those ranks, in order."""
    lost: HostLost | None = None
    """The first agent that was lost before its ranks had ended."""
    hosts: int = 0
    """How many had ranks."""
    cut: set[str] = field(default_factory=set)
    """Hosts whose connection ended here."""
    gone_by: dict[str, float] = field(default_factory=dict)
    """Of each host that was lost: when its ranks have ended, wherever they are (`HostLost.gone_by`)."""
    failed: float = 0.0
    """When the first failure of a rank was reported, by the launcher's clock."""
    hang: Hang | None = None
    """A rank did not go on within its limit; all were killed."""
    hang_host: str = ""
    stack: Sequence[str] = ()
    """Of the rank that hung."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks that may keep them from each other."""
    differs: CodeDiffers | None = None
    """Two ranks ran different sources; all were killed."""
    reached: int = 0
    """The largest step that any rank had entered."""
    saved: int = 0
    """The largest step of which rank 0 has reported a checkpoint."""
    departing: list[str] = field(default_factory=list)
    """Hosts whose system asked them to end while the job goes on: a preemption, a reboot."""
    host_change: str = ""
    """Not empty where all were asked to save and leave, because hosts join or leave the job: how it goes on then."""


def is_cut_off(result: AttemptResult) -> bool:
    """Whether the connections of all hosts ended: what they all go through, such as an API server, was replaced."""
    return 1 < result.hosts == len(result.cut)


def is_drain(result: AttemptResult) -> bool:
    """Whether all ranks were asked to save and leave, for whatever reason: until the grace is over, the end of one rank
    is no reason to end the others, which may be saving."""
    return result.requested is not None or bool(result.host_change)


def first_failure(result: AttemptResult) -> RankExit | None:
    """The rank whose end is the job's: the first that failed by itself. A rank that a requested stop ended has not.

    The first failure ends all ranks, so if several failed by themselves, they did so within moments, and one that
    crashed is the cause of one that gave up: it closes its connections before its end can be seen. A lost host is also
    a cause if it was already silent, or if its agent died: its earlier messages may be read after the failure.
    """
    failures = [end for end in result.exits if end.code not in OK_CODES and not end.killed_by_us]
    if not failures:
        return None
    first = failures[0]
    if is_drain(result):
        asked = (signal.SIGTERM, signal.SIGINT, *SCHEDULER_SIGNALS)
        return None if as_code(first.code) - 128 in asked else first
    if first.code == EXIT_USAGE:
        return first
    lost = result.lost
    if lost is not None and first.code > 0 and (lost.died or lost.last_seen <= result.failed):
        return None
    return next((end for end in failures if end.code < 0 and -end.code not in FOLLOWING), first)


def as_code(code: int) -> int:
    """The exit code a shell would see: 128 + s for signal s."""
    return code if code >= 0 else 128 - code


def exit_code(result: AttemptResult) -> int:
    """The job's exit code; never 0 where the launcher has killed a rank."""
    if result.requested is None and (result.hang is not None or result.differs is not None):
        return EXIT_PREFLIGHT if result.hang is None else EXIT_HANG
    failure = first_failure(result)
    if failure is not None:
        return as_code(failure.code)
    codes = {end.code for end in result.exits}
    if result.lost is not None:
        return result.lost.code
    if result.late and not result.host_change and any(end.killed_by_us for end in result.exits):
        return EXIT_HANG
    if result.requested is not None and not codes <= set(OK_CODES):
        return 128 + result.requested
    left = EXIT_DRAINED in codes or (result.host_change and codes != {0})  # in whatever way
    return EXIT_DRAINED if left else next((as_code(code) for code in codes if code not in OK_CODES), 0)


def how(code: int) -> str:
    """`exit code 7`, `signal SIGKILL`."""
    if code == EXIT_RUNTIME:
        return f"exit code {code} (an exception of jax's runtime)"
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGBUS:
        return "signal SIGBUS (a mapped file, such as a shard of the data, was truncated, or its disk failed)"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
