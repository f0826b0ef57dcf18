"""Before each start: are the hosts there, are they fit, and where do the ranks find each other?

The controller starts an agent on every host, and asks all at once, in a few rounds. `check_job_hosts` is for
a job, `check_hosts` for whoever only wants to know.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.placement import coordinator_port
from roxxel_dist.launcher.preflight import host_info
from roxxel_dist.launcher.preflight.checks import (
    CheckResult,
    Hosts,
    Requirements,
    are_one_machine,
    check_result,
    named,
    own_names,
    requirements_of,
    run_checks,
)
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.protocol import Message

LOOPBACK = "127.0.0.1"
FILES, FILES_A_HOST = 64, 16
"""Open files of a launcher: three pipes a host, and the logs of up to eight ranks there."""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What preflight found."""

    address: str
    """Where rank 0's coordinator shall listen, as the other hosts reach it; empty where there is no such place."""
    port: int
    """Free there; 0 where there is none."""
    findings: tuple[CheckResult, ...]
    unreachable: Mapping[str, str]
    """Hosts that did not answer, and why; nothing else was checked on them."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """CUDA_VISIBLE_DEVICES of the hosts that have it (a scheduler sets it)."""
    cores: int | None = None
    """The most CPUs that a host has, whatever a process may use of them."""

    @property
    def passed(self) -> bool:
        """Whether all hosts are there, and nothing is wrong with them."""
        return not self.unreachable and all(check_result.level != "error" for check_result in self.findings)


def check_job_hosts(
    job: JobSpec,
    backend: Backend,
    hosts: Sequence[str],
    *,
    port: int | None,
    wake: int | None = None,
    pool: HostPool | None = None,
) -> PreflightReport:
    """Check the hosts of a job, and choose the address of its coordinator.

    Args:
        job: what shall run.
        backend: how hosts are reached.
        hosts: those that shall be used, in the order of the ranks.
        port: of the coordinator; None takes a free one.
        wake: a descriptor; when it can be read, the questions end.
        pool: asks the hosts, and keeps what it has started there; by default nothing stays.

    Raises:
        Interrupted: `wake` can be read.
    """
    if _is_here(backend, hosts):
        return _here(requirements_of(job, backend.environment, writes=True), backend, hosts, port, compare=False)
    wanted = requirements_of(job, backend.environment, writes=False)
    if len(hosts) == 1:  # nothing to compare it with, and `train` says itself what it cannot read
        wanted = replace(wanted, data_path=None)
    if pool is not None:
        return _there(wanted, pool, hosts, port)
    with HostPool(backend, wake) as own:
        return _there(wanted, own, hosts, port)


def check_hosts(
    wanted: Requirements, backend: Backend, hosts: Sequence[str], *, port: int | None = None
) -> PreflightReport:
    """As `check_job_hosts`, where there is no job: all that can be known of each host."""
    if _is_here(backend, hosts):
        return _here(wanted, backend, hosts, port, compare=True)
    with HostPool(backend) as pool:
        return _there(wanted, pool, hosts, port)


def _is_here(backend: Backend, hosts: Sequence[str]) -> bool:
    return len(hosts) == 1 and backend.is_local


def _question(wanted: Requirements, *, compare: bool) -> Message:
    return {
        "ask": "facts",
        "run_dir": wanted.run_dir,
        "run_id": wanted.run_id,
        "data_path": wanted.data_path,
        "resume": wanted.resume,
        "compare": compare,
    }


def _here(
    wanted: Requirements, backend: Backend, hosts: Sequence[str], port: int | None, *, compare: bool
) -> PreflightReport:
    """What is known of this machine, without an agent: nothing is as fast."""
    told = host_info.gather(_question(wanted, compare=compare))
    found = run_checks(wanted, {hosts[0]: told})
    address, free = backend.address or LOOPBACK, 0
    if address != LOOPBACK:  # rank 0 is on another machine, or where another machine reaches it
        found += own_names(wanted, {hosts[0]: told | host_info.own_name()})
    if not backend.is_coordinator:
        return PreflightReport(address=address, port=port or 0, findings=tuple(found), unreachable={})
    try:
        free = coordinator_port(port, address)
        found.append(check_result("ok", "port", hosts, f"{free} is free on {address}"))
    except ValueError as error:
        found.append(check_result("error", "port", hosts, str(error)))
    return PreflightReport(address=address, port=free, findings=tuple(found), unreachable={})


def _there(wanted: Requirements, pool: HostPool, hosts: Sequence[str], port: int | None) -> PreflightReport:
    if problem := allow_open_files(len(hosts)):
        return PreflightReport(
            address="", port=0, findings=(check_result("error", "open files", hosts, problem),), unreachable={}
        )  # fmt: skip
    told = _facts(pool, hosts, _question(wanted, compare=True))
    found = run_checks(replace(wanted, code=host_info.hash_of_code()), told) if told else []
    address = _address(pool, told) if told else ""
    free = 0
    if address:
        free, more = _port(pool, list(told), address, port)
        found += more
    elif told:
        found.append(_no_address(list(told)))
    if wanted.shared and len(told) > 1:
        found += _shared(pool, list(told), wanted.run_dir)
    return PreflightReport(
        address=address,
        port=free,
        findings=tuple(found),
        unreachable=dict(pool.gone),
        visible={host: info["visible"] for host, info in told.items() if info["visible"] is not None},
        cores=max((info["cores"] for info in told.values()), default=None),
    )


def allow_open_files(hosts: int) -> str:
    """Raise this process's own limit of open files to what so many hosts need; why that is not possible, or ""."""
    needed = FILES + FILES_A_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    if hard != resource.RLIM_INFINITY and hard < needed:
        return (
            f"{hosts} hosts need up to {needed} open files here, and this machine allows {hard} (`ulimit -Hn`): "
            f"raise the limit, or use fewer hosts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return ""


def _facts(pool: HostPool, hosts: Sequence[str], question: Message) -> Hosts:
    """What the hosts say about themselves."""
    told = {}
    answers = pool.ask(dict.fromkeys(hosts, question))
    for host in hosts:
        if answer := answers.get(host):
            if "why" in answer:
                pool.gone[host] = answer["why"]
            else:
                told[host] = answer
    return told


def _address(pool: HostPool, told: Hosts) -> str:
    """The address by which the first host reaches the second; empty where that is not known."""
    first, *others = told
    if are_one_machine(told):
        return LOOPBACK
    machine = told[first]["machine"]
    other = next(host for host in others if told[host]["machine"] != machine)
    towards = [told[other]["ssh_address"], other.rpartition("@")[2], *told[other]["resolves"]]
    answer = pool.ask({first: {"ask": "address", "towards": [name for name in towards if name]}})
    return answer.get(first, {}).get("address") or ""


def _no_address(hosts: Sequence[str]) -> CheckResult:
    first, second, *_ = (*hosts, "the other hosts")
    text = (
        f"{first} has no way to {second}: neither the address of its ssh connection nor its name leads there; have "
        "both in one network, and their names in DNS or /etc/hosts"
    )
    return check_result("error", "port", hosts, text)


def _port(pool: HostPool, hosts: Sequence[str], address: str, port: int | None) -> tuple[int, list[CheckResult]]:
    """A port of the first host that all others reach; 0 where it is taken."""
    first, *others = hosts
    here = {"address": address, "nonce": os.urandom(16).hex()}
    answer = pool.ask({first: {"ask": "listen", "port": port or 0, **here}}).get(first, {"why": "no answer"})
    if "port" not in answer:
        asked = f"--port {port}" if port else "a free port"
        text = f"{first}: {asked} cannot be had on {address} ({answer['why']}); give another --port, or leave it out"
        return 0, [check_result("error", "port", [first], text)]
    free = int(answer["port"])
    question = {"ask": "reach", "port": free, **here}
    answers = pool.ask(dict.fromkeys(others, question))
    found = []
    for host, said in answers.items():
        if "why" in said:
            text = (
                f"{host} does not reach {first} at {address}:{free} ({said['why']}): let the firewall of {first} pass "
                f"TCP between the hosts (all ports: ranks choose theirs), or choose one that is open with --port"
            )
            found.append(check_result("error", "port", [host, first], text))
    reached = [said["ms"] for said in answers.values() if "ms" in said]
    if len(reached) == len(others):
        slowest = f", reached from {named(others)} within {max(reached):.1f} ms" if reached else ""
        found.append(check_result("ok", "port", hosts, f"{first} listens on {address}:{free}{slowest}"))
    return free, found


def _shared(pool: HostPool, hosts: Sequence[str], run_dir: str | None) -> list[CheckResult]:
    """Whether a file that the first host makes in the run directory is there for all."""
    first, *others = hosts
    made = pool.ask({first: {"ask": "touch", "run_dir": run_dir}}).get(first, {})
    if "name" not in made:  # the check of the disk says why
        return []
    answers = pool.ask({host: {"ask": "see", "run_dir": run_dir, "name": made["name"]} for host in others})
    blind = [host for host, said in answers.items() if not said.get("seen")]
    if not blind:
        return [check_result("ok", "run directory", hosts, f"{run_dir} is the same folder on {named(hosts)}")]
    text = (
        f"{run_dir} on {named(blind)} is not the folder that {first} has: checkpoints need one that all hosts share; "
        "name one on a file system that all have mounted with --run_dir"
    )
    return [check_result("error", "run directory", blind, text)]
