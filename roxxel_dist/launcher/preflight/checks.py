"""From what hosts said about themselves to what is wrong with them: pure functions.

docs/howto/launching.md has a table of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roxxel_dist.launcher.preflight.host_info import HostInfo, is_loopback, usable_gpus
from roxxel_dist.launcher.preflight.requirements import Requirements

Level = Literal["ok", "warning", "error"]
Hosts = Mapping[str, HostInfo]
"""What each host said, in the order of the ranks."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found."""

    level: Level
    check: str
    hosts: tuple[str, ...]
    text: str


def check_result(level: Level, check: str, hosts: Sequence[str], text: str) -> CheckResult:
    """A finding about these hosts."""
    return CheckResult(level=level, check=check, hosts=tuple(hosts), text=text)


ROOM, ENOUGH = 1 << 18, 2 << 30
"""Bytes that must be free, and that should be."""
MUST_MATCH = ("jax", "jaxlib", "roxxel-dist")
NAMED = 8
"""Hosts that a text names; of more it gives the count."""


def findings(wanted: Requirements, hosts: Hosts) -> list[CheckResult]:
    """Everything that can be said from facts alone. Hosts are compared where there are several."""
    checks: list[Callable[[Requirements, Hosts], Iterator[CheckResult]]] = [
        _gpus,
        tpu_locks,
        _disk,
        _leftovers,
        _versions,
        _data,
    ]
    if len(hosts) > 1:
        checks += [_one_machine, _name]
    return [found for check in checks for found in check(wanted, hosts)]


def named(hosts: Sequence[str]) -> str:
    """Host names for a text."""
    rest = len(hosts) - NAMED
    return ", ".join(hosts) if rest <= 1 else f"{', '.join(hosts[:NAMED])} and {rest} more"


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _groups(hosts: Hosts, value: Callable[[HostInfo], Any]) -> dict[Any, list[str]]:
    """Which hosts have which value."""
    groups: dict[Any, list[str]] = {}
    for host, facts in hosts.items():
        groups.setdefault(value(facts), []).append(host)
    return groups


def _who_has_what(groups: Mapping[Any, Sequence[str]], absent: str = "none") -> str:
    return "; ".join(f"{absent if value is None else value} on {named(names)}" for value, names in groups.items())


def are_one_machine(hosts: Hosts) -> bool:
    """Whether all host names lead to one machine with one network."""
    return len(_groups(hosts, lambda facts: facts["machine"])) == 1


def _one_machine(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    for names in _groups(hosts, lambda facts: facts["machine"]).values():
        if len(names) > 1:
            yield check_result(
                "warning",
                "host",
                names,
                f"{named(names)} are one machine: their ranks share its devices; name each machine once",
            )


def _runs_on_cpu(wanted: Requirements, facts: HostInfo) -> bool:
    platforms = wanted.platforms or facts["platforms"]
    return platforms.split(",")[0] == "cpu" if platforms else facts["gpus"] == 0 and not facts["tpus"]


def _name(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    if are_one_machine(hosts):
        return
    found = [one for host, facts in hosts.items() for one in own_name(wanted, host, facts)]
    yield from found
    if good := [host for host in hosts if not any(host in one.hosts for one in found)]:
        yield check_result("ok", "name", good, f"own names resolve to addresses that others can reach on {named(good)}")


def own_name(wanted: Requirements, host: str, facts: HostInfo) -> Iterator[CheckResult]:
    """What is wrong with a host's own name: on CPU a rank tells the others the address that it resolves to."""
    name, addresses = facts["name"], facts["resolves"]
    if addresses and not is_loopback(addresses[0]):
        return
    to = f"resolves to {addresses[0]}, which other hosts cannot reach" if addresses else "does not resolve"
    level: Level = "error" if _runs_on_cpu(wanted, facts) else "warning"
    own = facts.get("ssh_address") or "its address"
    yield check_result(
        level,
        "name",
        [host],
        f"{host}: its own name {name!r} {to}. Ranks on CPU (Gloo) find each other by it: have /etc/hosts on {host} "
        f"say `{own} {name}` instead",
    )


def _versions(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    if any("versions" not in facts for facts in hosts.values()):
        return
    equal = []
    for name in dict.fromkeys(name for facts in hosts.values() for name in facts["versions"]):
        groups = _groups(hosts, lambda facts, name=name: facts["versions"].get(name))
        if len(groups) == 1:
            equal.append(f"{name} {next(iter(groups))}")
            continue
        level: Level = "error" if name in MUST_MATCH else "warning"
        text = f"{name} differs: {_who_has_what(groups)}; install the same version on all hosts"
        yield check_result(level, "versions", list(hosts), text)
    if equal:
        yield check_result("ok", "versions", list(hosts), ", ".join(equal))
    codes = _groups(hosts, lambda facts: facts["code"])
    fix = "install the same one, or bring the checkouts to the same commit"
    yield from _same("code", hosts, codes, "the code of roxxel_dist", fix)


def speak_alike(hosts: Hosts, here: str) -> Iterator[CheckResult]:
    """Whether the hosts have the launcher's own code (`here` is its hash)."""
    groups = _groups(hosts, lambda facts: facts["code"])
    if len(groups) == 1 and here not in groups:
        text = (
            f"the code of roxxel_dist is {here} in the launcher here, and {_who_has_what(groups)}: they talk with each "
        )
        yield check_result("error", "code", list(hosts), text + "other; install the same on both")


def _same(check: str, hosts: Hosts, groups: Mapping[Any, Sequence[str]], what: str, fix: str) -> Iterator[CheckResult]:
    if len(groups) == 1:
        yield check_result("ok", check, list(hosts), f"{what}: {next(iter(groups))}")
    else:
        yield check_result("error", check, list(hosts), f"{what} differs: {_who_has_what(groups)}; {fix}")


def _data(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    told = {host: facts["data"] for host, facts in hosts.items() if facts.get("data") is not None}
    if not told:
        return
    first = next(iter(told.values()))
    path = first["path"]
    if first.get("text"):  # rank 0 makes shards in the run directory, the others read those
        yield check_result("ok", "data", list(told)[:1], f"{path}: text, of which rank 0 makes shards")
        return
    unread = _groups({host: data for host, data in told.items() if "why" in data}, lambda data: data["why"])
    for why, names in unread.items():
        text = f"{named(names)}: the data {path} cannot be read ({why}); put it there, or name another path"
        yield check_result("error", "data", names, text)
    texts = [host for host, data in told.items() if data.get("text")]
    if texts:
        text = f"{path} is text on {named(texts)}, and tokens on {next(iter(told))}; copy the same files to all hosts"
        yield check_result("error", "data", texts, text)
    prints = _groups(
        {host: data for host, data in told.items() if "fingerprint" in data}, lambda one: one["fingerprint"]
    )
    if prints:
        of_those = {host: hosts[host] for names in prints.values() for host in names}
        fix = "copy the same shards to all hosts"
        yield from _same("data", of_those, prints, f"the fingerprint of {path}", fix)


def _gpus(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    # A list that somebody gave is believed: it may name parts of GPUs, which nobody counts.
    need = wanted.gpus_per_host if wanted.visible is None else None
    counts = {host: usable_gpus(facts) for host, facts in hosts.items()}
    few = {host: count for host, count in counts.items() if need and count is not None and count < need}
    for host, count in few.items():
        fix = f"use --gpus-per-host {count}" if count else "leave --gpus-per-host out"
        listed = hosts[host]["visible"]
        where = "/dev/nvidia*" if listed is None else f"CUDA_VISIBLE_DEVICES={listed}"
        text = f"{host}: --gpus-per-host {need}, and it has {count} ({where}); {fix}, or leave this host out"
        yield check_result("error", "devices", [host], text)
    groups = _groups(hosts, lambda facts: (facts["gpus"], facts["tpus"]))
    if len(groups) > 1 and not few:
        told = _who_has_what({f"{gpus} GPUs, {tpus} TPU chips": names for (gpus, tpus), names in groups.items()})
        yield check_result("warning", "devices", list(hosts), f"devices differ: {told}; use hosts that are alike")
    elif not few:
        gpus, tpus = next(iter(groups))
        text = f"{'uncounted' if gpus is None else gpus} GPUs, {tpus} TPU chips each"
        yield check_result("ok", "devices", list(hosts), text)


def _disk(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    good = {host: facts["run_dir"]["free"] for host, facts in hosts.items() if facts["run_dir"] is not None}
    for host in list(good):
        path, free, why = (hosts[host]["run_dir"][name] for name in ("path", "free", "why"))
        fix = "or name another folder with --run_dir"
        if why is not None:
            text = f"{host}: {path} cannot be written ({why}); change its permissions, {fix}"
        elif free < ROOM:
            text = f"{host}: {path} has {size(free)} free, and {size(ROOM)} is the least; make room, {fix}"
        elif free < ENOUGH:
            text = f"{host}: {path} has {size(free)} free: few checkpoints fit; make room, {fix}"
        else:
            continue
        del good[host]
        yield check_result("error" if why is not None or free < ROOM else "warning", "disk", [host], text)
    if good:
        least = min(good, key=good.__getitem__)
        text = f"{hosts[least]['run_dir']['path']} can be written on {named(list(good))}"
        yield check_result("ok", "disk", list(good), f"{text}; at least {size(good[least])} free")


def _leftovers(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    clean = []
    for host, facts in hosts.items():
        ours = [rank for rank in facts["left"] if rank["ours"]]
        others = [rank for rank in facts["left"] if not rank["ours"] and rank["orphan"]]
        if ours:
            text = f"{host}: processes of this run still run there: {_ranks(ours)}; both would write to its folder"
            watched = next((rank for rank in ours if not rank["orphan"]), None)  # its launcher is well
            way = f"`roxxel-dist stop {watched['run_id']}` where it was launched" if watched else _kill(ours)
            yield check_result("error", "leftovers", [host], f"{text}; end them: {way}")
        if others:
            text = f"{host}: ranks that another launch has left run there: {_ranks(others)}; they hold its devices"
            yield check_result("warning", "leftovers", [host], f"{text}; if nobody needs them: {_kill(others)}")
        if stuck := [rank for rank in facts["left"] if rank["stuck"]]:
            text = f"{host}: process {stuck[0]['pid']} cannot be looked at: it seems to wait for a disk or a driver"
            yield check_result(
                "warning", "leftovers", [host], f"{text}; if it is a rank that was left, restart the host"
            )
        if not (ours or others or stuck):
            clean.append(host)
    if clean:
        yield check_result("ok", "leftovers", clean, f"no ranks that another launch has left on {named(clean)}")


def _ranks(ranks: Sequence[HostInfo]) -> str:
    runs = ", ".join(dict.fromkeys(rank["run_id"] or "unknown" for rank in ranks))
    return f"run {runs}, {len(ranks)} of them, for {max(rank['seconds'] for rank in ranks) / 60:.0f} min"


def _kill(ranks: Sequence[HostInfo]) -> str:
    return "kill " + " ".join(str(rank["pid"]) for rank in ranks)


def tpu_locks(wanted: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    """What is wrong with the lock, for a job that may use TPUs."""
    for host, facts in hosts.items():
        lock, platforms = facts["tpu_lock"], wanted.platforms or facts["platforms"]
        if lock is None or (platforms and "tpu" not in platforms.split(",")):
            continue
        where = f"{host}: {lock['path']}, libtpu's lock,"
        if lock["holder"] is not None:
            text = f"{where} is held by {lock['holder']}, which uses the TPU; end it, or JAX_PLATFORMS=cpu goes without"
            yield check_result("error", "tpu lock", [host], text)
        elif lock["why"] is not None:
            text = f"{where} cannot be opened ({lock['why']}), and nothing can use the TPU; sudo rm {lock['path']}"
            yield check_result("error", "tpu lock", [host], text)
        else:
            yield check_result("ok", "tpu lock", [host], f"{where} is there, and nobody holds it")
