"""What a job needs from its hosts, and the problems that their answers show: pure functions.

Those that need further questions (the port, the run directory that hosts share) are in `run.py`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, Protocol

from roxxel_dist.launcher.host.probe import IS_FILE, LOCK, HostInfo, is_loopback
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.spec import JobSpec

Level = Literal["ok", "warning", "error"]
Hosts = Mapping[str, HostInfo]
"""The answers of the hosts, in the order of the ranks."""

MIN_FREE_BYTES, ADVISED_FREE_BYTES = 1 << 18, 2 << 30
MUST_MATCH = ("jax", "jaxlib")
"""Packages that must be equal. Not roxxel-dist: ranks compare the code that they import."""
MAX_NAMES = 8
"""Hosts that a text names; of more it gives ranges, as in `h[001-192]`, and the count."""
MOST_ALIKE = 3
"""Hosts of which one cause is said for each; of more it is said of the first."""
NUMBER = re.compile(r"(\d+)")
ALLOWED = "where that is meant, as to try a job out, say --same-machine"


class Questions(Protocol):
    """Asks hosts: over their connections, or this process for its own machine."""

    unreachable: dict[str, str]
    """Hosts that do not answer, and why."""

    @property
    def starting(self) -> Sequence[str]:
        """The unreachable hosts that may still start, by the words of their servers."""
        ...

    def ask(self, questions: Mapping[str, Message]) -> dict[str, Message]:
        """The answers of those that have answered."""
        ...


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Needs of a job on its hosts."""

    run_dir: str | None = None
    """The folder that the hosts write to; None where they do not."""
    shared: bool = False
    """Whether all hosts must see the same run directory."""
    data_path: str | None = None
    resume: bool = False
    gpus_per_host: int | None = None
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, if it is set for all ranks."""
    platforms: str | None = None
    """JAX_PLATFORMS, where the job sets it."""
    jax: Mapping[str, str] | None = None
    """The variables by which a job decides which devices jax makes; None for a job that does not use jax."""
    distinct: bool = False
    """Whether no two hosts may be the same machine, or the same container of it."""
    compare: bool = True
    """Whether to ask for values that are compared between hosts: versions, data."""


def requirements_of(job: JobSpec, outer: Mapping[str, str], *, writes: bool) -> Requirements:
    """The needs of a job, from its command.

    `outer` are variables that ranks have beside those of the job; `writes`: logs are written on the host in any case.
    """
    program = job.program
    return Requirements(
        run_dir=str(job.log_dir.parent) if program.needs_folder or writes else None,
        shared=program.needs_folder,
        data_path=program.data_path,
        resume=program.resumes,
        gpus_per_host=job.gpus_per_host,
        visible={**outer, **job.env}.get("CUDA_VISIBLE_DEVICES"),
        platforms=job.env.get("JAX_PLATFORMS") or ("cpu" if job.devices_per_proc else None),
        jax=job.jax_environment(outer) if program.reports_steps else None,
    )


@dataclass(frozen=True)
class CheckResult:
    """The finding of one check."""

    level: Level
    check: str
    hosts: tuple[str, ...]
    text: str
    groups: tuple[tuple[str, ...], ...] = ()
    """The groups of hosts that agree with each other, where they were compared."""
    suspect: bool = False
    """Another host is better than this one, also where it is no error."""

    def blamed(self, trusted: Collection[str] = ()) -> frozenset[str]:
        """The hosts without which the check may pass; empty where that cannot be known.

        `trusted` have worked together: among hosts that were compared they are right, or else the most.
        """
        trusted = frozenset(trusted)
        if not self.groups:
            strange = frozenset(self.hosts) - trusted
            one_of_two = len(self.hosts) > 1 and strange != frozenset(self.hosts)
            return strange if one_of_two else frozenset(self.hosts if len(self.hosts) == 1 else ())
        everyone = frozenset(host for group in self.groups for host in group)
        known = [len(trusted.intersection(group)) for group in self.groups]
        if not any(known):
            known = [len(group) for group in self.groups]
        if known.count(max(known)) > 1:
            return everyone - trusted if everyone & trusted else frozenset()
        return everyone - set(self.groups[known.index(max(known))])


def blame_each(hosts: Iterable[str], wrong: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of a finding by which each of some hosts is wrong, and the others are right."""
    some = {*wrong}
    return (tuple(host for host in hosts if host not in some), *((host,) for host in wrong))


def run_checks(requirements: Requirements, hosts: Hosts) -> list[CheckResult]:
    """The findings that need no further question."""
    checks = [_devices, _jax, tpu_lock_findings, _disk, _versions, _data, _one_machine]
    if not are_one_machine(hosts):
        checks.append(name_findings)
    return [result for check in checks for result in check(requirements, hosts)]


def fold(hosts: Sequence[str]) -> str:
    """Host names for a text."""
    parts = ranges(hosts) if len(hosts) > MAX_NAMES + 1 else [(host, 1) for host in hosts]
    shown = parts if len(parts) <= MAX_NAMES + 1 else parts[:MAX_NAMES]
    rest = len(hosts) - sum(count for _, count in shown)
    return ", ".join(text for text, _ in shown) + f" and {rest} more" * bool(rest)


def ranges(hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Names in which one number counts up, folded as SLURM writes them (`h[001-192]`), and how many each stands for."""
    runs: list[tuple[list[str], list[str], int]] = []  # a first and a last name in parts, and which part counts
    for host in hosts:
        parts = NUMBER.split(host)
        first, last, place = runs[-1] if runs else (parts, [""], -1)
        found = _counts(last, parts)
        if found >= 0 and place in (-1, found):
            runs[-1] = first, parts, found
        else:
            runs.append((parts, parts, -1))
    return [_folded(*run) for run in runs]


def _counts(before: Sequence[str], after: Sequence[str]) -> int:
    """Which part of a name, a number, is one more in the name behind it, where all others are equal; or -1."""
    differ = [place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other]
    if len(before) != len(after) or len(differ) != 1 or differ[0] % 2 == 0:
        return -1
    one, other = before[differ[0]], after[differ[0]]
    return differ[0] if other == str(int(one) + 1).zfill(len(one)) else -1


def _folded(first: Sequence[str], last: Sequence[str], place: int) -> tuple[str, int]:
    if place < 0:
        return "".join(first), 1
    numbers = f"[{first[place]}-{last[place]}]"
    return "".join([*first[:place], numbers, *first[place + 1 :]]), int(last[place]) - int(first[place]) + 1


def merge_alike(findings: Iterable["CheckResult"]) -> list[tuple[Level, str, str]]:
    """Level, check and text of findings for people: what many hosts have alike is said of the first of them."""
    causes: dict[tuple[object, ...], list[CheckResult]] = {}
    for result in findings:
        is_of_one = len(result.hosts) == 1 and not result.groups
        words = NUMBER.sub("", result.text.replace(result.hosts[0], "")) if is_of_one else result.text
        causes.setdefault((result.level, result.check, is_of_one, words), []).append(result)
    rows: list[CheckResult] = []
    for alike in causes.values():
        if len(alike) > MOST_ALIKE and not alike[0].groups:
            others = fold([result.hosts[0] for result in alike[1:]])
            rows.append(replace(alike[0], text=f"{alike[0].text}; the same on {others}"))
        else:
            rows += alike
    return list(dict.fromkeys((result.level, result.check, result.text) for result in rows))


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def are_one_machine(hosts: Hosts) -> bool:
    """Whether all host names lead to one machine with one network."""
    return len(_groups(hosts, lambda info: info["machine"])) == 1


def _groups(hosts: Hosts, value: Callable[[HostInfo], Any]) -> dict[Any, list[str]]:
    """Which hosts have which value."""
    groups: dict[Any, list[str]] = {}
    for host, info in hosts.items():
        groups.setdefault(value(info), []).append(host)
    return groups


def _same(
    level: Level, check: str, hosts: Hosts, groups: Mapping[Any, Sequence[str]], what: str, fix: str
) -> CheckResult:
    """Whether all hosts have the same value."""
    if len(groups) == 1:
        return CheckResult("ok", check, tuple(hosts), f"{what}: {next(iter(groups))}")
    values = "; ".join(f"{'none' if value is None else value} on {fold(names)}" for value, names in groups.items())
    alike = tuple(tuple(names) for names in groups.values())
    return CheckResult(level, check, tuple(hosts), f"{what} differs: {values}; {fix}", alike)


def _devices(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    # A list that the user gave is not checked: it may name parts of GPUs, which a host does not count.
    need = requirements.gpus_per_host if requirements.visible is None else None
    errors = []
    for host, info in hosts.items():
        listed = info["visible"]
        count = info["gpus"] if listed is None else len([name for name in listed.split(",") if name.strip()])
        if need and count is not None and count < need:
            fix = f"use --gpus-per-host {count}" if count else "leave --gpus-per-host out"
            where = "/dev/nvidia*" if listed is None else f"CUDA_VISIBLE_DEVICES={listed}"
            text = f"{host}: --gpus-per-host {need}, and it has {count} ({where}); {fix}, or leave this host out"
            errors.append(CheckResult("error", "devices", (host,), text))
    groups = _groups(hosts, lambda info: f"{info['gpus']} GPUs, {info['tpus']} TPU chips".replace("None", "uncounted"))
    yield from errors or [
        _same("warning", "devices", hosts, groups, "the number of devices", "use hosts that are alike")
    ]


def _jax(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    """Hosts on which jax cannot make the devices that the job asks for."""
    for why, names in _groups(hosts, lambda info: info.get("no_devices")).items():
        if why is not None:
            yield CheckResult("error", "jax", tuple(names), f"{fold(names)}: {why}")


def tpu_lock_findings(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    """Findings about libtpu's lock, for a job that uses TPUs: it asks for them, or a host has some and jax finds them.

    Elsewhere another program may hold the lock, such as one that compiles for TPUs.
    """
    for host, info in hosts.items():
        platforms = requirements.platforms or info["platforms"]
        uses = "tpu" in platforms.split(",") if platforms else info["tpus"] > 0
        if info["tpu_lock"] is not None and uses:
            yield CheckResult("error", "tpu lock", (host,), f"{host}: {LOCK}, libtpu's lock, {info['tpu_lock']}")


def _disk(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    places = {host: info["run_dir"] for host, info in hosts.items() if info["run_dir"] is not None}
    fix = "or name another folder with --run_dir"
    for host, place in dict(places).items():
        path, free, why = place["path"], place["free"], place["why"]
        level: Level = "warning" if why is None and free >= MIN_FREE_BYTES else "error"
        if why == IS_FILE:
            text = f"{path} is a file: name a folder with --run_dir"
        elif place["foreign"] is not None:
            level, text = "error", place["foreign"]
        elif why is not None:
            text = f"{path} cannot be written ({why}); make it writable, {fix}"
        elif free < MIN_FREE_BYTES:
            text = f"{path} has {size(free)} free, and {size(MIN_FREE_BYTES)} is the least; make room, {fix}"
        elif free < ADVISED_FREE_BYTES:
            text = f"{path} has {size(free)} free: few checkpoints fit; make room, {fix}"
        else:
            continue
        del places[host]
        yield CheckResult(level, "disk", (host,), f"{host}: {text}")
    if places:
        least = min(places.values(), key=lambda place: place["free"])
        text = f"{least['path']} can be written on {fold(list(places))}; at least {size(least['free'])} free"
        yield CheckResult("ok", "disk", tuple(places), text)


def _versions(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    if any("versions" not in info for info in hosts.values()):
        return
    equal = []
    for name in dict.fromkeys(name for info in hosts.values() for name in info["versions"]):
        groups = _groups(hosts, lambda info, name=name: info["versions"].get(name))
        if len(groups) == 1:
            equal.append(f"{name} {next(iter(groups))}")
        else:
            level: Level = "error" if name in MUST_MATCH else "warning"
            yield _same(level, "versions", hosts, groups, name, "install the same version on all hosts")
    if equal:
        yield CheckResult("ok", "versions", tuple(hosts), ", ".join(equal))


def _data(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    data = {host: info["data"] for host, info in hosts.items() if info.get("data") is not None}
    if not data:
        return
    first = next(iter(data))
    path = data[first]["path"]
    if data[first].get("text"):  # rank 0 makes shards in the run directory, the others read those
        yield CheckResult("ok", "data", (first,), f"{path}: text, of which rank 0 makes shards")
        return
    other = f"it is text there, and tokens on {first}"
    for why, names in _groups(data, lambda info: other if info.get("text") else info.get("why")).items():
        if why is not None:
            text = f"{fold(names)}: the data {path} cannot be read ({why}); put it there, or name another path"
            yield CheckResult("error", "data", tuple(names), text)
    data = {host: info for host, info in data.items() if "fingerprint" in info}
    if data:
        fingerprints = _groups(data, lambda info: info["fingerprint"])
        fix = "copy the same shards to all hosts"
        yield _same("error", "data", data, fingerprints, f"the fingerprint of {path}", fix)


def _one_machine(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    twins: dict[str, list[list[str]]] = {}
    for same in _groups(hosts, lambda info: info["place"]).values() if requirements.distinct else ():
        if len(same) > 1:
            twins.setdefault(hosts[same[0]]["machine"], []).append(same)
    for machine, names in _groups(hosts, lambda info: info["machine"]).items():
        for same in twins.get(machine, ()):
            text = (
                f"{fold(same)} are one machine: the same one answers for each. Name each machine once, and see that "
                f"what reaches them (--via, a ProxyCommand) leads to each; {ALLOWED}"
            )
            yield CheckResult("error", "machine", tuple(same), text)
        if len(names) > 1 and machine not in twins:
            text = f"{fold(names)} are one machine: their ranks share its devices; name each machine once"
            yield CheckResult("warning", "host", tuple(names), text)


def launcher_findings(hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Problems with hosts that are the launcher's own machine, or container, and have none of its names."""
    for host in hosts:
        text = (
            f"{host}: the machine of the launcher answers for it, and has no such name or address: --via does not lead "
            f"there; {ALLOWED}"
        )
        yield CheckResult("error", "machine", (host,), text)


def needs_own_names(requirements: Requirements, info: HostInfo) -> bool:
    """Whether ranks of a host find others by their names: on CPU (Gloo)."""
    platforms = requirements.platforms or info["platforms"]
    return platforms.split(",")[0] == "cpu" if platforms else info["gpus"] == 0 and not info["tpus"]


def rank_address(info: HostInfo) -> str | None:
    """The address at which Gloo listens: the first of the host's own name that is the host's; None for loopback."""
    address = next(iter(info["owned"]), None)
    return None if address is None or is_loopback(address) else address


def find_twins(hosts: Hosts) -> dict[str, list[str]]:
    """Hosts of several machines whose own names mean one address, so that it leads to none of them; by host, all that
    have it."""
    found: dict[str, list[str]] = {}
    for address, names in _groups(hosts, rank_address).items():
        if address is not None and len({hosts[name]["machine"] for name in names}) > 1:
            found |= dict.fromkeys(names, names)
    return found


def name_findings(requirements: Requirements, hosts: Hosts) -> Iterator[CheckResult]:
    """Problems with hosts' own names: on CPU a rank sends the others the address that its host's name resolves to."""

    good, same = [], find_twins(hosts)
    for host, info in hosts.items():
        name, addresses, address = info["name"], info["resolves"], rank_address(info)
        if address and host not in same:
            good.append(host)
            continue
        if address:
            others = (other for other in same[host] if hosts[other]["machine"] != info["machine"])
            to = (
                f"resolves to {address}, as that of {fold(list(islice(others, MAX_NAMES)))} does there, so that "
                "nobody finds the other"
            )
        elif not addresses:
            to = "does not resolve"
        elif info["owned"]:
            to = f"resolves to {info['owned'][0]}, which other hosts cannot reach"
        else:
            to = f"resolves to {', '.join(addresses)}, which no interface of {host} has"
        fix = f"have /etc/hosts on {host} say `{info.get('ssh_address') or 'its address'} {name}` instead"
        text = f"{host}: its own name {name!r} {to}. Ranks on CPU (Gloo) find each other by it: {fix}"
        level: Level = "error" if needs_own_names(requirements, info) else "warning"
        yield CheckResult(level, "name", (host,), text)
    if good:
        pairs = [f"{hosts[host]['name']} is {rank_address(hosts[host])}" for host in good]
        text = f"own names mean addresses of their hosts: {fold(pairs)}"
        yield CheckResult("ok", "name", tuple(good), text)
