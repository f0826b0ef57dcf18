"""Which hosts a job shall have, and what follows when these are others than it has: pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from roxxel_dist.launcher.policy.restart import backoff

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
        """All of them, each once."""
        hosts = dict.fromkeys((*self.given, *self.listed, *self.added))
        return tuple(host for host in hosts if host not in self.removed)

    def without(self, held: Collection[str]) -> tuple[str, ...]:
        """All of them but those that the list alone names, and that are held back."""
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
    """When the hosts of the list came to it."""
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

    def forgiven(self) -> "Stays":
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
    asked, had = {*wanted}, {*members}
    newcomers = tuple(host for host in wanted if host not in had)
    unwanted = [host for host in members if host not in asked]
    if not unwanted:  # nearly always
        return Change(newcomers=newcomers)
    leaving = [host for host in unwanted if host in present]
    allowed = max(0, len({*present} & had) - least)
    kept = tuple(leaving[allowed:])
    lost = [host for host in unwanted if host not in present]
    spared = lost[max(0, len(members) - len(leaving[:allowed]) - least) :]
    stay = {*kept, *spared}
    return Change(
        newcomers=newcomers,
        leaves=tuple(host for host in unwanted if host not in stay),
        kept=kept,
    )


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
