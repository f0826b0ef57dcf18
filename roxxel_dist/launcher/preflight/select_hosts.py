"""Before each attempt: which hosts are there, whether they are fit for the job, and which of them work."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.placement import working_hosts
from roxxel_dist.launcher.preflight.run import check_job_hosts
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool, Interrupted

RETRY_S = 2.0
TELL_S = 5.0
"""A longer wait is announced."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The hosts that work in an attempt, and the job as they do it."""

    hosts: tuple[str, ...]
    job: JobSpec
    note: str = ""
    """Which hosts are missing and which devices idle, for people; empty where all is as it was asked for."""

    @property
    def devices(self) -> int:
        """How many work; of a process 1 where only jax knows."""
        job = self.job
        own = job.gpus_per_host
        return job.nprocs * (job.devices_per_proc or 1) if own is None else own * len(self.hosts)


def assign(job: JobSpec, hosts: Sequence[str], present: Sequence[str]) -> Assignment:
    """The largest assignment to the hosts that are there: the most devices that divide every phase's batch.

    The global batch and the data stay the same; only how many devices share them changes. `hosts` are all hosts in rank
    order, the spare ones last; `present` are those that can be used now, in the same order, at least one.
    """
    working = working_hosts(job, hosts)
    if len(present) >= len(working):
        chosen = tuple(present[: len(working)])
        missing = [host for host in working if host not in present]
        instead = ", ".join(host for host in chosen if host not in working)
        note = f"going on without {', '.join(missing)}, with {instead} instead" if missing else ""
        return Assignment(hosts=chosen, job=job, note=note)
    procs = job.nprocs // len(working)
    devices = job.devices_per_proc  # of a process; 1 where only jax knows, so that whole processes are counted
    if devices is None:
        devices = job.gpus_per_host // procs if job.gpus_per_host is not None else 1
    most, used, share = 0, len(present), devices  # if nothing divides them, the program will say so
    for number in range(1, len(present) + 1):  # of as many devices those on fewer hosts: the network is what is slow
        for part in range(1, devices + 1):
            total = number * procs * part
            if total > most and not any(rows % total for rows in job.micro_batches):
                most, used, share = total, number, part
    smaller = replace(
        job,
        nprocs=used * procs,
        devices_per_proc=share if job.devices_per_proc is not None else None,
        gpus_per_host=share * procs if job.gpus_per_host is not None else None,
    )
    missing = ", ".join(host for host in hosts if host not in present)
    note = f"going on without {missing}: {used * procs * share} of {len(working) * procs * devices} devices"
    idle = {host: procs * (devices - share * (host in present[:used])) for host in present}
    if names := [f"{host} ({count})" for host, count in idle.items() if count]:
        note += f"; idle, because the batch of every phase must be a multiple of the devices: {', '.join(names)}"
    return Assignment(hosts=tuple(present[:used]), job=smaller, note=note)


class NotReadyError(Exception):
    """The hosts, or too many of them, cannot take the job. The message is for people, a line a reason.

    `unreachable`: some do not answer, so that other hosts would do.
    """

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class StoppedError(Exception):
    """The launcher was asked to stop; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class ReadyHosts:
    """The hosts that can start, and what they share."""

    assignment: Assignment
    coordinator: str
    """address:port of rank 0's coordinator, as all of them reach it."""
    visible: Mapping[str, str]
    """CUDA_VISIBLE_DEVICES of the hosts that have it."""
    cores: int | None
    """The most CPUs that a host had when the job began: the bits of a run do not change with its hosts."""
    lost: tuple[str, ...] = ()
    """The hosts that would give it the devices that it lacks, were they there."""


class HostSelector:
    """Looks at the hosts of a job before each of its attempts.

    Agents of the previous attempt are asked over their open connections; only a lost host gets a new one. A spare host
    at once replaces a host that is unreachable or unfit. Without spares every check must pass before the first attempt;
    later a host has `job.host_timeout` seconds before the job goes on without it, if it may.
    """

    def __init__(self, job: JobSpec, backend: Backend, signals: SignalPipe, screen: Console, pool: HostPool) -> None:
        self._job, self._backend, self._signals, self._screen, self._pool = job, backend, signals, screen, pool
        self._warnings: set[str] = set()
        self._cores: int | None = None
        self._set_aside: list[str] = []
        self.has_spare: bool = False
        """Whether a host was left over when hosts were selected last."""

    def grows_with(self, back: Sequence[str]) -> bool:
        """Whether the job would have more devices than it has since the last `select`, with these hosts."""
        hosts = tuple(self._backend.hosts)
        present = tuple(host for host in hosts if host in self._present or host in back)
        return assign(self._job, hosts, present).devices > self._assignment.devices

    def can_do_without(self, host: str) -> bool:
        """Whether enough hosts are left without this one: as many as work, or as `--min-hosts` asks for."""
        hosts = tuple(self._backend.hosts)
        left = len([other for other in hosts if other != host and other not in self._set_aside])
        least = len(working_hosts(self._job, hosts))
        return left >= (least if self._job.min_hosts is None else min(least, self._job.min_hosts))

    def set_aside(self, host: str) -> None:
        """Use this host only where there are too few others."""
        self._set_aside.append(host)

    def select(self, attempt: int, gone_by: Mapping[str, float] = MappingProxyType({})) -> ReadyHosts:
        """The hosts that start this attempt, when the ranks of lost ones have ended.

        A lost host that answers again tells of ranks that still run there. Of one that does not, they have ended by the
        time in `gone_by`: its agent has heard nothing for long.

        Raises:
            NotReadyError: there are too few.
            StoppedError: the launcher was asked to stop.
        """
        job, backend = self._job, self._backend
        hosts = tuple(backend.hosts)
        # Each attempt has a port of its own: a rank of the last one may live on behind a cut link.
        port = None if job.port is None else min(job.port + attempt, 65535)
        working = len(working_hosts(job, hosts))
        present, said = tuple(host for host in hosts if host not in self._set_aside), set[str]()
        assignment = assign(job, hosts, present)
        self._say([assignment.note] if assignment.note else [], said)
        is_retry = attempt > 0 or job.first_attempt > 0  # the job has run before: its hosts may need a moment
        deadline = max(time.monotonic() + (job.host_timeout if is_retry else 0), *gone_by.values(), 0.0)
        while True:
            self._pool.reach_anew()
            try:
                report = check_job_hosts(assignment.job, backend, assignment.hosts, port=port, pool=self._pool)
            except Interrupted:
                if numbers := self._signals.take():
                    raise StoppedError(numbers[0]) from None
                continue
            warnings = [result.text for result in report.findings if result.level == "warning"]
            self._say(warnings, self._warnings, "warning: ")
            if report.passed:
                self._cores = self._cores or report.cores
                self.has_spare = len(present) > working
                address = f"[{report.address}]" if ":" in report.address else report.address
                self._present, self._assignment = present, assignment
                self._wait_for_end({host: end for host, end in gone_by.items() if host not in assignment.hosts})
                missing = tuple(host for host in hosts if host not in present and host not in self._set_aside)
                missing = missing if self.grows_with(missing) else ()
                return ReadyHosts(assignment, f"{address}:{report.port}", report.visible, self._cores, missing)
            errors = {result.text: result.hosts for result in report.findings if result.level == "error"}
            errors |= {f"host {host} cannot be used: {why}": (host,) for host, why in report.unreachable.items()}
            to_blame = {blamed[0] for blamed in errors.values() if len(blamed) == 1}
            rest = tuple(host for host in present if host not in to_blame)
            is_replaced = rest != present and len(rest) >= working
            if not (is_replaced or self._set_aside) and time.monotonic() < deadline:
                self._say(errors, said)
                if numbers := self._signals.wait(RETRY_S):
                    raise StoppedError(numbers[0])
                continue
            may_shrink = is_retry and rest != present and job.min_hosts is not None and len(rest) >= job.min_hosts
            if self._set_aside and not is_replaced:  # one that is slow, or was lost, is better than none
                rest = tuple(host for host in hosts if host in rest or host in self._set_aside)
                self._set_aside.clear()
            elif not (is_replaced or may_shrink):
                raise NotReadyError("\n".join(errors), unreachable=bool(report.unreachable))
            present = rest
            assignment = assign(job, hosts, present)
            self._say([*errors, assignment.note], said)

    def _wait_for_end(self, gone_by: Mapping[str, float]) -> None:
        left_s = max(gone_by.values(), default=0.0) - time.monotonic()
        if left_s > TELL_S:
            hosts = ", ".join(gone_by)
            self._screen.info(f"waiting {left_s:.0f} s: by then the ranks on {hosts} have ended, cut off or not")
        if numbers := self._signals.wait(left_s):
            raise StoppedError(numbers[0])

    def _say(self, lines: Iterable[str], said: set[str], prefix: str = "") -> None:
        """Each thing once."""
        for line in lines:
            if line not in said:
                said.add(line)
                self._screen.info(prefix + line)
