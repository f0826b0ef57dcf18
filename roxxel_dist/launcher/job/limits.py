"""The time limits by which launchers, agents and what they start know each other's ends: one table, handed to each."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

SCALE_ENV = "ROXXEL_TIME_SCALE"
"""For the tests of this package alone: `launch` scales the limits of a job by it, so that tests wait less."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of a job, all in seconds. Their order matters; the README of the launcher has them in a table.

    The launcher has them with its job, and an agent gets them with its first order.
    """

    checks_s: float = 0.5
    """An answer about checks that still run on a host: its agent sends nothing else meanwhile."""
    heartbeat_s: float = 0.5
    """Between the heartbeats that a controller sends its agents."""
    report_s: float = 0.5
    """Between the reports of an agent on its ranks, which are its heartbeats too."""
    dump_s: float = 1.25
    """The answer of ranks that are asked for their stacks, before one is taken for dead."""
    quiet_s: float = 2.0
    """With an older last message a host's ranks are not blamed for a hang, and it gets no heartbeat: it receives
    nothing much later than it sent something."""
    slack_s: float = 2.0
    """An agent that has stopped is killed by its guard so much later than it would have ended by itself."""
    gone_s: float = 2.5
    """The end of the ranks of a lost host, after its agent gives up: a guard may have to end it (`slack_s`)."""
    fresh_s: float = 2.5
    """The age of a host's question whether all hosts hear nothing."""
    linger_s: float = 3.0
    """A client whose program has ended, before it is killed: srun takes a moment."""
    common_s: float = 3.0
    """If for longer no host is known to have received a heartbeat, the ranks of all may have a lease (`lease.py`)."""
    members_s: float = 4.0
    """For the hangs that the launchers of other hosts find (`launch member`)."""
    still_s: float = 5.0
    """A controller that did not look for longer was stopped itself: its clocks begin again."""
    look_s: float = 5.0
    """Between two looks at a host that the job goes on without, at first."""
    usage_s: float = 5.0
    """The other ranks, after a configuration error, so that the rank that prints it (rank 0) comes to it as well: on a
    busy machine ranks start seconds apart."""
    orphan_s: float = 6.0
    """The silence after which a host asks whether all hosts hear nothing."""
    guard_kill_s: float = 8.0
    """Killed processes, before a guard, or a keeper, gives them up; in a driver some die later."""
    kill_s: float = 10.0
    """Killed ranks, before the controller gives them up."""
    agent_end_s: float = 10.0
    """The end of an agent, likewise."""
    silent_s: float = 10.0
    """The silence of an agent to the controller, and of the controller to an agent that a cut link can part from it:
    then the ranks there are lost, and end."""
    notify_end_s: float = 10.0
    """The commands of `--notify` that still run at the end of a job."""
    take_s: float = 5.0
    """A spare that is told to be a rank, before it is killed and a fresh process started."""
    tool_s: float = 20.0
    """A vendor's tool on a host (nvidia-smi)."""
    notify_s: float = 30.0
    """A command of `--notify`."""
    devices_s: float = 60.0
    """The check of a host's devices."""
    command_s: float = 60.0
    """The command of `--preflight`."""
    start_s: float = 60.0
    """The first word of an agent: a connection, and an interpreter from a slow file system."""
    answer_s: float = 60.0
    """An answer of a host before the start, its connection included."""
    warm_s: float = 60.0
    """The imports of a host that is to join, before it joins without spares."""
    life_s: float = 600.0
    """A host that is asked nothing more before the start, before its agent ends. Hosts are asked in groups, and each
    may take a minute; it also ends an agent behind a cut link."""

    OF_PROGRAMS: ClassVar[frozenset[str]] = frozenset(
        {"take_s", "tool_s", "notify_s", "devices_s", "command_s", "start_s", "answer_s", "warm_s", "life_s"}
    )
    """Those of a program that starts, computes or belongs to somebody else: no scale makes it faster."""

    def scaled(self, factor: float) -> "Limits":
        """The limits times a factor, in the same order; those of programs as they are."""
        names = {field.name for field in fields(self)} - self.OF_PROGRAMS
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @classmethod
    def received(cls, values: Mapping[str, Any]) -> "Limits":
        """The limits that a launcher has sent; what one of another version does not name has its default."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in names})
