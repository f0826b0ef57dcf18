"""Before each attempt: which hosts are there, whether they are fit for the job, and which of them work."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from roxxel_dist.launcher.fleet.wanted import working_number
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Assignment, assign, working_hosts
from roxxel_dist.launcher.job.signals import SignalPipe
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.preflight import failed_hosts
from roxxel_dist.launcher.preflight.checks import named
from roxxel_dist.launcher.preflight.devices import DeviceChecks, checks_of
from roxxel_dist.launcher.preflight.run import PreflightReport, check_job_hosts
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import Interrupted

RETRY_S = 2.0
TELL_S = 5.0
"""A longer wait is announced."""


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
    is_retry: bool
    """Whether the job has run before."""
    said: set[str] = field(default_factory=set)
    starting: set[str] = field(default_factory=set)
    """Hosts of which the user has read that they start."""
    replaced: set[str] = field(default_factory=set)
    """Hosts that start, and for which others are tried."""
    failed: set[str] = field(default_factory=set)
    """Hosts whose devices did not pass."""


class HostSelector:
    """Looks at the hosts of a job before each of its attempts.

    Agents of the previous attempt are asked over their open connections; only a lost host gets a new one. A spare host
    at once replaces a host that is unreachable or unfit. Before the first attempt the job goes on at once without such
    a host, if it may (`job.min_hosts`); later that host has `job.host_timeout` seconds. A host that the job goes on
    without is asked again when it is `back`, or when too few others are left. The first attempt waits as long for
    `job.min_hosts` hosts, or for all where those that are missing still start.

    Args:
        newcomers: hosts that shall be in the job and are not; asked for while too few hosts are there.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        signals: SignalPipe,
        screen: Console,
        pool: HostPool,
        newcomers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._job, self._backend, self._signals, self._screen, self._pool = job, backend, signals, screen, pool
        self._given, self._newcomers = job, newcomers
        self.members: tuple[str, ...] = tuple(backend.hosts)
        """The hosts of the job, the lost and spare ones too, in the order of its ranks."""
        self._changes = job.hosts_from is not None
        """Whether the number of hosts is no number that a person has asked for."""
        self.machines: dict[str, str] = {}
        """Which machine each of them is, those that were selected last."""
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
        self._present: tuple[str, ...] = ()
        self.devices: DeviceChecks = checks_of(job, backend.hosts, len(working_hosts(job, backend.hosts)))
        """The checks of accelerators; hosts whose ranks fail are added to those that are pending."""

    def leave_failed_hosts(self) -> None:
        """Set those aside whose devices failed in the last day, where enough others are left; say so in a line."""
        failed = failed_hosts.known(self._backend)
        for host in failed:
            if self.can_do_without(host):
                self.set_aside(host)
        used = [host for host in failed if host not in self._set_aside]
        if failed:
            names = "; ".join(f"{host} ({why.removeprefix(f'{host}: ')})" for host, why in failed.items())
            end = f"; used in any case, for too few others are left: {', '.join(used)}" if used else ""
            self._screen.info(f"failed in the last day, see `doctor --forget`: {names}{end}")

    def plan(self, back: Sequence[str]) -> Assignment:
        """What would start if these hosts were there beside those that were selected last."""
        members = self._with(back)
        job = self._job if members == self.members else self._sized(members)
        there = {*self._present, *back}
        present = tuple(host for host in members if host in there)
        return assign(job, members, present, elastic=self._changes or members != self.members)

    def grows_with(self, back: Sequence[str]) -> bool:
        """Whether the job would have more devices than it has since the last `select`, with these hosts."""
        return self.plan(back).devices > self._assignment.devices

    def can_do_without(self, host: str) -> bool:
        """Whether enough hosts are left without this one: as many as work, or as `--min-hosts` asks for."""
        hosts = self.members
        left = len([other for other in hosts if other not in {host, *self._set_aside, *self._left_out}])
        least = len(working_hosts(self._job, hosts))
        return left >= (least if self._job.min_hosts is None else min(least, self._job.min_hosts))

    def set_aside(self, host: str) -> None:
        """Use this host only where there are too few others."""
        self._set_aside.append(host)

    def leave_out(self, hosts: Iterable[str]) -> None:
        """Go on without these hosts, until they are back."""
        self._left_out.update(hosts)

    @property
    def there(self) -> tuple[str, ...]:
        """The members that are not lost, as the last `select` found them: those that work, and spare ones."""
        return self._present

    @property
    def least(self) -> int:
        """So many hosts the job needs."""
        return self._given.min_hosts or len(working_hosts(self._given, self._backend.hosts))

    def change(self, joins: Sequence[str] = (), leaves: Collection[str] = ()) -> None:
        """Let these hosts be members of the job, or be none any more; at least one stays.

        Those that join as spares, while an attempt goes on, can be used at once when a host fails.
        """
        members = tuple(host for host in self._with(joins) if host not in leaves)
        if members == self.members or not members:
            return
        self.members, self._changes = members, True
        self.devices.pending.update(joins)
        self._job = self._sized(members)
        self._set_aside = [host for host in self._set_aside if host not in leaves]
        self._left_out -= {*leaves}
        self._present = self._in_order({*self._present, *joins})
        self.has_spare = len(self._present) > len(self.working)

    def _with(self, joins: Sequence[str]) -> tuple[str, ...]:
        return (*self.members, *(host for host in joins if host not in self.members))

    def _sized(self, members: Sequence[str]) -> JobSpec:
        """The job as these hosts would do it all together."""
        given = self._given
        first = len(working_hosts(given, self._backend.hosts))
        number = working_number(len(members), given.spare_hosts, first, given.max_hosts)
        return replace(
            given,
            nprocs=given.nprocs // first * number,
            spare_hosts=len(members) - number,
            min_hosts=self.least,
        )

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
        present = {*self.members} - {*self._set_aside} - self._left_out
        is_retry = attempt > 0 or job.first_attempt > 0  # the job has run before: its hosts may need a moment
        search = _Search(
            present=self._in_order(present),
            back=self._in_order(back),
            reserve={*self._left_out},
            gone_by=gone_by,
            deadline=max(time.monotonic() + job.host_timeout, *gone_by.values(), 0.0),
            is_retry=is_retry,
        )
        while True:
            assignment = self._assign(search.present)
            report = self._look_at(assignment, self.port(attempt))
            if self._without_failed(search, report):
                continue
            warnings = [result.text for result in report.findings if result.level == "warning"]
            self._say(warnings, self.warnings, "warning: ")
            if report.passed:
                return self._ready(assignment, report, search)
            self._change(search, report)

    def _without_failed(self, search: "_Search", report: PreflightReport) -> bool:
        """Set hosts aside whose devices did not pass, where enough others are left; whether there were such hosts."""
        gone = []
        for host, why in report.suspects.items():
            if host not in search.failed:
                search.failed.add(host)
                failed_hosts.remember(self._backend, host, why)
                if self.can_do_without(host):
                    self.set_aside(host)
                    gone.append(host)
                    self._say([f"host {host} is set aside: {why}"], search.said)
        failed_hosts.forget(self._backend, list(self.devices.passed))
        self.devices.passed.clear()
        search.present = self._in_order({*search.present} - {*gone})
        return bool(gone)

    def _look_at(self, assignment: Assignment, port: int | None) -> PreflightReport:
        """What preflight finds. Raises StoppedError."""
        while True:
            self._pool.reach_anew()
            try:
                return check_job_hosts(
                    assignment.job,
                    self._backend,
                    assignment.hosts,
                    port=port,
                    pool=self._pool,
                    devices=self.devices,
                )
            except Interrupted:
                if numbers := self._signals.take():
                    raise StoppedError(numbers[0]) from None

    def _ready(self, assignment: Assignment, report: PreflightReport, search: "_Search") -> ReadyHosts:
        hosts, present = self.members, search.present
        self._wait_for_end(search.gone_by)
        self._cores = self._cores or report.cores
        self.machines = dict(report.machines)
        self._present, self._assignment, self.working = present, assignment, assignment.hosts
        working = assignment.hosts if self._changes else working_hosts(self._job, hosts)
        self.has_spare = len(present) > len(working)
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
        job, errors = self._job, list(report.problems)
        wrong = report.blamed([link.host for link in self._pool.all if link.ranks])  # those have had some
        if unfit := {*search.back} & (wrong or {*search.back}):  # the job ran without them
            self._left_out |= unfit
            names = ", ".join(self._in_order(unfit))
            self._say([f"{names} cannot be used after all: {error}" for error in errors], search.said)
            search.back = self._in_order({*search.back} - unfit)
            search.present = self._in_order({*search.present} - unfit)
            return
        rest = self._in_order({*search.present} - wrong)
        is_replaced = rest != search.present and len(rest) >= len(working_hosts(job, self.members))
        if self._changes and rest and rest != search.present:  # a spare may be one that the batch gives no work
            is_replaced = self._assignment_of(rest).devices >= self._assignment_of(search.present).devices
        may_shrink = rest != search.present and job.min_hosts is not None and len(rest) >= job.min_hosts
        if search.reserve and not (is_replaced or may_shrink):  # one of them may be there by now
            search.present = self._in_order({*search.present, *search.reserve})
            search.reserve.clear()
            return
        comes_and_goes = may_shrink and wrong <= self._were_back  # it is watched, and taken in again
        waits = not (is_replaced or self._set_aside or comes_and_goes or (may_shrink and not search.is_retry))
        may_come = report.only_starts if job.min_hosts is None else bool(report.unreachable)
        if waits and time.monotonic() < search.deadline and (search.is_retry or may_come):
            self._say_waiting(len(rest), search, report)
            if numbers := self._signals.wait(RETRY_S):
                raise StoppedError(numbers[0])
            self._add_newcomers(search)
            search.present = self._in_order({*search.present, *search.replaced})
            search.replaced.clear()
            return
        if self._set_aside and not is_replaced:  # one that was lost, or failed, is better than none
            rest = self._in_order({*rest, *self._set_aside})
            self._set_aside.clear()
        elif not (is_replaced or may_shrink):
            raise NotReadyError("\n".join(errors), unreachable=bool(report.unreachable))
        self._say(errors, search.said)
        search.replaced.update(report.starting)
        search.present = rest

    def port(self, attempt: int) -> int | None:
        """The coordinator's port in an attempt; None: a free one."""
        return None if self._job.port is None else min(self._job.port + attempt, 65535)

    def _in_order(self, hosts: Collection[str]) -> tuple[str, ...]:
        """These hosts, in the order of the ranks."""
        return tuple(host for host in self.members if host in hosts)

    def _assignment_of(self, present: Sequence[str]) -> Assignment:
        return assign(self._job, self.members, present, elastic=self._changes)

    def _add_newcomers(self, search: "_Search") -> None:
        """While the job waits for hosts, one that is new will do."""
        if newcomers := [host for host in self._newcomers() if host not in self.members]:
            self.change(joins=newcomers)
            search.present = self._in_order({*search.present, *newcomers})

    def _say_waiting(self, there: int, search: "_Search", report: PreflightReport) -> None:
        limit = f"waiting up to {self._job.host_timeout:g} s for"
        if not search.is_retry and self._job.min_hosts is None:
            if new := self._in_order({*report.starting} - search.starting):
                search.starting.update(new)
                hosts = f"host {new[0]}" if len(new) == 1 else f"hosts {named(new)}"
                self._screen.info(f"{limit} {hosts} to start (--host-timeout): {report.unreachable[new[0]]}")
            return
        self._say(report.problems, search.said)
        if not search.is_retry:
            text = f"{there} of at least {self._job.min_hosts} hosts (--min-hosts) are there"
            self._say([f"{text}: {limit} others (--host-timeout)"], search.said)

    def _assign(self, present: tuple[str, ...]) -> Assignment:
        """An assignment to these hosts; its note goes to the screen if it has changed."""
        assignment = self._assignment_of(present)
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
