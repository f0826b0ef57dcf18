"""Preflight before each start: are the hosts there, are they fit, and where do the ranks find each other?

The controller asks all hosts at once, in a few rounds: the agents that it starts there, or itself for this machine.
"""

import json
import os
import resource
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from roxxel_dist.launcher.host.probe import answer, is_called, own_name, place
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.spec import DeviceCheckMode, JobSpec, Limits
from roxxel_dist.launcher.preflight.checks import (
    CheckResult,
    Hosts,
    Questions,
    Requirements,
    are_one_machine,
    blame_each,
    fold,
    launcher_findings,
    merge_alike,
    name_findings,
    requirements_of,
    run_checks,
)
from roxxel_dist.launcher.preflight.devices import (
    DEVICE,
    NAMES,
    ROUNDS,
    Measured,
    collect,
    devices_made,
    excuse_all,
    figures,
    findings_of,
    slow_devices,
    unlike_hosts,
)
from roxxel_dist.launcher.preflight.network import Addresses, addresses, check_network
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import HostQuestions
from roxxel_dist.process.durable import state_dir, write_file

LOOPBACK = "127.0.0.1"
FILES, FILES_A_HOST = 64, 16
"""Open files of a launcher: three pipes a host, and the logs of up to eight ranks there."""
FILES_A_RANK, PROCESSES, PROCESSES_A_RANK = 8, 64, 4
"""Of a rank on this machine: its log, pipes and processes. Of a host, a client, and perhaps a ProxyCommand."""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The findings of preflight."""

    address: str = ""
    """The address of rank 0's coordinator, as the other hosts reach it; empty where there is none."""
    port: int = 0
    """Free there; 0 where there is none."""
    findings: Sequence[CheckResult] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Hosts that did not answer, and why; nothing else was checked on them."""
    starting: Sequence[str] = ()
    """Those of them that may still start, by the words of their servers."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """CUDA_VISIBLE_DEVICES of the hosts that have it (a scheduler sets it)."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """Which machine a host is: its start, and its network."""
    cores: int | None = None
    """The most CPUs that a host has, whatever a process may use of them."""

    @property
    def passed(self) -> bool:
        """Whether all hosts are there, and nothing is wrong with them."""
        return not self.unreachable and all(result.level != "error" for result in self.findings)

    @property
    def only_starts(self) -> bool:
        """Whether nothing speaks against a start but hosts that may still start themselves."""
        is_wrong = any(result.level == "error" for result in self.findings)
        return bool(self.starting) and not is_wrong and len(self.unreachable) == len(self.starting)

    @property
    def suspects(self) -> dict[str, str]:
        """The hosts whose devices did not pass, and why."""
        texts: dict[str, list[str]] = {}
        for result in self.findings:
            if result.suspect:
                texts.setdefault(result.hosts[0], []).append(result.text)
        return {host: "; ".join(found) for host, found in texts.items()}

    @property
    def problems(self) -> list[str]:
        """Reasons against a start, for people: each cause once."""
        gone = [
            CheckResult("error", "host", (host,), f"host {host} cannot be used: {why}")
            for host, why in self.unreachable.items()
        ]
        errors = [result for result in self.findings if result.level == "error"]
        return [text for _, _, text in merge_alike([*errors, *gone])]

    def covers(self, hosts: Sequence[str]) -> bool:
        """Whether these are among its hosts, with the same first one."""
        return self.machines.keys() >= {*hosts} and next(iter(self.machines), None) == hosts[0]

    def blamed(self, trusted: Collection[str] = ()) -> frozenset[str]:
        """The hosts without which the others may pass, as far as it is known; see `CheckResult.blamed`."""
        known = frozenset(trusted)
        errors = [result.blamed(known) for result in self.findings if result.level == "error"]
        return frozenset(self.unreachable).union(*errors)


@dataclass(kw_only=True)
class DeviceChecks:
    """The checks of accelerators of one job, from one attempt to the next.

    Args:
        mode: whether devices are checked; auto: those of hosts with GPUs or TPUs.
        command: the user's command, which runs on each host, if there is one.
        pending: hosts that are to be checked before they start.
        env: variables of the programs on the hosts.
        simulated: devices of a host, where they are simulated.
    """

    mode: DeviceCheckMode
    command: str | None
    pending: set[str]
    env: Mapping[str, str] = field(default_factory=dict)
    simulated: int | None = None
    lists: bool = False
    """Whether jax makes its devices on each host, also on those whose devices are not checked."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """The devices by host: the next ones are compared with them."""
    failed: dict[str, list[CheckResult]] = field(default_factory=dict)
    """What was found on hosts that did not pass."""
    passed: set[str] = field(default_factory=set)
    """Hosts that passed in this process."""

    @property
    def asks_anything(self) -> bool:
        """Whether any host can be asked something. On this machine that is known before."""
        return bool(self.pending) and (self.mode != "off" or self.command is not None)

    def question(self, host: str) -> dict[str, Any] | None:
        """The question to a host; None if there is none."""
        if not self.asks_anything or host not in self.pending:
            return None
        asked = {"mode": self.mode, "command": self.command, "env": dict(self.env), "devices": self.simulated}
        return asked | ({"lists": True} if self.lists and self.mode != "off" else {})

    def check(self, questions: Questions, hosts: Sequence[str], started: Sequence[str]) -> list[CheckResult]:
        """Check these hosts; `started`: those that run their checks by now."""
        answers = collect(questions, started)
        results: dict[str, list[CheckResult]] = {host: [] for host in started}
        for host, reply in answers.items():
            results[host] += findings_of(host, reply)
            if "devices" in reply.get("devices", {}):
                self.measured[host] = figures(reply["devices"])
        for result in unlike_hosts(self.measured, list(answers)):
            results[result.hosts[0]].append(result)
        measured = [host for host in answers if host in self.measured and not results[host]]
        for host, found in self._slow(questions, measured).items():
            results[host] += found
        if not self.lists:
            excuse_all(results, answers)
        for host in answers:
            self.pending.discard(host)
            if any(result.suspect for result in results[host]):
                self.failed[host] = results[host]
                self.measured.pop(host, None)
            else:
                self.failed.pop(host, None)
                self.passed.add(host)
        known = [result for host in hosts if host not in results for result in self.failed.get(host, ())]
        found = [result for host in results for result in results[host]]
        good = [host for host in measured if not results[host]]
        made = devices_made(answers) if self.lists else []
        return [*found, *known, *made, *([self._good(good)] if good else [])]

    def _slow(self, questions: Questions, hosts: Sequence[str]) -> dict[str, list[CheckResult]]:
        """The slow devices of these hosts, which are all measured again before one of them is named."""
        doubtful = slow_devices(hosts, self.measured, 0.5)
        for _ in range(ROUNDS - 1):
            if not doubtful:
                break
            asked = {"mode": "on", "command": None, "env": dict(self.env), "devices": self.simulated}
            replies = questions.ask({host: {"ask": "checks", "checks": asked} for host in hosts})
            for host, reply in collect(questions, list(replies)).items():
                if reply.get("devices", {}).get("devices"):
                    self.measured[host].merge(figures(reply["devices"]))
            doubtful = slow_devices(list(doubtful), self.measured, 0.5)
        return slow_devices(list(doubtful), self.measured)

    def _good(self, hosts: Sequence[str]) -> CheckResult:
        times = [self.measured[host].times for host in hosts]
        worst = {
            work: max((value for one in times for (_, name), value in one.items() if name == work), default=0.0)
            for work in NAMES
        }
        count = sum(len({place for place, _ in one if place >= 0}) for one in times)
        figures_of = ", ".join(f"{NAMES[work]} {value:.1f} ms" for work, value in worst.items() if value)
        right = "1 device is right" if count == 1 else f"{count} devices are right, and alike"
        text = f"{right}; the slowest: {figures_of}"
        return CheckResult("ok", DEVICE, tuple(hosts), text)


def checks_of(job: JobSpec, hosts: Sequence[str], working: int) -> DeviceChecks:
    """The checks that a job asks of its hosts, of which so many work; all of them are to be checked."""
    simulated = None if job.devices_per_proc is None else job.devices_per_proc * (job.nprocs // working)
    env = {**({"JAX_PLATFORMS": "cpu"} if simulated else {}), **job.env}  # as that of a rank, beside the host's own
    return DeviceChecks(mode=job.check_devices, command=job.preflight, pending={*hosts}, env=env, simulated=simulated)


def is_wanted_here(checks: DeviceChecks | None) -> bool:
    """Whether this machine has something to check."""
    if checks is None or not checks.asks_anything:
        return False
    nodes = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
    return checks.command is not None or checks.mode == "on" or any(map(glob, nodes))


def check_job_hosts(
    job: JobSpec,
    backend: Backend,
    hosts: Sequence[str],
    *,
    port: int | None,
    pool: HostPool | None = None,
    busy: Collection[str] = (),
    devices: DeviceChecks | None = None,
    known: PreflightReport | None = None,
) -> PreflightReport:
    """Check the hosts of a job, in the order of the ranks; see `check_hosts`."""
    is_here = backend.is_local and len(hosts) == 1
    if is_here and (problem := allow_hosts(1, job.nprocs)):
        return PreflightReport(findings=[CheckResult("error", "limits", tuple(hosts), problem)])
    requirements = requirements_of(job, backend.environment, writes=is_here)
    if len(hosts) == 1:  # nothing to compare it with, and `train` says itself what it cannot read
        requirements = replace(requirements, data_path=None, compare=not is_here)
    if backend.is_local:  # `launch` has looked before it made the job
        requirements = replace(requirements, jax=None)
    return check_hosts(requirements, backend, hosts, port=port, pool=pool, busy=busy, devices=devices, known=known)


def check_hosts(
    requirements: Requirements,
    backend: Backend,
    hosts: Sequence[str],
    *,
    port: int | None = None,
    pool: HostPool | None = None,
    busy: Collection[str] = (),
    devices: DeviceChecks | None = None,
    known: PreflightReport | None = None,
) -> PreflightReport:
    """Check hosts, and choose where the first one's coordinator shall listen: at `port`, or at a free one.

    Agents that are started for it stay in `pool`; without one they end. Ranks of the job run on hosts that are `busy`:
    what these hold will be free before a start. `devices`: which accelerators are checked too. `known`: what was found
    on these hosts, which have worked together since: whether they reach each other, and the run directory, is not asked
    anew where they are the same machines. Raises Interrupted where the pool is woken.
    """
    with ExitStack() as held:
        is_waiting = pool is not None and is_wanted_here(devices)  # for seconds, in which somebody may press Ctrl-C
        if backend.is_local and len(hosts) == 1 and not is_waiting:
            questions: Questions = _ThisMachine(held)
            known = None
        elif problem := allow_hosts(len(hosts)):
            return PreflightReport(findings=[CheckResult("error", "limits", tuple(hosts), problem)])
        else:
            requirements = replace(requirements, distinct=not backend.same_machine)
            questions = HostQuestions(pool or held.enter_context(HostPool(backend)))
        checks = {host: devices.question(host) for host in hosts} if devices is not None else {}
        asked = asdict(requirements)
        infos = questions.ask({host: {"ask": "facts", **asked, "checks": checks.get(host)} for host in hosts})
        for info in infos.values():
            info.pop("fill", None)
        for host in [host for host in infos if "why" in infos[host]]:
            questions.unreachable[host] = infos.pop(host)["why"]
        if not infos:
            return PreflightReport(unreachable=dict(questions.unreachable), starting=tuple(questions.starting))
        for host in infos.keys() & busy:
            infos[host]["tpu_lock"] = None
        findings = run_checks(requirements, infos)
        if requirements.distinct and not backend.is_by_ssh:  # ssh knows its hosts by their keys
            near = [host for host, info in infos.items() if info["place"] == place()]
            findings += launcher_findings([host for host in near if not is_called(host)])
        machines = {host: info["machine"] for host, info in infos.items()}
        if known is not None and not machines.items() <= known.machines.items():
            known = None
        address, free, more = _place_of_coordinator(requirements, backend, questions, infos, port, known)
        findings += more
        if requirements.shared and len(infos) > 1 and known is None:
            findings += _shared(questions, list(infos), requirements.run_dir)
        has_checks = [host for host in infos if infos[host].get("checks")]
        if devices is not None and (has_checks or infos.keys() & devices.failed):  # last: they have run meanwhile
            findings += devices.check(questions, list(infos), has_checks)
        return PreflightReport(
            address=address,
            port=free,
            findings=findings,
            unreachable=dict(questions.unreachable),
            starting=tuple(questions.starting),
            visible={host: info["visible"] for host, info in infos.items() if info["visible"] is not None},
            machines=machines,
            cores=max(info["cores"] for info in infos.values()),
        )


def _place_of_coordinator(
    requirements: Requirements,
    backend: Backend,
    questions: Questions,
    infos: Hosts,
    port: int | None,
    known: PreflightReport | None,
) -> tuple[str, int, list[CheckResult]]:
    """The address and the port (0: none) of the first host that the others reach, and the findings."""
    first, address, free = next(iter(infos)), backend.address or LOOPBACK, port or 0
    places, findings = Addresses(coordinators=[address]), list[CheckResult]()
    if known is not None:
        places = Addresses(coordinators=[known.address])
    elif not are_one_machine(infos):
        places = addresses(questions, requirements, infos)
    elif address != LOOPBACK:  # rank 0 is on another machine, or where another machine reaches it
        findings += name_findings(requirements, {first: infos[first] | own_name()})
    if not backend.is_coordinator:
        return address, free, findings
    if known is not None:  # whoever listens there has been reached
        asked = {first: {"ask": "listen", "places": [(known.address, free)], "nonce": ""}}
        ports = questions.ask(asked).get(first, {}).get("ports", ())
        if free := next((number for number in ports if isinstance(number, int)), 0):
            return known.address, free, findings
    address, free, more = check_network(questions, infos, places, port)
    return address, free, findings + more


class _ThisMachine:
    """Asked as hosts are, but without an agent: nothing is as fast."""

    def __init__(self, held: ExitStack) -> None:
        self.unreachable: dict[str, str] = {}
        self.starting: Sequence[str] = ()
        self._held = held

    def ask(self, questions: Mapping[str, Message]) -> dict[str, Message]:
        return {host: answer(question, self._held, Limits()) for host, question in questions.items()}


def _shared(questions: Questions, hosts: Sequence[str], run_dir: str | None) -> list[CheckResult]:
    """Whether a file that the first host makes in the run directory is there for all."""
    first, *others = hosts
    file = questions.ask({first: {"ask": "touch", "run_dir": run_dir}}).get(first, {})
    if "name" not in file:  # the check of the disk says why
        return []
    answers = questions.ask({host: {"ask": "see", "run_dir": run_dir, "name": file["name"]} for host in others})
    blind = [host for host, said in answers.items() if not said.get("seen")]
    if not blind:
        return [CheckResult("ok", "run directory", tuple(hosts), f"{run_dir} is the same folder on {fold(hosts)}")]
    text = (
        f"{run_dir} on {fold(blind)} is not the folder that {first} has: checkpoints need one that all hosts share; "
        "name one on a file system that all have mounted with --run_dir"
    )
    return [CheckResult("error", "run directory", tuple(blind), text, blame_each(hosts, blind))]


def allow_hosts(hosts: int, ranks: int = 0) -> str:
    """Raise this process's own limits of open files and processes where they are too low for so many hosts, or for
    ranks on this one; if they may not be so high, which it is and what raises it, else ""."""
    limits = (
        (resource.RLIMIT_NOFILE, "open files", "n", "nofile", FILES + FILES_A_HOST * hosts + FILES_A_RANK * ranks),
        (resource.RLIMIT_NPROC, "processes", "u", "nproc", PROCESSES + 2 * hosts + PROCESSES_A_RANK * ranks),
    )
    for kind, what, letter, name, needed in limits:
        soft, hard = resource.getrlimit(kind)
        is_free = soft == resource.RLIM_INFINITY or (kind == resource.RLIMIT_NPROC and os.geteuid() == 0)
        if is_free or soft >= needed:
            continue
        with suppress(ValueError, OSError):  # the kernel has a lower limit
            resource.setrlimit(kind, (hard, hard))
        allowed = resource.getrlimit(kind)[0]
        if allowed != resource.RLIM_INFINITY and allowed < needed:
            return (
                f"{f'{ranks} ranks' if ranks else f'{hosts} hosts'} need up to {needed} {what} here, and this machine "
                f"allows {allowed} (`ulimit -H{letter}`): raise the limit (`sudo prlimit --pid $$ --{name}={needed}`), "
                f"or use fewer {'ranks' if ranks else 'hosts'}"
            )
    return ""


FAILURE_KEPT_S = 24 * 3600.0
"""Hosts whose devices did not pass are remembered for a day, so that the next jobs of this user do without them: a file
for each, in a folder for each cluster, beside the index of jobs. What cannot be written is not remembered."""
ALL_HOSTS = "all"


def _file(backend: Backend, host: str) -> Path:
    """The file of a failed host of a cluster. Raises FileNotFoundError where this user has no home."""
    kind = type(backend).__name__.removesuffix("Backend").lower() + f"-{backend.cluster}" * bool(backend.cluster)
    return state_dir().parent / "failed-hosts" / kind / f"{quote(host, safe='')}.json"


def known_failures(backend: Backend) -> dict[str, str]:
    """The hosts of a backend that failed within the last day, and why."""
    found: dict[str, str] = {}
    for host in backend.hosts:
        with suppress(OSError, ValueError, TypeError, KeyError):
            value = json.loads(_file(backend, host).read_text(encoding="utf-8"))
            if 0 <= time.time() - float(value["time"]) < FAILURE_KEPT_S:
                found[host] = str(value["why"])
    return found


def remember_failure(backend: Backend, host: str, why: str) -> None:
    """Note that a host failed now. There is nothing to remember of this machine: it has no other in its place."""
    if backend.is_local:
        return
    with suppress(OSError):
        path = _file(backend, host)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, json.dumps({"time": time.time(), "why": why}) + "\n", sync=False)


def forget_failures(backend: Backend, hosts: Collection[str]) -> None:
    """Note that hosts are good again."""
    for host in hosts:
        with suppress(OSError):
            _file(backend, host).unlink()


def forget_failures_of_user(names: Sequence[str]) -> list[str]:
    """Forget hosts of every cluster, or all hosts; returns those that were known."""
    gone: list[str] = []
    with suppress(FileNotFoundError):
        for path in sorted((state_dir().parent / "failed-hosts").glob("*/*.json")):
            host = unquote(path.stem)
            if host in names or list(names) == [ALL_HOSTS]:
                with suppress(OSError):
                    path.unlink()
                    gone.append(host)
    return gone
