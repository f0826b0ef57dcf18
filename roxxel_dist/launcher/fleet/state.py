"""The hosts of a job, each in one state, and the hosts that it is to have: plain values, and pure functions on them."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.job.placement import Assignment, assign, working_hosts
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.policy.outcome import AttemptSummary, backoff
from roxxel_dist.launcher.preflight.run import PreflightReport

NUMBERS = re.compile(r"\d[\d.,]*")


SHORT_S = 600.0
"""A host that leaves the list sooner after it came has cost two restarts for little."""
HOLD_S, HOLD_MOST_S = 60.0, 3600.0
"""So long a host waits in the list after two such stays in a row; each further one doubles it, up to an hour."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The hosts that people want in a job."""

    given: tuple[str, ...]
    """Those of --hosts or --hostfile."""
    listed: tuple[str, ...] = ()
    """Those of the last good list of --hosts-from."""
    added: tuple[str, ...] = ()
    """Those of `join`."""
    removed: frozenset[str] = frozenset()
    """Those of `leave`: they stay away until they `join`, or come to the list anew."""

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are wanted, each once."""
        hosts = dict.fromkeys((*self.given, *self.listed, *self.added))
        return tuple(host for host in hosts if host not in self.removed)

    def without(self, held: Collection[str]) -> tuple[str, ...]:
        """The hosts that are wanted, but those that the list alone names, and that are held back."""
        if not held:
            return self.hosts
        asked = {*self.given, *self.added}
        return tuple(host for host in self.hosts if host in asked or host not in held)

    def with_list(self, hosts: Sequence[str]) -> "Wanted":
        """The same when the list has these hosts."""
        dropped = {*self.listed} - {*hosts}
        return replace(self, listed=tuple(hosts), removed=self.removed - dropped)

    def with_join(self, hosts: Sequence[str]) -> "Wanted":
        """The same when these hosts are asked to join."""
        return replace(self, added=(*self.added, *hosts), removed=self.removed - {*hosts})

    def with_leave(self, hosts: Sequence[str]) -> "Wanted":
        """The same when these hosts are asked to leave."""
        added = tuple(host for host in self.added if host not in hosts)
        return replace(self, added=added, removed=self.removed | {*hosts})


@dataclass(frozen=True, kw_only=True)
class Stays:
    """The record of hosts that come to the list and leave it; one that stays short times only is held back."""

    since: Mapping[str, float]
    """The time when each host of the list came to it."""
    short: Mapping[str, int] = field(default_factory=dict)
    """How many stays of a host were short, in a row. One that ends while it is held back does not count: it cost
    nothing."""

    def with_list(self, hosts: Sequence[str], now: float) -> "Stays":
        """The same when the list has these hosts."""
        short = dict(self.short)
        for host in self.since.keys() - {*hosts}:
            stayed_s = now - self.joins_at(host)
            if stayed_s >= SHORT_S:
                short.pop(host, None)
            elif stayed_s >= 0:
                short[host] = short.get(host, 0) + 1
        return Stays(since={host: self.since.get(host, now) for host in hosts}, short=short)

    def forget_short(self) -> "Stays":
        """The same when every host of the list is needed."""
        return replace(self, short={})

    def joins_at(self, host: str) -> float:
        """The time from which on a host of the list is wanted."""
        times = self.short.get(host, 0)
        return self.since[host] + (backoff(HOLD_S, times - 2, HOLD_MOST_S) if times > 1 else 0.0)

    def held(self, now: float) -> frozenset[str]:
        """Hosts of the list that are held back."""
        return frozenset(host for host in self.short if host in self.since and self.joins_at(host) > now)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change that makes the hosts of a job those that it shall have."""

    newcomers: tuple[str, ...] = ()
    """Hosts that it shall have and has not."""
    leaves: tuple[str, ...] = ()
    """Hosts that are to leave."""
    kept: tuple[str, ...] = ()
    """Hosts that are to leave, and stay: too few would be left."""


def change_to(wanted: Collection[str], members: Sequence[str], present: Collection[str], least: int) -> Change:
    """Compute the change by which the hosts of a job become those that it shall have.

    Args:
        wanted: those that it shall have.
        members: those that it has, the lost ones too, in the order of its ranks.
        present: those of them that are not lost.
        least: so many stay, of those that are there. Lost ones stay too where too few would be left without them: they
            may come back sooner than others join.
    """
    asked, had, there = {*wanted}, {*members}, {*present}
    newcomers = tuple(host for host in wanted if host not in had)
    unwanted = [host for host in members if host not in asked]
    if not unwanted:  # nearly always
        return Change(newcomers=newcomers)
    leaving = [host for host in unwanted if host in there]
    allowed = max(0, len(there & had) - least)
    kept = tuple(leaving[allowed:])
    lost = [host for host in unwanted if host not in there]
    spared = lost[max(0, len(members) - len(leaving[:allowed]) - least) :]
    stay = {*kept, *spared}
    return Change(newcomers=newcomers, leaves=tuple(host for host in unwanted if host not in stay), kept=kept)


def working_number(hosts: int, spare: int, first: int, most: int | None) -> int:
    """The number of hosts that work, of so many, if the batch allows it.

    Args:
        hosts: all of them, at least 1.
        spare: so many are spare (--spare-hosts), as long as `first` others work.
        first: how many worked at the start.
        most: no more work (--max-hosts).
    """
    number = max(hosts - spare, min(hosts, first))
    return number if most is None else min(number, most)


class State(Enum):
    """The part of a host in the job. Those above WORKING are no members of it, or members that it goes on without."""

    HELD = "in the list, and held back, because it came and went"
    WANTED = "to be asked"
    LOOKING = "asked"
    FIT = "passed alone, and to be asked together with those that work"
    WARM = "can start together with those that work"
    UNFIT = "did not pass, and is asked again later"
    LOST = "a member without which the job goes on"
    WORKING = "has ranks"
    SPARE = "there, and without ranks"
    LEAVING = "has ranks, and is to leave the job"
    ASIDE = "a member that works, for a day, only where too few others are there"


SEARCH = "a search"
"""The subject of lines that are told anew in each search."""
THERE = (State.WORKING, State.SPARE, State.LEAVING)
AWAY = (State.LOST, State.UNFIT, State.FIT, State.LOOKING)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host."""

    name: str
    state: State = State.WANTED
    since: float = 0.0
    """The time when it came to this state, by the launcher's clock, as all times here."""
    due: float = math.inf
    """The time of its next look, while others work."""
    why: str = ""
    """Why it did not pass."""
    failures: int = 0
    """How many looks in a row it has answered and did not pass."""
    absences: int = 0
    """How many looks in a row it has not answered."""
    is_known: bool = False
    """Whether a look at it as a newcomer has ended."""
    passed_alone: bool = False
    """Whether it passed alone in the look that goes on, or in the last one."""
    has_returned: bool = False
    """Whether it was lost before, and taken in again."""
    departs_by: float = 0.0
    """The time when a system that has asked it to end has ended it."""


@dataclass(kw_only=True)
class Search:
    """The choice of hosts for a start, as far as it is."""

    asked: tuple[str, ...]
    """Hosts without which the last attempt was made, and that can be used again."""
    back: tuple[str, ...]
    """Those of them that did pass, so far."""
    reserve: frozenset[str]
    """Hosts that are asked only where the others are too few."""
    gone_by: Mapping[str, float]
    deadline: float
    """The time until which a host that is missing may come back."""
    starting: frozenset[str] = frozenset()
    """Hosts of which the user has read that they start."""
    replaced: frozenset[str] = frozenset()
    """Hosts that start, and for which others are tried."""
    failed: frozenset[str] = frozenset()
    """Hosts whose devices did not pass."""


@dataclass(kw_only=True)
class Fleet:
    """The hosts of a job, and what is known of them; a value: `step` makes the next one, and its rules change that."""

    given: JobSpec
    first: tuple[str, ...]
    """The hosts that were there at the start."""
    is_fixed: bool
    """Whether the hosts never change: no other host joins, or is taken in again."""
    wanted: Wanted
    stays: Stays
    members: tuple[str, ...]
    """The hosts of the job, the lost and spare ones too, in the order of its ranks."""
    hosts: dict[str, Host]
    """The members, and those that may become members."""
    now: float = 0.0
    attempts: tuple[AttemptSummary, ...] = ()
    is_resized: bool = False
    """Whether the members are others than at the start."""
    search: Search | None = None
    """The choice of hosts, while a start is sought."""
    started: Assignment | None = None
    """The last start."""
    report: PreflightReport = field(default_factory=PreflightReport)
    """What was found on the hosts of the last start."""
    fit: PreflightReport | None = None
    """What was found on hosts that nothing speaks against since."""
    taken_in: tuple[str, ...] = ()
    """Hosts that are in the last start, and were not in the one before."""
    look: events.Look | events.Warm | None = None
    """What goes on while ranks run."""
    with_warm: tuple[str, ...] = ()
    """Spare hosts that will work when those that are WARM do."""
    unchecked: frozenset[str] = frozenset()
    """Hosts whose devices are to be checked by the next look."""
    pause_s: float = Limits.look_s
    """Seconds between two looks at hosts of which nothing is known."""
    lengthened: float = -math.inf
    """The time when that pause grew last."""
    leaves_since: float | None = None
    """Since when ranks could leave for hosts that are to leave."""
    said: frozenset[tuple[str, str]] = frozenset()
    """What people have read, and of what."""
    note: str = ""
    """The last one of an assignment that people have read; empty where all hosts work."""
    cores: int | None = None
    todo: list[events.Do] = field(default_factory=list)
    """What is to be done after the event that made it."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of hosts is no number that a person has asked for."""
        return self.is_resized or self.given.hosts_from is not None

    @property
    def is_retry(self) -> bool:
        """Whether the job has run before: its hosts may need a moment."""
        return bool(self.attempts) or self.given.first_attempt > 0

    def members_in(self, *states: State) -> tuple[str, ...]:
        """The members in one of these states, in the order of their ranks."""
        hosts = self.hosts
        return tuple([name for name in self.members if hosts[name].state in states])

    @property
    def working(self) -> tuple[str, ...]:
        """The hosts that have ranks."""
        return () if self.started is None else self.in_order(self.started.hosts)

    @property
    def present_members(self) -> tuple[str, ...]:
        """The members that are not lost: those that work, and spare ones. Before a start, those that may be there."""
        return self.members_in(*THERE, State.WANTED)

    @property
    def has_spare(self) -> bool:
        """Whether a host is left over that would do."""
        spare = self.members_in(State.SPARE)
        if self.started is not None and not self.is_elastic:
            return len(spare) + len(self.started.hosts) > len(working_hosts(self.given, self.members))
        return bool(spare)

    @property
    def waiting_hosts(self) -> tuple[str, ...]:
        """Hosts whose agents wait for the next attempt."""
        warm = self.are(State.WARM)
        return (*warm, *self.with_warm) if warm else ()

    @property
    def least(self) -> int:
        """The number of hosts that the job needs."""
        return self.given.min_hosts or len(working_hosts(self.given, self.first))

    @property
    def port(self) -> int | None:
        """The coordinator's port in the next attempt; None: a free one."""
        number = len(self.attempts) + (self.search is None)
        return None if self.given.port is None else self.given.port + number % (self.given.max_restarts + 1)

    @property
    def wanted_now(self) -> tuple[str, ...]:
        """The hosts that the job shall have now."""
        return self.wanted.without(self.stays.held(self.now))

    @property
    def change(self) -> Change:
        """The change that makes the hosts those that it shall have."""
        return change_to(self.wanted_now, self.members, self.present_members, self.least)

    @property
    def candidates(self) -> tuple[Host, ...]:
        """Hosts that are asked while others work: lost ones first, and then those that are new."""
        if self.is_fixed:
            return ()
        wanted, members = dict.fromkeys(self.wanted_now), {*self.members}
        away = [name for name in self.members_in(*AWAY, State.WARM) if name in wanted]
        new = [name for name in wanted if name in self.hosts and name not in members]
        return tuple(self.hosts[name] for name in (*away, *new))

    def are(self, state: State) -> tuple[str, ...]:
        """The candidates in this state."""
        if state not in [host.state for host in self.hosts.values()]:  # nearly always
            return ()
        return tuple(host.name for host in self.candidates if host.state is state)

    def in_order(self, hosts: Collection[str]) -> tuple[str, ...]:
        """Sort these members in the order of the ranks."""
        chosen = {*hosts}
        return tuple(name for name in self.members if name in chosen)

    def with_members(self, joins: Iterable[str]) -> tuple[str, ...]:
        """The members, and these."""
        return tuple(dict.fromkeys((*self.members, *joins)))

    def job_of(self, members: Sequence[str]) -> JobSpec:
        """The job as these hosts would do it all together."""
        if not self.is_resized and tuple(members) == self.members:
            return self.given
        given = self.given
        first = len(working_hosts(given, self.first))
        number = working_number(len(members), given.spare_hosts, first, given.max_hosts)
        return replace(
            given, nprocs=given.nprocs // first * number, spare_hosts=len(members) - number, min_hosts=self.least
        )

    def assignment_of(self, present: Sequence[str]) -> Assignment:
        """The start that these members would make."""
        return assign(self.job_of(self.members), self.members, present, elastic=self.is_elastic)

    def plan(self, more: Collection[str]) -> Assignment:
        """The start that would be made if these hosts were there beside those that are."""
        members = self.with_members(more)
        present_members = {*self.present_members, *more}
        present = [name for name in members if name in present_members]
        return assign(self.job_of(members), members, present, elastic=self.is_elastic or members != self.members)

    def grows_with(self, more: Collection[str]) -> bool:
        """Whether the job would have more devices than it has, with these hosts."""
        return self.started is not None and self.plan(more).devices > self.started.devices

    def can_do_without(self, name: str) -> bool:
        """Whether enough hosts are left without this one: as many as work, or as `--min-hosts` asks for."""
        job = self.job_of(self.members)
        left = [other for other in self.members_in(*THERE, State.WANTED, State.WARM) if other != name]
        least = len(working_hosts(job, self.members))
        return len(left) >= (least if job.min_hosts is None else min(least, job.min_hosts))

    def move(self, names: Iterable[str], state: State, **values: Any) -> None:
        """Hosts come to this state."""
        for name in names:
            host = self.hosts.get(name) or Host(name=name, since=self.now)
            if host.state is state and not values and name in self.hosts:
                continue
            since = host.since if host.state is state else self.now
            self.hosts[name] = replace(host, state=state, since=since, **values)

    def drop(self, names: Collection[str]) -> None:
        """Forget hosts."""
        for name in names:
            self.hosts.pop(name, None)

    def say(self, text: str, about: str = "") -> None:
        """Tell people, once; of `about`, whatever the numbers in it."""
        key = about, NUMBERS.sub("", text) if about not in ("", SEARCH) else text
        if key not in self.said:
            self.said |= {key}
            self.todo.append(events.Say(text=text))

    def unsay(self, *about: str) -> None:
        """People are to read of these again."""
        self.said = frozenset(key for key in self.said if key[0] not in about)

    def change_members(self, joins: Collection[str] = (), leaves: Collection[str] = ()) -> None:
        """Let these hosts be members of the job, or be none any more; at least one stays.

        Those that join as spares, while an attempt goes on, can be used at once when a host fails.
        """
        gone, before = {*leaves}, {*self.members}
        members = tuple(name for name in self.with_members(joins) if name not in gone)
        if members != self.members and members:
            new = [name for name in joins if name not in before]
            self.unchecked |= {name for name in new if not self.hosts[name].is_known}
            self.members, self.is_resized = members, True
            self.drop(gone - {*members})
