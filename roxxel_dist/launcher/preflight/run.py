"""Before each start: are the hosts there, are they fit, and where do the ranks find each other?

The controller asks all hosts at once, in a few rounds: the agents that it starts there, or itself for this machine.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.preflight.checks import (
    CheckResult,
    Requirements,
    are_one_machine,
    named,
    own_names,
    requirements_of,
    run_checks,
)
from roxxel_dist.launcher.preflight.host_info import hash_of_code, own_name
from roxxel_dist.launcher.preflight.probe import answer
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.protocol import Message

LOOPBACK = "127.0.0.1"
FILES, FILES_A_HOST = 64, 16
"""Open files of a launcher: three pipes a host, and the logs of up to eight ranks there."""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What preflight found."""

    address: str = ""
    """Where rank 0's coordinator shall listen, as the other hosts reach it; empty where there is no such place."""
    port: int = 0
    """Free there; 0 where there is none."""
    findings: Sequence[CheckResult] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Hosts that did not answer, and why; nothing else was checked on them."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """CUDA_VISIBLE_DEVICES of the hosts that have it (a scheduler sets it)."""
    cores: int | None = None
    """The most CPUs that a host has, whatever a process may use of them."""

    @property
    def passed(self) -> bool:
        """Whether all hosts are there, and nothing is wrong with them."""
        return not self.unreachable and all(result.level != "error" for result in self.findings)


def check_job_hosts(
    job: JobSpec, backend: Backend, hosts: Sequence[str], *, port: int | None, pool: HostPool | None = None
) -> PreflightReport:
    """Check the hosts of a job, in the order of the ranks; see `check_hosts`."""
    is_here = backend.is_local and len(hosts) == 1
    requirements = requirements_of(job, backend.environment, writes=is_here)
    if len(hosts) == 1:  # nothing to compare it with, and `train` says itself what it cannot read
        requirements = replace(requirements, data_path=None, compare=not is_here)
    return check_hosts(requirements, backend, hosts, port=port, pool=pool)


def check_hosts(
    requirements: Requirements,
    backend: Backend,
    hosts: Sequence[str],
    *,
    port: int | None = None,
    pool: HostPool | None = None,
) -> PreflightReport:
    """Check hosts, and choose where the first one's coordinator shall listen: at `port`, or at a free one.

    Agents that are started for it stay in `pool`; without one they end. Raises Interrupted where the pool is woken.
    """
    with ExitStack() as held:
        if backend.is_local and len(hosts) == 1:
            return _check(requirements, backend, hosts, port, _ThisMachine(held))
        if problem := allow_open_files(len(hosts)):
            return PreflightReport(findings=[CheckResult("error", "open files", tuple(hosts), problem)])
        requirements = replace(requirements, code=hash_of_code())
        return _check(requirements, backend, hosts, port, pool or held.enter_context(HostPool(backend)))


class _ThisMachine:
    """Asked as a pool is, but without an agent: nothing is as fast."""

    def __init__(self, held: ExitStack) -> None:
        self.unreachable: dict[str, str] = {}
        self._held = held

    def ask(self, questions: Mapping[str, Message]) -> dict[str, Message]:
        return {host: answer(question, self._held) for host, question in questions.items()}


Pool = HostPool | _ThisMachine


def _check(
    requirements: Requirements, backend: Backend, hosts: Sequence[str], port: int | None, pool: Pool
) -> PreflightReport:
    infos = pool.ask({host: {"ask": "facts", **asdict(requirements)} for host in hosts})
    for host in [host for host in infos if "why" in infos[host]]:
        pool.unreachable[host] = infos.pop(host)["why"]
    if not infos:
        return PreflightReport(unreachable=dict(pool.unreachable))
    first, *others = infos
    findings = run_checks(requirements, infos)
    address = backend.address or LOOPBACK
    if not are_one_machine(infos):  # that by which the first host reaches the second
        other = next(host for host in others if infos[host]["machine"] != infos[first]["machine"])
        towards = [infos[other]["ssh_address"], other.rpartition("@")[2], *infos[other]["resolves"]]
        route = pool.ask({first: {"ask": "address", "towards": [name for name in towards if name]}})
        address = route.get(first, {}).get("address") or ""
    elif address != LOOPBACK:  # rank 0 is on another machine, or where another machine reaches it
        findings += own_names(requirements, {first: infos[first] | own_name()})
    free, more = _port(pool, list(infos), address, port) if backend.is_coordinator else (port or 0, [])
    findings += more
    if requirements.shared and others:
        findings += _shared(pool, list(infos), requirements.run_dir)
    return PreflightReport(
        address=address,
        port=free,
        findings=findings,
        unreachable=dict(pool.unreachable),
        visible={host: info["visible"] for host, info in infos.items() if info["visible"] is not None},
        cores=max(info["cores"] for info in infos.values()),
    )


def _port(pool: Pool, hosts: Sequence[str], address: str, port: int | None) -> tuple[int, list[CheckResult]]:
    """A port of the first host that all others reach; 0 where it is taken."""
    first, *others = hosts
    if not address:
        text = (
            f"{first} has no way to {others[0]}: neither the address of its ssh connection nor its name leads there; "
            "have both in one network, and their names in DNS or /etc/hosts"
        )
        return 0, [CheckResult("error", "port", tuple(hosts), text)]
    here = {"address": address, "nonce": os.urandom(16).hex()}
    held = pool.ask({first: {"ask": "listen", "port": port or 0, **here}}).get(first, {"why": "no answer"})
    if "why" in held:
        problem = f"--port {port}: cannot be used" if port else "a free port cannot be had"
        text = f"{first}: {problem} on {address} ({held['why']}); leave --port out to take a free one, or give another"
        return 0, [CheckResult("error", "port", (first,), text)]
    answers = pool.ask({host: {"ask": "connect", "port": held["port"], **here} for host in others})
    place, results = f"{address}:{held['port']}", []
    for host in (host for host in answers if "why" in answers[host]):
        text = (
            f"{host} does not reach {first} at {place} ({answers[host]['why']}): let the firewall of {first} pass TCP "
            "between the hosts (all ports: ranks choose theirs), or choose one that is open with --port"
        )
        results.append(CheckResult("error", "port", (host, first), text))
    if not results and len(answers) == len(others):
        slowest = max((said["ms"] for said in answers.values()), default=0)
        reached = f", reached from {named(others)} within {slowest:.1f} ms" if others else ""
        results.append(CheckResult("ok", "port", tuple(hosts), f"{first} listens on {place}{reached}"))
    return held["port"], results


def _shared(pool: Pool, hosts: Sequence[str], run_dir: str | None) -> list[CheckResult]:
    """Whether a file that the first host makes in the run directory is there for all."""
    first, *others = hosts
    file = pool.ask({first: {"ask": "touch", "run_dir": run_dir}}).get(first, {})
    if "name" not in file:  # the check of the disk says why
        return []
    answers = pool.ask({host: {"ask": "see", "run_dir": run_dir, "name": file["name"]} for host in others})
    blind = [host for host, said in answers.items() if not said.get("seen")]
    if not blind:
        return [CheckResult("ok", "run directory", tuple(hosts), f"{run_dir} is the same folder on {named(hosts)}")]
    text = (
        f"{run_dir} on {named(blind)} is not the folder that {first} has: checkpoints need one that all hosts share; "
        "name one on a file system that all have mounted with --run_dir"
    )
    return [CheckResult("error", "run directory", tuple(blind), text)]


def allow_open_files(hosts: int) -> str:
    """Raise this process's own limit of open files as far as it may; why it is too low for so many hosts, or ""."""
    needed = FILES + FILES_A_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # what is counted here is the least
        with suppress(ValueError, OSError):  # the kernel has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return allow_open_files(hosts)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return ""
    if hard != resource.RLIM_INFINITY and hard < needed:
        return (
            f"{hosts} hosts need up to {needed} open files here, and this machine allows {hard} (`ulimit -Hn`): "
            f"raise the limit, or use fewer hosts"
        )
    return ""
