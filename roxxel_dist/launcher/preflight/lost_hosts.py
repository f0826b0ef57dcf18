"""While a job goes on with fewer hosts than it was given: can those that it lost be used again?"""

import os
import queue
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.preflight.checks import HERE, CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport, check_job_hosts
from roxxel_dist.launcher.preflight.select_hosts import Assignment
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import Interrupted

LOOK_S = 5.0
"""Between two looks at the start."""
LOOK_MOST_S = 300.0
"""The longest pause after looks at a host that answers and is not fit: each doubles it."""
GROW_MOST_S = 3600.0
"""The longest pause after growths: each doubles it, so that a host that comes and goes costs little; one that has cost
a start makes it eight times as long."""
NO_WAY = re.compile(
    r"No route to host|Connection (?:refused|timed out|closed|reset)|Network is (?:unreachable|down)"
    r"|Operation timed out|Could not resolve|Host is down"
)
"""How ssh says that a host is away."""
NUMBERS = re.compile(r"\d[\d.,]*")


@dataclass
class LookHistory:
    """What is known of lost hosts from one attempt to the next."""

    pause_s: float = LOOK_S
    """Between two looks at hosts of which nothing is known."""
    unfit: dict[str, int] = field(default_factory=dict)
    """How many looks in a row a host has answered and was not fit."""
    reported: set[tuple[str, str]] = field(default_factory=set)
    """Hosts, and what people have read of them, without its numbers."""

    def grown(self, hosts: Sequence[str], *, failed: bool) -> None:
        """These hosts were taken in; `failed`: the attempt with them came to nothing."""
        self.pause_s = min(self.pause_s * (8 if failed else 2), GROW_MOST_S)
        for host in hosts:
            self.unfit.pop(host, None)
            if not failed:
                self.reported = {known for known in self.reported if known[0] != host}


@dataclass(frozen=True, kw_only=True)
class Running:
    """The job as it runs without the lost hosts."""

    hosts: Sequence[str]
    """Those that work."""
    port: int | None
    """The coordinator's port in the next attempt; None: a free one."""
    accepted: Collection[str]
    """Warnings with which the job was started."""
    plan: Callable[[Sequence[str]], Assignment]
    """What would start with more hosts."""
    grows_with: Callable[[Sequence[str]], bool]
    """Whether the job would have more devices with these."""


class LostHosts:
    """Looks at hosts, in a thread, until some can be used; a context manager.

    Each is looked at alone first, and then together with the hosts that work, as preflight does before a start, by
    programs of their own: the job does not notice it.

    Args:
        job: what they are to be fit for.
        backend: reaches them.
        hosts: those that are looked at.
        running: the job without them.
        history: of the attempts before; kept up to date.
    """

    def __init__(
        self, job: JobSpec, backend: Backend, hosts: Sequence[str], running: Running, history: LookHistory
    ) -> None:
        self.back: tuple[str, ...] = ()
        """Those that can be used, and help."""
        self._job, self._backend, self._hosts, self._running, self._history = job, backend, hosts, running, history
        self._notes = queue.SimpleQueue[str]()
        self._pauses: dict[str, int] = {}  # rounds in which a host is not looked at
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._look, name="lost hosts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.set()
        os.write(self._woken, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def notes(self) -> list[str]:
        """What people are to know, once: why a host that answers is not used."""
        notes: list[str] = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def _look(self) -> None:
        while not self.back and not self._end.wait(self._history.pause_s):
            due = [host for host in self._hosts if not self._pauses.get(host)]
            self._pauses = {host: rounds - 1 for host, rounds in self._pauses.items() if rounds > 1}
            try:
                self.back = self._fit_together([host for host in due if self._is_fit(host)])
            except Interrupted:
                return

    def _is_fit(self, host: str) -> bool:
        report = self._checked(self._job, (host,))
        why = report.unreachable.get(host, "")
        if NO_WAY.search(why):
            self._history.unfit.pop(host, None)
        elif not report.passed:
            self._is_unfit(host, self._reasons(report, host))
        return report.passed

    def _fit_together(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of these hosts that can start together with the ones that work, where that helps."""
        running = self._running
        if hosts and not running.grows_with(hosts):
            for host in hosts:
                self._tell(host, f"host {host} can be used again; the batch does not give it work yet")
        while hosts and running.grows_with(hosts):
            plan = running.plan(hosts)
            report = self._checked(plan.job, plan.hosts)
            strange = [
                result
                for result in report.findings
                if result.level == "warning" and result.text not in running.accepted and self._strangers(result)
            ]
            wrong = report.blamed(running.hosts).union(*map(self._strangers, strange))
            if report.passed and not wrong:
                return tuple(hosts)
            for host in hosts:
                if host in wrong:
                    reasons = self._reasons(report, host) | {result.check: result.text for result in strange}
                    self._is_unfit(host, reasons)
                elif not wrong & {*hosts}:  # a start would end the job, whatever it is
                    text = "the hosts that work could not start again now: " + "; ".join(report.problems)
                    self._is_unfit(host, {"those that work": text})
            hosts = [host for host in hosts if host not in wrong] if wrong & {*hosts} else []
        return ()

    def _checked(self, job: JobSpec, hosts: Sequence[str]) -> PreflightReport:
        port, busy = self._running.port, self._running.hosts
        with HostPool(self._backend, self._wake) as pool:
            return check_job_hosts(job, self._backend, hosts, port=port, pool=pool, busy=busy)

    def _strangers(self, result: CheckResult) -> frozenset[str]:
        """The hosts that agree with none of those that work."""
        known = {HERE, *self._running.hosts}
        return frozenset(host for group in result.groups if not known & {*group} for host in group)

    def _reasons(self, report: PreflightReport, host: str) -> dict[str, str]:
        """Why a host does not pass, by check."""
        errors = [result for result in report.findings if result.level == "error"]
        blamed = {result.check: result.blamed(self._running.hosts) or {host} for result in errors}
        reasons = {result.check: result.text for result in errors if host in blamed[result.check]}
        return reasons | ({"host": report.unreachable[host]} if host in report.unreachable else {})

    def _is_unfit(self, host: str, reasons: dict[str, str]) -> None:
        history = self._history
        times = history.unfit[host] = history.unfit.get(host, 0) + 1
        self._pauses[host] = int(min(history.pause_s * 2**times, LOOK_MOST_S) // history.pause_s)
        for text in reasons.values():
            self._tell(host, f"host {host} is not used again yet, and is asked from time to time: {text}")

    def _tell(self, host: str, text: str) -> None:
        about = host, NUMBERS.sub("", text)
        if about not in self._history.reported:
            self._history.reported.add(about)
            self._notes.put(text)
