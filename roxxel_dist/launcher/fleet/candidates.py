"""While a job runs: can it use hosts that it lost, or that are new to it?"""

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from roxxel_dist.launcher.fleet.warm_hosts import WarmHosts
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.limits import Limits
from roxxel_dist.launcher.job.placement import Assignment
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.preflight.checks import HERE, CheckResult
from roxxel_dist.launcher.preflight.devices import DeviceChecks
from roxxel_dist.launcher.preflight.run import PreflightReport, check_job_hosts
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import Interrupted

LOOK_MOST_S = 300.0
"""The longest pause after looks at a host that answers and is not fit: each doubles it."""
TEND_S = 0.5
"""Between two looks at the agents of hosts that can be used."""
GROW_MOST_S = 3600.0
"""The longest pause after growths: each doubles it, so that a host that comes and goes costs little; one that has cost
a start makes it eight times as long."""
NO_WAY = re.compile(
    r"No route to host|Connection (?:refused|timed out|closed|reset)|Network is (?:unreachable|down)"
    r"|Operation timed out|Could not resolve|Host is down|i/o timeout|was refused|Unable to connect to the server"
    r"|\(NotFound\)|container not found|does not have a host assigned|completed pod|waiting for the condition"
    r"|No such container|no container with name or ID|is not running|container state improper",
    re.IGNORECASE,
)
"""How ssh, kubectl, docker and podman say that a host is away."""
NUMBERS = re.compile(r"\d[\d.,]*")


@dataclass
class LookHistory:
    """What is known of candidates from one attempt to the next."""

    pause_s: float = Limits.look_s
    """Between two looks at hosts of which nothing is known."""
    unfit: dict[str, int] = field(default_factory=dict)
    """How many looks in a row a host has answered and was not fit."""
    looked: set[str] = field(default_factory=set)
    """Newcomers that were looked at."""
    reported: set[tuple[str, str]] = field(default_factory=set)
    """Hosts, and what people have read of them, without its numbers."""

    def grown(self, hosts: Collection[str], *, failed: bool) -> None:
        """These hosts were taken in; `failed`: the attempt with them came to nothing."""
        if failed or not self.looked.issuperset(hosts):  # a newcomer that came once is none that comes and goes
            self.pause_s = min(self.pause_s * (8 if failed else 2), GROW_MOST_S)
        for host in hosts:
            self.unfit.pop(host, None)
            if not failed:
                self.reported = {known for known in self.reported if known[0] != host}
                self.looked.discard(host)

    def forget(self, hosts: Iterable[str]) -> None:
        """These hosts are looked at, and spoken of, as if they were new."""
        for host in hosts:
            self.unfit.pop(host, None)
            self.looked.discard(host)
            self.reported = {known for known in self.reported if known[0] != host}


@dataclass(frozen=True, kw_only=True)
class Running:
    """The job as it runs without the candidates."""

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
    machines: Mapping[str, str]
    """Which machine each of them is."""
    devices: DeviceChecks | None = None
    """The checks of accelerators, which candidates pass too."""


class Candidates:
    """Looks at hosts, in a thread, and finds those that can be used; a context manager.

    Each is looked at alone first, and then together with the hosts that work, as preflight does before a start, by
    programs of their own: the job does not notice it. The first look at a newcomer that would help is the second one.
    Those that can be used and help are warm at last.

    Args:
        job: what they are to be fit for.
        backend: reaches them.
        running: the job without them.
        history: of the attempts before; kept up to date.
        warm: keeps the agents of those that can be used.
    """

    def __init__(self, job: JobSpec, backend: Backend, running: Running, history: LookHistory, warm: WarmHosts) -> None:
        self.ready: tuple[str, ...] = ()
        """Those that can be used, and help."""
        self.spares: tuple[str, ...] = ()
        """Newcomers that can be used, and to which the batch gives no work."""
        self.with_ready: tuple[str, ...] = ()
        """Spare hosts of the job that will work when those that are ready do."""
        self._job, self._backend, self._running, self._history = job, backend, running, history
        self._warm = warm
        self._notes = queue.SimpleQueue[str]()
        self._lock = threading.Lock()
        self._newcomers: frozenset[str] = frozenset()
        self._due: dict[str, float] = {}  # when a candidate is looked at next, by the launcher's clock
        self._unfit = set[str]()  # by the look that goes on
        self._end = False
        self._changed = threading.Event()

    def __enter__(self) -> Self:
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._look, name="candidates", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end = True
        self._changed.set()
        os.write(self._woken, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def watch(self, lost: Collection[str], newcomers: Collection[str]) -> None:
        """The candidates are these from now on: hosts that the job had, and hosts that it never had."""
        with self._lock:
            now, hosts = time.monotonic(), {*lost, *newcomers}
            new = [host for host in (*lost, *newcomers) if host not in self._due]
            if not new and hosts == self._due.keys() and self._newcomers == {*newcomers}:
                return
            self._newcomers = frozenset(newcomers)
            self._due = {host: due for host, due in self._due.items() if host in hosts}
            self._due |= {host: now if host in newcomers else now + self._history.pause_s for host in new}
            self.ready = tuple(host for host in self.ready if host in hosts)
            if new:  # together with these they may help
                self._due |= dict.fromkeys((host for host in self.spares if host in hosts), now)
            self.spares = tuple(host for host in self.spares if host in hosts and not new)
        self._changed.set()

    def look_now(self, hosts: Collection[str]) -> None:
        """Look at these at once, those that are candidates."""
        with self._lock:
            self._due |= dict.fromkeys(self._due.keys() & {*hosts}, time.monotonic())
        self._changed.set()

    def is_first_look(self) -> bool:
        """Whether a newcomer has not been looked at to the end."""
        return not self._history.looked.issuperset(self._newcomers)

    def notes(self) -> list[str]:
        """What people are to know, once: why a host that answers is not used."""
        notes: list[str] = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def _look(self) -> None:
        while not self._end:
            with self._lock:
                now = time.monotonic()
                due = [host for host, when in self._due.items() if when <= now]
                wait_s = min(self._due.values(), default=now + GROW_MOST_S) - now
            if not due:
                self._changed.wait(min(wait_s, TEND_S if self._warm.hosts else GROW_MOST_S))
                self._changed.clear()
            else:
                try:
                    self._look_at(due)
                except Interrupted:
                    return
                except Exception as error:  # the thread would end, and with it all looks
                    self._note_mistake(due, error)
            if self._warm.hosts:
                try:
                    self._tend()
                except Exception as error:
                    self._note_mistake(tuple(self._warm.hosts), error)

    def _note_mistake(self, hosts: Sequence[str], error: Exception) -> None:
        """Say that a look has failed by a mistake of this program, and look again later."""
        with self._lock:
            self._due |= dict.fromkeys(self._due.keys() & {*hosts}, time.monotonic() + LOOK_MOST_S)
        self._tell(", ".join(hosts), f"a look at {', '.join(hosts)} failed, and is repeated later: {error!r}")

    def _tend(self) -> None:
        """Let go of agents on hosts that are not to join any more, and of hosts whose agents are lost."""
        for host, why in self._warm.keep((*self.ready, *(self.with_ready if self.ready else ()))).items():
            if host in self.ready:
                with self._lock:
                    self.ready = tuple(other for other in self.ready if other != host)
                self._is_unfit(host, {"agent": why})

    def _look_at(self, hosts: Sequence[str]) -> None:
        """Look at these hosts, and find which candidates can be used by now."""
        running, history, newcomers, self._unfit = self._running, self._history, self._newcomers, set()
        if running.devices is not None:
            running.devices.pending.update(hosts)
        ready = [host for host in self.ready if host not in hosts]
        at_once = [host for host in hosts if host in newcomers - history.looked and running.grows_with([*ready, host])]
        fit = [host for host in hosts if host in at_once or self._is_fit(host)]
        used = self._fit_together([*ready, *fit])
        idle = [host for host in fit if host not in used and host not in self._unfit]
        idle = [host for host in idle if host not in at_once or self._is_fit(host)]
        for host in idle:
            self._tell(host, self._why_idle(host, len(running.hosts) + len(used)))
        with self._lock:
            pause = time.monotonic() + history.pause_s
            for host in self._due.keys() & {*used, *idle}:
                self._due[host] = pause if host in idle and host not in newcomers else math.inf
            self.ready = tuple(host for host in used if host in self._due)
            spares = [host for host in (*self.spares, *idle) if host in newcomers & self._due.keys()]
            self.spares = tuple(dict.fromkeys(spares))
            history.looked.update(newcomers.intersection(hosts))

    def _why_idle(self, host: str, working: int) -> str:
        """What people are to know of a host that can be used and does not help so many that work."""
        if host not in self._newcomers:
            return f"host {host} can be used again; the program cannot use its devices yet"
        most = self._job.max_hosts
        why = "n_devices, fsdp_devices, tensor_devices or virtual_shards leave its devices no work"
        if most is not None and working >= most:
            why = f"--max-hosts is {most}"
        return f"host {host} is a spare: it passed the checks, and {why}"

    def _is_fit(self, host: str) -> bool:
        report = self._checked(self._job, (host,))
        reasons = self._reasons(report, host) | self._is_known(host, report)
        is_fit = report.passed and not report.suspects and not reasons
        if not is_fit:
            self._is_unfit(host, reasons)
        return is_fit

    def _is_known(self, host: str, report: PreflightReport, others: Sequence[str] = ()) -> dict[str, str]:
        """Why a newcomer does not join that is a machine of the job, or one of `others`, by another name."""
        machine, running = report.machines.get(host), self._running
        same = [other for other in running.hosts if running.machines.get(other) == machine]
        if machine is None or host not in self._newcomers or len(same) > 1:  # hosts may be few machines from the start
            return {}
        same = same or [other for other in others if report.machines.get(other) == machine]
        return {"machine": f"it is the machine of {same[0]}, by another name"} if same else {}

    def _fit_together(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of these hosts that can start together with the ones that work, where that helps."""
        running = self._running
        while hosts and running.grows_with(hosts):
            plan = running.plan(hosts)
            new = [host for host in plan.hosts if host not in (*running.hosts, *self._warm.hosts)]
            report = self._checked(plan.job, plan.hosts, keep=new)
            known = {host: self._is_known(host, report, hosts[:place]) for place, host in enumerate(hosts)}
            strange = [
                result
                for result in report.findings
                if result.level == "warning" and result.text not in running.accepted and self._strangers(result)
            ]
            wrong = report.blamed(running.hosts).union(
                *map(self._strangers, strange),
                report.suspects.keys() - {*running.hosts},
                (host for host in hosts if known[host]),
            )
            if report.passed and not wrong:
                failed = self._warm.warm(plan, report.visible, new, say=self._notes.put, is_over=lambda: self._end)
                if not failed.keys() & {*hosts}:
                    self.with_ready = tuple(host for host in plan.hosts if host not in (*running.hosts, *hosts))
                    return tuple(host for host in hosts if host in plan.hosts)
                for host in failed.keys() & {*hosts}:
                    self._is_unfit(host, {"warm": failed[host]})
                hosts = [host for host in hosts if host not in failed]
                continue
            for host in hosts:
                if host in wrong:
                    reasons = self._reasons(report, host) | {result.check: result.text for result in strange}
                    reasons |= known[host]
                    self._is_unfit(host, reasons)
                elif not wrong & {*hosts}:  # a start would end the job, whatever it is
                    text = "the hosts that work could not start again now: " + "; ".join(report.problems)
                    self._is_unfit(host, {"those that work": text})
            hosts = [host for host in hosts if host not in wrong] if wrong & {*hosts} else []
        return ()

    def _checked(self, job: JobSpec, hosts: Sequence[str], keep: Collection[str] = ()) -> PreflightReport:
        """What preflight finds. The agents of hosts in `keep` are kept if all pass."""
        port, busy = self._running.port, self._running.hosts
        with HostPool(self._backend, self._wake, job.limits) as pool:
            report = check_job_hosts(
                job, self._backend, hosts, port=port, pool=pool, busy=busy, devices=self._running.devices
            )
            if report.passed:
                self._warm.take(pool, keep)
            return report

    def _strangers(self, result: CheckResult) -> frozenset[str]:
        """The hosts that agree with none of those that work."""
        known = {HERE, *self._running.hosts}
        return frozenset(host for group in result.groups if not known & {*group} for host in group)

    def _reasons(self, report: PreflightReport, host: str) -> dict[str, str]:
        """Why a host does not pass, by check."""
        errors = [result for result in report.findings if result.level == "error"]
        blamed = {result.check: result.blamed(self._running.hosts) or {host} for result in errors}
        reasons = {result.check: result.text for result in errors if host in blamed[result.check]}
        reasons |= {"devices": report.suspects[host]} if host in report.suspects else {}
        return reasons | ({"host": report.unreachable[host]} if host in report.unreachable else {})

    def _is_unfit(self, host: str, reasons: dict[str, str]) -> None:
        history, is_new = self._history, host in self._newcomers
        self._unfit.add(host)
        pause = history.pause_s
        is_away = NO_WAY.search(reasons.get("host", "")) is not None
        if is_away:
            history.unfit.pop(host, None)
        else:
            times = history.unfit[host] = history.unfit.get(host, 0) + 1
            pause = min(pause * 2**times, max(pause, LOOK_MOST_S))
        with self._lock:
            if host in self._due:
                self._due[host] = time.monotonic() + pause
        what = "does not join yet" if is_new else "is not used again yet"
        if is_new or not is_away:
            self._tell(host, f"host {host} {what}, and is asked from time to time: {'; '.join(reasons.values())}")

    def _tell(self, host: str, text: str) -> None:
        about = host, NUMBERS.sub("", text)
        if about not in self._history.reported:
            self._history.reported.add(about)
            self._notes.put(text)
