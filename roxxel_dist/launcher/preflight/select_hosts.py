"""Before each attempt: which hosts are there, whether they are fit for the job, and which of them work."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.preflight.run import Interrupted, PreflightReport, look
from roxxel_dist.launcher.spec import JobSpec, working_hosts

AGAIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The hosts that work in an attempt, and the job as they do it."""

    hosts: tuple[str, ...]
    job: JobSpec
    note: str = ""
    """Which hosts are missing and which devices idle, for people; empty where all is as it was asked for."""


def assign(job: JobSpec, hosts: Sequence[str], present: Sequence[str]) -> Assignment:
    """The largest assignment to the hosts that are there: the most devices that divide every phase's batch.

    The global batch and the data stay the same; only how many devices share them changes.

    Args:
        job: as it was asked for, on all of `hosts`.
        hosts: all hosts, in rank order, the spare ones last.
        present: those that can be used now, in the same order; at least one.
    """
    working = working_hosts(job, hosts)
    if len(present) >= len(working):
        chosen = tuple(present[: len(working)])
        gone = [host for host in working if host not in present]
        instead = ", ".join(host for host in chosen if host not in working)
        note = f"going on without {', '.join(gone)}, with {instead} instead" if gone else ""
        return Assignment(hosts=chosen, job=job, note=note)
    procs = job.nprocs // len(working)
    devices = _devices_per_process(job, procs)
    count, used = max(
        (
            (number * procs * some, number)
            for number in range(1, len(present) + 1)
            for some in range(1, devices + 1)
            if not any(rows % (number * procs * some) for rows in job.micro_batches)
        ),
        default=(len(present) * procs * devices, len(present)),  # the program itself will say why it cannot be
        key=lambda choice: (choice[0], -choice[1]),  # few hosts, each with many devices: the network is what is slow
    )
    share = count // (used * procs)
    smaller = replace(
        job,
        nprocs=used * procs,
        devices_per_proc=share if job.devices_per_proc is not None else None,
        gpus_per_host=share * procs if job.gpus_per_host is not None else None,
    )
    missing = [host for host in hosts if host not in present]
    note = f"going on without {', '.join(missing)}: {count} of {len(working) * procs * devices} devices"
    idle = [f"{host} ({procs * devices})" for host in present[used:]]
    if share < devices:
        idle += [f"{host} ({procs * (devices - share)})" for host in present[:used]]
    if idle:
        note += f"; idle, because every phase's batch must divide by the devices: {', '.join(idle)}"
    return Assignment(hosts=tuple(present[:used]), job=smaller, note=note)


def _devices_per_process(job: JobSpec, procs: int) -> int:
    """As far as the command line tells; 1 where only jax knows, so that whole processes are counted."""
    if job.devices_per_proc is not None:
        return job.devices_per_proc
    return job.gpus_per_host // procs if job.gpus_per_host is not None else 1


class NotReadyError(Exception):
    """The hosts, or too many of them, cannot take the job. The message is for people, a line a reason."""

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable
        """Whether some do not answer, so that other hosts would do."""


class StoppedError(Exception):
    """Somebody asked the launcher to stop; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, kw_only=True)
class ReadyHosts:
    """The hosts that can start, and what they share."""

    assignment: Assignment
    coordinator: str
    """address:port of rank 0's coordinator, as all of them reach it."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """CUDA_VISIBLE_DEVICES of the hosts that have it."""
    cores: int | None = None
    """The most CPUs that a host had when the job began: the bits of a run do not change with its hosts."""


class HostSelector:
    """Looks at the hosts of a job before each of its attempts.

    A spare host takes the place of one that is out of reach, or not fit, at once. Where there is none, everything must
    be as it should the first time; later a host has `job.host_timeout` seconds before the job goes on without it, if it
    may.
    """

    def __init__(self, job: JobSpec, backend: Backend, signals: SignalPipe, screen: Console) -> None:
        self._job = job
        self._backend = backend
        self._signals = signals
        self._screen = screen
        self._warned: set[str] = set()
        self._cores: int | None = None

    def select(self, attempt: int) -> ReadyHosts:
        """Those who start this attempt.

        Raises:
            NotReadyError: there are too few.
            StoppedError: somebody asked the launcher to stop.
        """
        hosts = tuple(self._backend.hosts)
        chosen = Assignment(hosts=tuple(working_hosts(self._job, hosts)), job=self._job)
        present, told = hosts, set[str]()
        again = attempt > 0 or self._job.first_attempt > 0  # the job has run before: its hosts may need a moment
        until = time.monotonic() + (self._job.host_timeout if again else 0)
        while True:
            seen = self._look(chosen, attempt)
            if seen.fit:
                self._cores = self._cores or seen.cores
                return ReadyHosts(
                    assignment=chosen, coordinator=_endpoint(seen), visible=seen.visible, cores=self._cores
                )
            problems, unfit = _problems(seen), _unfit(seen)
            rest = tuple(host for host in present if host not in unfit)
            is_other = rest != present
            replaced = is_other and len(rest) >= len(working_hosts(self._job, hosts))
            if not replaced and time.monotonic() < until:
                self._tell(problems, told)
                self._pause()
                continue
            if not replaced and not (again and is_other and self._are_enough(rest)):
                raise NotReadyError("\n".join(problems), unreachable=bool(seen.unreachable))
            present = rest
            self._tell(problems, told)
            chosen = assign(self._job, hosts, present)
            self._tell([chosen.note], told)

    def _look(self, chosen: Assignment, attempt: int) -> PreflightReport:
        # Each attempt has a port of its own: a rank of the last one may live on behind a cut link.
        port = None if self._job.port is None else min(self._job.port + attempt, 65535)
        while True:
            try:
                seen = look(chosen.job, self._backend, chosen.hosts, port=port, wake=self._signals.fd)
            except Interrupted:
                if numbers := self._signals.take():
                    raise StoppedError(numbers[0]) from None
            else:
                warnings = [finding.text for finding in seen.findings if finding.level == "warning"]
                self._tell(warnings, self._warned, "warning: ")
                return seen

    def _are_enough(self, present: Sequence[str]) -> bool:
        least = self._job.min_hosts
        return least is not None and len(present) >= least

    def _pause(self) -> None:
        if numbers := self._signals.wait(AGAIN_S):
            raise StoppedError(numbers[0])

    def _tell(self, lines: Sequence[str], told: set[str], prefix: str = "") -> None:
        """Each thing once."""
        for line in lines:
            if line not in told:
                told.add(line)
                self._screen.info(prefix + line)


def _problems(seen: PreflightReport) -> list[str]:
    errors = [finding.text for finding in seen.findings if finding.level == "error"]
    return errors + [f"host {host} cannot be used: {why}" for host, why in seen.unreachable.items()]


def _unfit(seen: PreflightReport) -> set[str]:
    """The hosts that alone are to blame for something."""
    single = [finding.hosts for finding in seen.findings if finding.level == "error" and len(finding.hosts) == 1]
    return {host for (host,) in single} | set(seen.unreachable)


def _endpoint(seen: PreflightReport) -> str:
    return f"[{seen.address}]:{seen.port}" if ":" in seen.address else f"{seen.address}:{seen.port}"
