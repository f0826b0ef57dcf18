"""What happens to the hosts of a job, and what is to be done then: plain values. `step.py` has the rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from roxxel_dist.launcher.job.placement import Assignment
from roxxel_dist.launcher.policy.outcome import AttemptSummary, Decision
from roxxel_dist.launcher.preflight.run import PreflightReport


@dataclass(frozen=True, kw_only=True)
class Look:
    """Ask hosts what preflight asks before a start."""

    assignment: Assignment
    """Which hosts, and the job as they would do it."""
    port: int | None
    """The coordinator's port; None: a free one."""
    busy: tuple[str, ...] = ()
    """Hosts on which ranks run meanwhile."""
    check: frozenset[str] = frozenset()
    """Hosts whose devices have to pass their checks from now on."""
    candidates: tuple[str, ...] = ()
    """Those of the hosts that may join others, which work. One alone is asked alone."""
    known: PreflightReport | None = None
    """What the last look at these hosts has found, where they have worked together since: facts and a port will do."""
    keep: tuple[str, ...] = ()
    """Hosts whose agents stay where all pass: they are to have spares."""


@dataclass(frozen=True, kw_only=True)
class Warm:
    """Have the agents of hosts that are to join import what their ranks will import."""

    plan: Assignment
    report: PreflightReport
    """What was found there."""
    candidates: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Say:
    """A line for people."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer a request to join or leave."""

    done: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Come again with a `Tick` in so many seconds; before a start."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start the ranks."""

    assignment: Assignment
    coordinator: str
    """address:port of rank 0's coordinator, as all of them reach it."""
    visible: Mapping[str, str]
    """CUDA_VISIBLE_DEVICES of the hosts that have it."""
    cores: int | None
    """The most CPUs that a host had when the job began: the bits of a run do not change with its hosts."""
    wait_s: float = 0.0
    """Seconds after which the ranks on lost hosts have ended."""


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The hosts, or too few of them, can take the job. The text is for people, a line a reason."""

    text: str
    unreachable: bool
    """Some do not answer, so that other hosts would do."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Have the ranks save and leave. Why, and how the job goes on then; for people."""

    why: str
    then: str


@dataclass(frozen=True, kw_only=True)
class AwaitEnd:
    """Wait for the end of hosts that the job needs, and that a system has asked to end."""

    hosts: tuple[str, ...]


Do = Look | Warm | Say | Answer | Wait | Start | GiveUp | Drain | AwaitEnd | Decision


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The passing of time."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of people: the list of hosts that is read again, or a request, which gets an `Answer`."""

    by: Literal["list", "join", "leave"]
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The wish to start the next attempt."""

    gone_by: Mapping[str, float] = field(default_factory=dict)
    """The time when the ranks of each lost host have ended, wherever they are: an agent there has received nothing for
    long, also where the host answers again (its end of the broken link may be open)."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The end of a look."""

    report: PreflightReport
    trusted: tuple[str, ...] = ()
    """Hosts that have had ranks, and whose agents are the same ones."""


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """Hosts that are to join are warm, but those that can have no ranks, and why."""

    failed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The agent of a host that waits for the next attempt has ended."""

    host: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A look, or what is done between looks, has failed by a mistake of this program."""

    hosts: tuple[str, ...]
    error: str


@dataclass(frozen=True, kw_only=True)
class CanDrain:
    """The ranks can save and leave now; `joins_too`: also for hosts that come."""

    joins_too: bool = True


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """The end of an attempt: all ranks have ended."""

    attempt: AttemptSummary
    lost: str = ""
    """A host that is out of reach."""
    departing: tuple[str, ...] = ()
    """Hosts that a system has asked to end."""


Event = Tick | Asked | Say | Begin | Answered | Warmed | Lost | Mistake | CanDrain | AttemptEnded
