"""Before each attempt: which hosts are there, whether they are fit for the job, and which of them work."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import working_hosts
from roxxel_dist.launcher.job.signals import SignalPipe
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.preflight.run import PreflightReport, check_job_hosts
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import Interrupted

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
    back: tuple[str, ...] = ()
    """Those among them that the attempt before went without, and that were back."""


@dataclass(kw_only=True)
class _Search:
    """How far a selection is."""

    present: tuple[str, ...]
    """The hosts that may work."""
    back: tuple[str, ...]
    """Those among them without which the last attempt was made."""
    reserve: set[str]
    """Hosts that are asked only where these are too few."""
    gone_by: Mapping[str, float]
    """When the ranks of lost hosts have ended, wherever they are."""
    deadline: float
    """Until then a host that is missing may come back."""
    said: set[str] = field(default_factory=set)


class HostSelector:
    """Looks at the hosts of a job before each of its attempts.

    Agents of the previous attempt are asked over their open connections; only a lost host gets a new one. A spare host
    at once replaces a host that is unreachable or unfit. Before the first attempt the job goes on at once without such
    a host, if it may (`job.min_hosts`); later that host has `job.host_timeout` seconds. A host that the job goes on
    without is asked again when it is `back`, or when too few others are left.
    """

    def __init__(self, job: JobSpec, backend: Backend, signals: SignalPipe, screen: Console, pool: HostPool) -> None:
        self._job, self._backend, self._signals, self._screen, self._pool = job, backend, signals, screen, pool
        self.warnings: set[str] = set()
        """Those that the user has read."""
        self.working: tuple[str, ...] = ()
        """The hosts that were selected last."""
        self.has_spare: bool = False
        """Whether a host was left over when hosts were selected last."""
        self._cores: int | None = None
        self._set_aside: list[str] = []
        self._left_out = set[str]()
        self._were_back = set[str]()
        self._note = ""

    def plan(self, back: Sequence[str]) -> Assignment:
        """What would start if these hosts were there beside those that were selected last."""
        return assign(self._job, self._backend.hosts, self._in_order({*self._present, *back}))

    def grows_with(self, back: Sequence[str]) -> bool:
        """Whether the job would have more devices than it has since the last `select`, with these hosts."""
        return self.plan(back).devices > self._assignment.devices

    def can_do_without(self, host: str) -> bool:
        """Whether enough hosts are left without this one: as many as work, or as `--min-hosts` asks for."""
        hosts = tuple(self._backend.hosts)
        left = len([other for other in hosts if other not in {host, *self._set_aside, *self._left_out}])
        least = len(working_hosts(self._job, hosts))
        return left >= (least if self._job.min_hosts is None else min(least, self._job.min_hosts))

    def set_aside(self, host: str) -> None:
        """Use this host only where there are too few others."""
        self._set_aside.append(host)

    def leave_out(self, hosts: Iterable[str]) -> None:
        """Go on without these hosts, until they are back."""
        self._left_out.update(hosts)

    def select(
        self, attempt: int, gone_by: Mapping[str, float] = MappingProxyType({}), back: Collection[str] = ()
    ) -> ReadyHosts:
        """The hosts that start this attempt, when the ranks of lost ones have ended.

        Ranks of a lost host have ended by the time in `gone_by`: its agent has received nothing for long, also where
        the host answers again (its end of the broken link may be open). Hosts that are `back` are used if nothing
        speaks against it.

        Raises:
            NotReadyError: there are too few.
            StoppedError: the launcher was asked to stop.
        """
        job = self._job
        self._left_out -= {*back}
        present = {*self._backend.hosts} - {*self._set_aside} - self._left_out
        is_retry = attempt > 0 or job.first_attempt > 0  # the job has run before: its hosts may need a moment
        search = _Search(
            present=self._in_order(present),
            back=self._in_order(back),
            reserve={*self._left_out},
            gone_by=gone_by,
            deadline=max(time.monotonic() + (job.host_timeout if is_retry else 0), *gone_by.values(), 0.0),
        )
        while True:
            assignment = self._assign(search.present)
            report = self._look_at(assignment, self.port(attempt))
            warnings = [result.text for result in report.findings if result.level == "warning"]
            self._say(warnings, self.warnings, "warning: ")
            if report.passed:
                return self._ready(assignment, report, search)
            self._change(search, report)

    def _look_at(self, assignment: Assignment, port: int | None) -> PreflightReport:
        """What preflight finds. Raises StoppedError."""
        while True:
            self._pool.reach_anew()
            try:
                return check_job_hosts(assignment.job, self._backend, assignment.hosts, port=port, pool=self._pool)
            except Interrupted:
                if numbers := self._signals.take():
                    raise StoppedError(numbers[0]) from None

    def _ready(self, assignment: Assignment, report: PreflightReport, search: "_Search") -> ReadyHosts:
        hosts, present = self._backend.hosts, search.present
        self._wait_for_end(search.gone_by)
        self._cores = self._cores or report.cores
        self._present, self._assignment, self.working = present, assignment, assignment.hosts
        self.has_spare = len(present) > len(working_hosts(self._job, hosts))
        self._were_back |= {*search.back}
        lost = tuple(host for host in hosts if host not in present and host not in self._set_aside)
        self._left_out = {*lost}
        address = f"[{report.address}]" if ":" in report.address else report.address
        return ReadyHosts(
            assignment,
            f"{address}:{report.port}",
            report.visible,
            self._cores,
            lost=lost if self.grows_with(lost) else (),
            back=search.back,
        )

    def _change(self, search: "_Search", report: PreflightReport) -> None:
        """Go on with other hosts, or wait a moment. Raises NotReadyError, StoppedError."""
        job, errors = self._job, report.problems
        wrong = report.blamed([link.host for link in self._pool.all if link.started])  # those have had ranks
        if unfit := {*search.back} & (wrong or {*search.back}):  # the job ran without them
            self._left_out |= unfit
            names = ", ".join(self._in_order(unfit))
            self._say([f"{names} cannot be used after all: {error}" for error in errors], search.said)
            search.back = self._in_order({*search.back} - unfit)
            search.present = self._in_order({*search.present} - unfit)
            return
        rest = self._in_order({*search.present} - wrong)
        is_replaced = rest != search.present and len(rest) >= len(working_hosts(job, self._backend.hosts))
        may_shrink = rest != search.present and job.min_hosts is not None and len(rest) >= job.min_hosts
        if search.reserve and not (is_replaced or may_shrink):  # one of them may be there by now
            search.present = self._in_order({*search.present, *search.reserve})
            search.reserve.clear()
            return
        comes_and_goes = may_shrink and wrong <= self._were_back  # it is watched, and taken in again
        if not (is_replaced or self._set_aside or comes_and_goes) and time.monotonic() < search.deadline:
            self._say(errors, search.said)
            if numbers := self._signals.wait(RETRY_S):
                raise StoppedError(numbers[0])
            return
        if self._set_aside and not is_replaced:  # one that was lost, or failed, is better than none
            rest = self._in_order({*rest, *self._set_aside})
            self._set_aside.clear()
        elif not (is_replaced or may_shrink):
            raise NotReadyError("\n".join(errors), unreachable=bool(report.unreachable))
        self._say(errors, search.said)
        search.present = rest

    def port(self, attempt: int) -> int | None:
        """The coordinator's port in an attempt; None: a free one."""
        return None if self._job.port is None else min(self._job.port + attempt, 65535)

    def _in_order(self, hosts: Collection[str]) -> tuple[str, ...]:
        """These hosts, in the order of the ranks."""
        return tuple(host for host in self._backend.hosts if host in hosts)

    def _assign(self, present: tuple[str, ...]) -> Assignment:
        """An assignment to these hosts; its note goes to the screen if it has changed."""
        assignment = assign(self._job, self._backend.hosts, present)
        if assignment.note and assignment.note != self._note:
            self._screen.info(assignment.note)
        self._note = assignment.note
        return assignment

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
