"""The controller: attempts at a job until one ends it, and the job's exit code."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.inbox import Inbox
from roxxel_dist.launcher.control.index import forget_old
from roxxel_dist.launcher.control.members import MemberHangs
from roxxel_dist.launcher.control.notify import Notifier
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.control.report import first_words, report_of
from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.driver import Driver, NotReadyError, StoppedError
from roxxel_dist.launcher.fleet.step import DEPART_S, fleet_of
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Assignment, placements, working_hosts
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import Console, Logs
from roxxel_dist.launcher.policy.hang import LEAST_S, StepTimes
from roxxel_dist.launcher.policy.outcome import AttemptResult, AttemptSummary, Cause, Decision, summary
from roxxel_dist.launcher.preflight.devices import known_failures
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.exit_codes import EXIT_DRAINED, EXIT_PREFLIGHT, OK_CODES
from roxxel_dist.process.interrupt import SignalPipe


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The end of a job."""

    code: int
    requested: int | None = None
    """The signal that asked for its end."""
    host_lost: bool = False
    """It could go on, with another host for one that is out of reach."""
    idle: bool = False
    """Its last attempt came to no step, though its program reports its steps."""


def run(job: JobSpec, backend: Backend, recorder: JobRecorder | None = None) -> int:
    """Run a job to its end and return its exit code. Call it from the main thread. `recorder` enters it as a job.

    Raises ValueError for a job that does not fit the hosts.
    """
    placements(job, working_hosts(job, backend.hosts), "", backend.environment)
    return supervise(job, backend, recorder or JobRecorder(job, backend)).code


def supervise(
    job: JobSpec, backend: Backend, recorder: JobRecorder, goes_on: Callable[[JobResult], bool] | None = None
) -> JobResult:
    """Run a job as `run` does; returns more about the end. `goes_on`: whether a batch system starts the job again."""
    with recorder:
        forget_old()
        with (
            Console(all_ranks=job.all_ranks, first=job.first_rank) as console,
            SignalPipe(console.info, stays=backend.is_remote) as signals,
        ):
            notify = job.notify
            notifier = Notifier(notify, lambda: recorder.entry, console.info, job.limits) if notify else None
            controller = _Controller(job, backend, recorder, console, signals, notifier)
            result = controller.run()
            if notifier is not None:
                notifier.send("end", controller.last_words, code=result.code)
                notifier.close(signals.wait)
                controller.repeat_failure(notifier)
        # Only now: `attach` and `logs` stop reading at the end.
        if goes_on is not None and goes_on(result):
            recorder.queue_again(result.code)
        else:
            recorder.end(result.code)
    return result


@dataclass
class _Controller:
    job: JobSpec
    backend: Backend
    recorder: JobRecorder
    console: Console
    signals: SignalPipe
    notifier: Notifier | None
    last_words: str = "the job is done"
    """Why it ended."""

    def run(self) -> JobResult:
        self._reports: list[Sequence[str]] = []  # about each attempt, for people
        self._logs = Logs(self.job, self.console.info)
        self._key = os.urandom(32).hex()
        self._missing: tuple[str, ...] = ()
        self._times: dict[int, StepTimes] = {}  # by how many devices work
        pool = HostPool(self.backend, self.signals.fd, self.job.limits)
        self._fleet, inbox = self._fleet_on(pool)
        try:
            with self._logs, inbox or nullcontext(), pool:
                return self._run(pool)
        except StoppedError as stop:  # while no rank ran
            self.last_words = f"{signal.Signals(stop.number).name}: not started{' again' * bool(self._attempts)}"
            self.console.info(self.last_words)
            drained = bool(self._attempts) and self._attempts[-1].code == EXIT_DRAINED
            return JobResult(code=EXIT_DRAINED if drained else 128 + stop.number, requested=stop.number)
        except NotReadyError as problem:
            self.last_words = str(problem)
            self.console.print([f"roxxel-dist: {line}" for line in str(problem).splitlines()])
            self.console.info(self._after_refusal(problem.unreachable))
            self._tell_first_cause()
            return JobResult(code=EXIT_PREFLIGHT, host_lost=self._fleet.fleet.is_retry and problem.unreachable)

    def _fleet_on(self, pool: HostPool) -> tuple[Driver, Inbox | None]:
        """The hosts of the job, and what people ask of them where they can."""
        job, backend = self.job, self.backend
        is_fixed = backend.is_local or not job.is_restartable
        fleet = fleet_of(
            job,
            backend.hosts,
            now=time.monotonic(),
            given=backend.given,
            listed=backend.listed,
            is_fixed=is_fixed,
            failed=known_failures(backend),
        )
        driver, since = Driver(fleet, backend, self.signals, self.console, pool, self._key), self.recorder.entry.begun
        return driver, Inbox(job, backend, driver.happened, since) if backend.takes_hosts and not is_fixed else None

    @property
    def _attempts(self) -> Sequence[AttemptSummary]:
        return self._fleet.fleet.attempts

    def _after_refusal(self, unreachable: bool) -> str:
        """What a person can do when the hosts cannot take the job."""
        if not self._attempts:
            return "not started: correct what is above; `roxxel-dist doctor` checks all hosts"
        if not unreachable:
            return "not started again: correct what is above; `roxxel-dist doctor` checks all hosts"
        resume = f" with {self.job.program.resume}" if self.job.program.resume else ""
        others = "" if self.job.min_hosts or self.job.spare_hosts else "; --spare-hosts or --min-hosts go on without it"
        return (
            f"not started again: a host did not answer for {self.job.host_timeout:g} s (--host-timeout); repair it, or "
            f"name other hosts, then use the same command{resume}{others}"
        )

    def _run(self, pool: HostPool) -> JobResult:
        self._explain_flags()
        fleet, gone_by = self._fleet, dict[str, float]()
        while True:
            start = fleet.select(gone_by)
            members = fleet.fleet.members
            self._notify_of_hosts(start.assignment, members)
            nprocs = max(self.recorder.entry.nprocs, start.assignment.job.total)
            self.recorder.update(hosts=members, nprocs=nprocs)
            begun, trains = time.monotonic(), self.job.program.reports_steps
            with fleet.attempt():
                result = self._attempt(start, pool)
            job, lost, gone_by = start.assignment.job, result.lost, result.gone_by
            ended = events.AttemptEnded(
                attempt=summary(result, seconds=time.monotonic() - begun, counts=trains),
                lost=lost.host if lost is not None and lost.with_host else "",
                departing=tuple(result.departing),
            )
            todo = fleet.step(ended)
            decision = next(do for do in todo if isinstance(do, Decision))
            self._tell(decision, result, report_of(job, result, self._logs))
            last = self._attempts[-1]
            if not decision.again:
                return JobResult(
                    code=decision.code,
                    requested=result.requested,
                    host_lost=bool(ended.lost),
                    idle=last.counts and last.reached == 0,
                )
            fleet.say()
            for do in todo:
                if isinstance(do, events.AwaitEnd):
                    self._await_end(do.hosts, pool)
            fleet.pause(decision.wait)

    def _explain_flags(self) -> None:
        job = self.job
        if job.warm_spares == "on" and not job.is_restartable:
            self.console.info(
                "--warm-spares on: there is no restart that would use them (--max-restarts), so none are kept"
            )
        if job.step_timeout is not None and not job.program.reports_steps:
            self.console.info(
                f"--step-timeout {job.step_timeout:g}: the limit of a step, if the program reports steps; if not, no "
                f"rank may print a line for {max(job.step_timeout, LEAST_S):g} s"
            )

    def _await_end(self, hosts: Sequence[str], pool: HostPool) -> None:
        """Wait for the end of hosts that a system has asked to end, and that the job needs."""
        end = time.monotonic() + DEPART_S
        while pool.are_connected(hosts) and (left := end - time.monotonic()) > 0:
            if pool.is_woken(min(left, 1.0)) and (numbers := self.signals.take()):
                raise StoppedError(numbers[0])

    def _tell(self, decision: Decision, result: AttemptResult, report: Sequence[str]) -> None:
        """Say how the last attempt ended and what follows, here and in the record."""
        self._reports.append(report)
        self.recorder.update(step=result.reached, ranks=())
        self.console.print(report)
        if decision.why:
            self.console.info(decision.why)
        self._notify(decision, result, first_words(report))
        if decision.again:
            cause = self._attempts[-1].cause.value
            self.recorder.restarts(first_words(report) or cause)
        else:
            self._tell_first_cause()

    def _notify(self, decision: Decision, result: AttemptResult, first: str) -> None:
        """Send how the last attempt ended; the end of the job is sent when nothing of it is left."""
        last = self._attempts[-1]
        lost = result.lost.host if result.lost is not None and not last.host else ""
        about = {"about": (last.host or lost,), "rank": last.rank, "code": last.code}
        words = "; ".join(text for text in (first, decision.why) if text)
        if result.hang is not None and self.notifier is not None:
            self.notifier.send("hang", first, **about)
        if decision.again and self.notifier is not None:
            self.notifier.send("restart", words, **about)
        elif not decision.again:
            self.last_words = words or self.last_words

    def _notify_of_hosts(self, assignment: Assignment, members: Sequence[str]) -> None:
        """Send which hosts the next attempt goes without, if that is new."""
        first = working_hosts(self.job, self.backend.hosts)
        missing = tuple(host for host in first if host in members and host not in assignment.hosts)
        if self.notifier is not None and assignment.note and {*missing} - {*self._missing}:
            self.notifier.send("set_aside", assignment.note, about=missing)
        self._missing = missing

    @property
    def _reached(self) -> int:
        """The largest step that a rank has entered."""
        return max((attempt.reached for attempt in self._attempts), default=0)

    def _attempt(self, start: events.Start, pool: HostPool) -> AttemptResult:
        job, backend, console = start.assignment.job, self.backend, self.console
        number = job.first_attempt + len(self._attempts)
        reached, trains = self._reached, job.program.reports_steps
        console.flush()  # a detached launcher leaves its terminal here
        self.recorder.update(state="running", attempt=number)
        hosts, outer = start.assignment.hosts, backend.environment
        placed = placements(job, hosts, start.coordinator, outer, number, start.visible, start.cores, reached)
        has_others = job.total > job.nprocs
        self._logs.begin(number)
        return Attempt(
            job=job,
            pool=pool,
            logs=self._logs,
            console=console,
            signals=self.signals,
            recorder=self.recorder,
            key=self._key,
            address=start.coordinator.rpartition(":")[0].strip("[]"),
            spares=job.warm_spares if self.job.is_restartable else "off",
            fleet=None if self._fleet.fleet.is_fixed else self._fleet,
            times=self._times.setdefault(start.assignment.devices, StepTimes()),
            grow_after=reached if trains or reached else None,
            members=MemberHangs(job, number) if has_others else None,
        ).run(placed)

    def repeat_failure(self, notifier: Notifier) -> None:
        """Say the failure of the last attempt again, where a line about --notify has come behind it."""
        if notifier.said_late and self._reports and self._reports[-1] and self._attempts[-1].code not in OK_CODES:
            self.console.print(self._reports[-1][:1])

    def _tell_first_cause(self) -> None:
        """After failed restarts, report the first failure again."""
        causes = (Cause.INFRASTRUCTURE, Cause.USER)
        failures = [
            (attempt, report)
            for attempt, report in zip(self._attempts, self._reports, strict=True)
            if attempt.cause in causes and not attempt.failed_growth
        ]
        if len(failures) > 1 and failures[-1][0] is self._attempts[-1] and failures[0][1]:
            self.console.info(f"the first cause, of {len(self._attempts)} attempts:")
            self.console.print(failures[0][1])
