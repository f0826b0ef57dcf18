"""The network of the hosts: where ranks find each other, and whether every host reaches the others there.

A rank listens on a port that its kernel chooses: on CPU (Gloo) at the address that its host's own name means to the
host, on GPUs at that of a network interface. Others connect to it, in both directions. Rank 0 has the coordinator too.
So each host listens at such an address, and the others connect to it; a result names only what was tried.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

from roxxel_dist.launcher.preflight.checks import (
    MOST_ALIKE,
    CheckResult,
    Hosts,
    Level,
    Questions,
    Requirements,
    blame_each,
    find_twins,
    fold,
    needs_own_names,
    rank_address,
)

ALL_PAIRS = 16
"""The most hosts of which every pair is tried; of more, each and those 1, 2, 4, 8, … places before and behind it."""


@dataclass(frozen=True)
class Endpoint:
    """An address and a port at which a host listens."""

    host: str
    address: str
    port: int
    is_coordinator: bool = False

    def __str__(self) -> str:
        """ADDRESS:PORT."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True)
class NoRoute:
    """A host that did not reach a place."""

    source: str
    place: Endpoint
    why: str
    size: int = 0
    """The size of packets that do not get there, where smaller ones do."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Addresses at which hosts may listen, so that others reach them."""

    coordinators: Sequence[str]
    """Addresses of the first host for the coordinator; the best one first."""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """The address of each host for its ranks; none where all hosts are one machine."""
    routes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The addresses from which a host's packets go to another one."""


def addresses(questions: Questions, requirements: Requirements, hosts: Hosts) -> Addresses:
    """The addresses of hosts that are not all one machine.

    A host from which no address leads to another one has no route. On CPU one whose own name has no address that
    others could reach has none for its ranks.
    """
    asked, first = {}, next(iter(hosts))
    second = next(name for name in hosts if hosts[name]["machine"] != hosts[first]["machine"])
    for host, info in hosts.items():
        other = first if info["machine"] != hosts[first]["machine"] else second
        towards = [hosts[other]["ssh_address"], other.rpartition("@")[2], *hosts[other]["resolves"]]
        asked[host] = {"ask": "addresses", "towards": [name for name in towards if name]}
    routes = {host: reply.get("addresses", []) for host, reply in questions.ask(asked).items()}
    ranks: dict[str, str] = {}
    same = find_twins(hosts)
    for host, info in hosts.items():
        own = rank_address(info) if needs_own_names(requirements, info) else next(iter(routes.get(host, [])), None)
        if own is not None and host not in same:
            ranks[host] = own
    coordinators = list(dict.fromkeys([*routes.get(first, []), *(ranks[host] for host in [first] if host in ranks)]))
    return Addresses(coordinators=coordinators, ranks=ranks, routes=routes)


def check_network(
    questions: Questions, hosts: Hosts, addresses: Addresses, port: int | None
) -> tuple[str, int, list[CheckResult]]:
    """The address and the port of the first host that the others reach, and the findings.

    The port is `port` or a free one; 0 where it cannot be had.
    """
    coordinators, ranks = addresses.coordinators, addresses.ranks
    first, *others = hosts
    if not coordinators:
        text = (
            f"{first} has no way to {others[0]}: neither the address of its ssh connection nor its name leads there; "
            "have both in one network, and their names in DNS or /etc/hosts"
        )
        return "", 0, [CheckResult("error", "port", tuple(hosts), text)]
    nonce = os.urandom(16).hex()
    wanted: dict[str, list[tuple[str, int]]] = {host: [(ranks[host], 0)] if host in ranks else [] for host in hosts}
    wanted[first] = [*((address, port or 0) for address in coordinators), *wanted[first]]
    held = questions.ask(
        {host: {"ask": "listen", "places": places, "nonce": nonce} for host, places in wanted.items() if places}
    )
    answers = {host: reply.get("ports", []) for host, reply in held.items()}
    own = answers.get(first) or [held.get(first, {}).get("why", "no answer")] * len(wanted[first])
    if not any(isinstance(number, int) for number in own[: len(coordinators)]):
        problem = f"--port {port}: cannot be used" if port else "a free port cannot be had"
        text = (
            f"{first}: {problem} on {coordinators[0]} ({own[0]}); leave --port out to take a free one, or give another"
        )
        return coordinators[0], 0, [CheckResult("error", "port", (first,), text)]
    places = [
        Endpoint(host, address, number, host == first and index < len(coordinators))
        for host in hosts
        for index, ((address, _), number) in enumerate(zip(wanted[host], answers.get(host, []), strict=False))
        if isinstance(number, int)
    ]
    failures, slowest, tried = _try(questions, places, list(hosts), nonce)
    coordinator, results, said = _coordinator(places, failures, hosts, addresses, port)
    if not results and tried >= set(others):
        reached = f", reached from {fold(others)} within {slowest:.1f} ms" if others else ""
        results = [CheckResult("ok", "port", tuple(hosts), f"{first} listens on {coordinator}{reached}")]
    rest = [one for one in failures if not one.place.is_coordinator]
    rest = [one for one in rest if port or one.place.host != first or one.source not in said]  # said already
    more = list(_describe(rest, hosts, addresses, None))
    if ranks and not more and not said and set(ranks) == set(hosts):
        among = "each of these reaches the others" if len(hosts) <= ALL_PAIRS else "these reach each other in a sample"
        pairs = [f"{host} ({ranks[host]})" for host in hosts]
        text = f"{among} at free ports, as ranks do: {fold(pairs)}"
        more = [CheckResult("ok", "network", tuple(hosts), text)]
    return coordinator.address, coordinator.port, results + more


def _coordinator(
    places: Sequence[Endpoint], failures: Sequence[NoRoute], hosts: Hosts, addresses: Addresses, port: int | None
) -> tuple[Endpoint, list[CheckResult], set[str]]:
    """The place of the first host that most others reach, what is wrong with it, and the hosts that do not reach it."""
    candidates = [place for place in places if place.is_coordinator]
    failed = {place: [failure for failure in failures if failure.place == place] for place in candidates}
    best = min(candidates, key=lambda place: len(failed[place]))  # of equals the first one
    return best, list(_describe(failed[best], hosts, addresses, port)), {failure.source for failure in failed[best]}


def _try(
    questions: Questions, places: Sequence[Endpoint], hosts: Sequence[str], nonce: str
) -> tuple[list[NoRoute], float, set[str]]:
    """Have hosts connect to places of others: those that failed, the slowest one (ms), and who has answered."""
    targets = _targets(places, hosts)
    asked = {
        host: {"ask": "connect", "places": [(place.address, place.port) for place in to], "nonce": nonce}
        for host, to in targets.items()
        if to
    }
    answers = {host: reply for host, reply in questions.ask(asked).items() if "took" in reply}
    tries = [
        (host, *one)
        for host, reply in answers.items()
        for one in zip(targets[host], reply["took"], reply["sizes"], strict=True)
    ]
    failures = [NoRoute(host, place, took, size) for host, place, took, size in tries if isinstance(took, str)]
    slowest = max((took for _, _, took, _ in tries if not isinstance(took, str)), default=0.0)
    return failures, slowest, set(answers)


def _targets(places: Sequence[Endpoint], hosts: Sequence[str]) -> dict[str, list[Endpoint]]:
    """The places that each host tries, in their order: the coordinator's, and those of others (see `ALL_PAIRS`)."""
    if len(hosts) <= ALL_PAIRS:
        return {host: [place for place in places if place.host != host] for host in hosts}
    everywhere = [index for index, place in enumerate(places) if place.is_coordinator]
    by_host: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        by_host.setdefault(place.host, []).append(index)
    steps = [1 << power for power in range(len(hosts).bit_length()) if 1 << power <= len(hosts) // 2]
    targets: dict[str, list[Endpoint]] = {}
    for number, host in enumerate(hosts):
        near = {hosts[(number + sign * step) % len(hosts)] for step in steps for sign in (1, -1)}
        indices = {*everywhere, *(index for name in near for index in by_host.get(name, ()))}
        targets[host] = [places[index] for index in sorted(indices) if places[index].host != host]
    return targets


def _describe(failures: Sequence[NoRoute], hosts: Hosts, addresses: Addresses, port: int | None) -> list[CheckResult]:
    """A finding for each host that failures have in common, or for a pair of hosts where one alone cannot be named. A
    cause that more than `MOST_ALIKE` hosts share is one finding."""
    causes: dict[tuple[Level, str, str], list[tuple[tuple[str, ...], str, Callable[[], str]]]] = {}
    for blamed, worst, part in _parts(failures, list(hosts)):
        lost = [one for one in part if one.size]  # it is tried in both directions, whichever of them connects
        rest = [one for one in part if not one.size]
        into = [one for one in rest if one.place.host == worst]
        for one_way in (into, [one for one in rest if one.place.host != worst]):
            if one_way:
                cause = _level(one_way, hosts), _check(one_way[0]), _reason(one_way[0].why)
                text = partial(_text, one_way, hosts, addresses, port)  # of a cause of many hosts one is made
                causes.setdefault(cause, []).append((blamed, worst, text))
        if lost:
            cause = _level(lost, hosts), _check(lost[0]), f"size {lost[0].size}"
            causes.setdefault(cause, []).append((blamed, worst, partial(_text_of_lost, worst, lost)))
    results: list[CheckResult] = []
    for (level, check, _), found in causes.items():
        some = {worst for _, worst, _ in found}
        if len(some) <= MOST_ALIKE:
            results += [CheckResult(level, check, blamed, text()) for blamed, _, text in found]
            continue
        every = tuple(host for host in hosts if host in some)
        text = f"{found[0][2]()}; the same with other hosts: in all with {fold(every)}"
        certain = {host for blamed, _, _ in found if len(blamed) == 1 for host in blamed}
        groups = blame_each(hosts, certain) if 2 * len(certain) < len(hosts) else ()  # else it is no fault of theirs
        results.append(CheckResult(level, check, every, text, groups))
    return results


def _parts(failures: Sequence[NoRoute], hosts: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str, list[NoRoute]]]:
    """Failures by the host that most of those that are left have in common: whom to blame, that host, the failures."""
    of_host: dict[str, list[int]] = {}
    for index, one in enumerate(failures):  # no host tries itself
        of_host.setdefault(one.source, []).append(index)
        of_host.setdefault(one.place.host, []).append(index)
    left = {host: len(indices) for host, indices in of_host.items()}
    is_left = bytearray(b"\1") * len(failures)
    order = {host: number for number, host in enumerate(hosts)}
    heap = [(-count, order[host], host) for host, count in left.items()]
    heapify(heap)
    while heap:
        count, _, worst = heappop(heap)
        if left[worst] != -count:  # it has become less
            if left[worst]:
                heappush(heap, (-left[worst], order[worst], worst))
            continue
        indices = [index for index in of_host[worst] if is_left[index]]
        found = [failures[index] for index in indices]
        others = [one.place.host if one.source == worst else one.source for one in found]
        is_certain = min(left[other] for other in others) < left[worst]
        yield ((worst,) if is_certain else (found[0].source, found[0].place.host)), worst, found
        left[worst] = 0
        for index, other in zip(indices, others, strict=True):
            is_left[index] = 0
            left[other] -= 1


def _text(failures: Sequence[NoRoute], hosts: Hosts, addresses: Addresses, port: int | None) -> str:
    """Words for failures of one direction: towards one host, or from one host."""
    place, sources = failures[0].place, [one.source for one in failures]
    to_one = len({one.place.host for one in failures}) == 1
    if to_one:
        verb = "does" if len(sources) == 1 else "do"
        head = f"{fold(sources)} {verb} not reach {place.host} at {place}"
    else:
        head = f"{sources[0]} does not reach {fold([f'{one.place.host} at {one.place}' for one in failures])}"
    info = hosts[place.host]
    whys = dict.fromkeys(_reason(one.why) for one in failures)
    routes = addresses.routes.get(place.host, [])
    if to_one and not place.is_coordinator and place.address not in routes:
        fix = (
            f"{info['name']!r}, the own name of {place.host}, means this address, and ranks on CPU (Gloo) are found by "
            f"it: have /etc/hosts on {place.host} say `{next(iter(routes), 'its address')} {info['name']}` instead"
        )
    else:
        low, high = info["ports"] or (32768, 60999)
        which = f"TCP port {port}" if port else f"all TCP ports from {low} to {high}, of which ranks take any"
        walls = f"the firewalls of {place.host} and {sources[0]}" if to_one else f"the firewall of {sources[0]}"
        fix = f"have {walls} pass {which}, between the hosts and in both directions"
        fix += "; or choose a port that is open with --port" if port else ""
    return f"{head} ({'; '.join(whys)}): {fix}"


def _text_of_lost(host: str, failures: Sequence[NoRoute]) -> str:
    """Words for packets of full size that are lost between a host and others."""
    one = failures[0]
    others = dict.fromkeys(name for failure in failures for name in (failure.source, failure.place.host))
    del others[host]
    address = one.place.address
    ping = f"ping -M do -s {one.size - (48 if ':' in address else 28)} {address}"
    return (
        f"packets of full size ({one.size} bytes) are lost between {host} and {fold(list(others))} ({one.why}): give "
        f"their interfaces one MTU that all of the path carries (`{ping}` on {one.source} fails until then), or have "
        "firewalls pass ICMP's `fragmentation needed`"
    )


def _check(failure: NoRoute) -> str:
    return "port" if failure.place.is_coordinator else "network"


def _level(failures: Sequence[NoRoute], hosts: Hosts) -> Level:
    """A warning where ranks on TPUs, which have a network of their own, may not need the places."""
    is_aside = all(hosts[one.place.host]["tpus"] and not one.place.is_coordinator for one in failures)
    return "warning" if is_aside else "error"


def _reason(why: str) -> str:
    return f"{why}, although it listens there" if "refused" in why else why
