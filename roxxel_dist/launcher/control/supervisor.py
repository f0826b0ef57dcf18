"""The controller: attempts at a job until one ends it, what people read of each, and the job's exit code."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.inbox import Inbox
from roxxel_dist.launcher.control.index import forget_old
from roxxel_dist.launcher.control.members import MemberHangs
from roxxel_dist.launcher.control.notify import Notifier
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.driver import Driver, NotReadyError, StoppedError
from roxxel_dist.launcher.fleet.step import fleet_of
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Assignment, placements, working_hosts
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import LIBRARY_LOG, NOISE_PREFIXES, Console, Logs, shorten
from roxxel_dist.launcher.policy.hang import LEAST_S, Hang, StepTimes
from roxxel_dist.launcher.policy.outcome import (
    AttemptResult,
    AttemptSummary,
    Cause,
    Decision,
    LateRank,
    RankExit,
    exit_code,
    first_failure,
    how,
    is_cut_off,
    summary,
)
from roxxel_dist.launcher.preflight.run import known_failures
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_HANG,
    EXIT_PREFLIGHT,
    EXIT_TIMEOUT_TEXT,
    EXIT_USAGE,
    OK_CODES,
)
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
            notifier = Notifier(job.notify, lambda: recorder.entry, console.info, job.limits) if job.notify else None
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
        if not self._attempts or not unreachable:
            again = " again" * bool(self._attempts)
            return f"not started{again}: correct what is above; `roxxel-dist doctor` checks all hosts"
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
                    fleet.await_end(do.hosts)
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

    def _tell(self, decision: Decision, result: AttemptResult, report: Sequence[str]) -> None:
        """Say how the last attempt ended and what follows, here and in the record."""
        self._reports.append(report)
        self.recorder.update(step=result.reached, ranks=())
        self.console.print(report)
        if decision.why:
            self.console.info(decision.why)
        self._notify(decision, result, first_words(report))
        if decision.again:
            self.recorder.restarts(first_words(report) or self._attempts[-1].cause.value)
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

    def _attempt(self, start: events.Start, pool: HostPool) -> AttemptResult:
        job, hosts = start.assignment.job, start.assignment.hosts
        number = job.first_attempt + len(self._attempts)
        reached = max((attempt.reached for attempt in self._attempts), default=0)
        self.console.flush()  # a detached launcher leaves its terminal here
        self.recorder.update(state="running", attempt=number)
        outer = self.backend.environment
        placed = placements(job, hosts, start.coordinator, outer, number, start.visible, start.cores, reached)
        self._logs.begin(number)
        return Attempt(
            job=job,
            pool=pool,
            logs=self._logs,
            console=self.console,
            signals=self.signals,
            recorder=self.recorder,
            key=self._key,
            address=start.coordinator.rpartition(":")[0].strip("[]"),
            spares=job.warm_spares if self.job.is_restartable else "off",
            fleet=None if self._fleet.fleet.is_fixed else self._fleet,
            times=self._times.setdefault(start.assignment.devices, StepTimes()),
            grow_after=reached if job.program.reports_steps or reached else None,
            members=MemberHangs(job, number) if job.total > job.nprocs else None,
        ).run(placed)

    def repeat_failure(self, notifier: Notifier) -> None:
        """Say the failure of the last attempt again, where a line about --notify has come behind it."""
        if notifier.said_late and self._reports and self._reports[-1] and self._attempts[-1].code not in OK_CODES:
            self.console.print(self._reports[-1][:1])

    def _tell_first_cause(self) -> None:
        """After failed restarts, report the first failure again."""
        causes = (Cause.INFRASTRUCTURE, Cause.USER)
        ended = zip(self._attempts, self._reports, strict=True)
        failures = [one for one in ended if one[0].cause in causes and not one[0].failed_growth]
        if len(failures) > 1 and failures[-1][0] is self._attempts[-1] and failures[0][1]:
            self.console.info(f"the first cause, of {len(self._attempts)} attempts:")
            self.console.print(failures[0][1])


STACK_LINES, MOST_STACKS = 60, 3
"""Lines of a stack, and stacks of ranks that did not end in time."""
TAIL_WITHOUT_TRACEBACK = 15
LAST_LINES = ", last lines:"
CRASH_HEADERS = ("Traceback (most recent call last)", "Fatal Python error")


def report_of(job: JobSpec, result: AttemptResult, logs: Logs) -> list[str]:
    """The lines about an attempt; none where all went well."""
    failure, code = first_failure(result), exit_code(result)
    before: list[str] = []
    if code == 0 or (result.differs is not None and code == EXIT_PREFLIGHT):
        return [f"roxxel-dist: {result.differs.text}"] if code and result.differs is not None else []
    if code == EXIT_DRAINED and result.requested is None:
        why = f"; {result.host_change}" if result.host_change else ", without a request to the launcher"
        text = saved(result) + why
    elif code == EXIT_DRAINED:
        text = f"stopped on request; {saved(result)}"
    elif result.hang is not None and code == EXIT_HANG:
        rank = result.hang.rank
        before = [f"roxxel-dist: {hang_report(result.hang, result.hang_host)}", *environment_report(result.suspects)]
        if result.stack:
            text = f"stack of rank {rank}; its log is {logs.path(rank)}; the logs have the stacks of the others too:"
            return [*before, f"roxxel-dist: {text}", *result.stack[-STACK_LINES:]]
        text = f"rank {rank} gave no stack (stopped, or no Python); the logs have those of the others"
    elif failure is not None:
        tail = logs.tail(failure.rank)
        last = next(reversed(tail or logs.tail(0)), "")
        if failure.code == EXIT_USAGE and last and (job.program.reports_steps or last.startswith("roxxel-dist: ")):
            shown = job.all_ranks or failure.rank == 0 or set(tail[-1:]) & set(logs.tail(0))
            return [] if shown else tail
        if failure.code != EXIT_HANG or not any(EXIT_TIMEOUT_TEXT in line for line in tail[-1:]):
            lines = failure_report(failure, tail, logs.path(failure.rank))
            return [*lines[:1], *left_before(result, failure), *lines[1:]]
        text = late_report(result, job.exit_timeout)
    elif result.lost is not None:
        for end in [end for end in result.exits if end.code not in OK_CODES and not end.killed_by_us][:1]:
            before = failure_report(end, logs.tail(end.rank), logs.path(end.rank))
        text = ("no host is to blame, for the connections to all ended: " * is_cut_off(result)) + result.lost.text
    elif result.late:
        return [f"roxxel-dist: {late_report(result, job.exit_timeout)}", *late_stacks(result, logs)]
    else:
        killed = ", ".join(str(end.rank) for end in result.exits if end.killed_by_us)
        request = None if result.requested is None else how(-result.requested)
        text = f"stopped on request ({request}) before the ranks had saved" if request else f"rank {killed} was killed"
    return [*before, f"roxxel-dist: {text}"]


def left_before(result: AttemptResult, failure: RankExit) -> list[str]:
    """The words that ranks had ended well before one failed, which may be why: the others cannot go on without them."""
    before = takewhile(lambda end: end is not failure, result.exits)
    ended = sorted(end.rank for end in before if end.code == 0 and not end.killed_by_us)
    names = ", ".join(map(str, ended))
    text = f"roxxel-dist: rank {names} had ended with 0 before: all ranks must do the same number of steps"
    return [text] if ended else []


def saved(result: AttemptResult) -> str:
    """The ends of the ranks that were asked to save: only the code 42 says that a rank has saved."""
    others = [
        f"rank {end.rank}: {'killed after the grace period' if end.killed_by_us else how(end.code)}"
        for end in result.exits
        if end.code not in OK_CODES
    ]
    count = len(result.exits)
    some = f"{count - len(others)} of {count} ranks saved and exited ({'; '.join(others)})"
    return some if others else f"every rank saved and exited ({EXIT_DRAINED})"


def failure_report(failure: RankExit, tail: Sequence[str], log: Path) -> list[str]:
    """The last lines on the screen: the rank that failed first, where its log is, and its last lines."""
    step = f", in step {failure.step}" if failure.step > 0 else ""
    who = f"rank {failure.rank} failed first: {how(failure.code)}{step} (host {failure.host}, pid {failure.pid})"
    if not tail:
        return [f"roxxel-dist: {who}; it printed nothing"]
    return [f"roxxel-dist: {who}; log {log}{LAST_LINES}", *last_words(tail)]


def first_words(report: Sequence[str]) -> str:
    """The first line of a report, as one that stands alone; empty if there is none."""
    return report[0].removeprefix("roxxel-dist: ").removesuffix(LAST_LINES) if report else ""


def last_words(tail: Sequence[str]) -> Sequence[str]:
    """The lines, of the last ones of a rank, that show why it ended: from its traceback on, if there is one.

    The threads of jax live a moment longer than the program, and say what they lost by its end: their lines within a
    traceback are left out, and behind its exception all that follows the first of them.
    """
    lines = [line for line in tail if not NOISE_PREFIXES.match(line)] or tail
    start = next((number for number, line in enumerate(lines) if line.startswith(CRASH_HEADERS)), None)
    if start is None:
        return lines[-TAIL_WITHOUT_TRACEBACK:]
    words: list[str] = []
    for line in lines[start:]:
        if not LIBRARY_LOG.match(line):
            words.append(line)
        elif not words[-1][:1].isspace() and not words[-1].startswith(CRASH_HEADERS):  # the exception, at the margin
            break
    return words


def late_report(result: AttemptResult, exit_timeout: float) -> str:
    """The ranks that still ran when others had ended."""
    late = f"{exit_timeout:g} s later and was killed; --exit-timeout sets this limit"
    blamed = to_blame(result.stayed)
    if blamed and blamed[0].exits:
        names = ", ".join(str(rank.rank) for rank in blamed)
        return f"the program of rank {names} had ended, but its process was still there {late}"
    stayed = blamed or [end for end in result.exits if end.killed_by_us]
    names = ", ".join(f"{end.rank}" + (f" (in step {end.step})" if end.step > 0 else "") for end in stayed)
    if not names:
        return f"a program had ended, but its process was still there {late}"
    ranks = [end.rank for end in result.exits if end.code in (*OK_CODES, EXIT_HANG)]
    ended = [*ranks, *(rank.rank for rank in result.stayed if rank.exits)]
    return f"rank {ended[0]} had ended, but rank {names} still ran {late}"


def to_blame(stayed: Sequence[LateRank]) -> Sequence[LateRank]:
    """The ranks that are to blame for a late end: their programs still ran, or else they did not wait for others."""
    running = [late for late in stayed if not late.exits]
    return running or [late for late in stayed if not late.waits] or stayed


def late_stacks(result: AttemptResult, logs: Logs) -> list[str]:
    """The places where ranks were that did not end in time: of the first ones their stacks."""
    lines: list[str] = []
    blamed = to_blame(result.stayed)
    for late in blamed[:MOST_STACKS]:
        who = f"roxxel-dist: rank {late.rank} (host {late.host}, pid {late.pid}; log {logs.path(late.rank)})"
        if late.exits:
            who += ": a thread that is no daemon, or an exit handler, keeps its process"
        if late.stack:
            lines += [f"{who}; stack:", *late.stack[-STACK_LINES:]]
        else:
            lines.append(f"{who} gave no stack (stopped, or no Python)")
    if len(blamed) > MOST_STACKS:
        lines.append(f"roxxel-dist: and {len(blamed) - MOST_STACKS} more ranks")
    return lines


def environment_report(suspects: Mapping[str, str]) -> list[str]:
    """Lines about variables of ranks that hang, which may keep them from each other; none where there are none."""
    shown = ", ".join(f"{name}={shorten(value)}" for name, value in suspects.items())
    return [f"roxxel-dist: the environment of the ranks can part them: {shown}"] * bool(suspects)


def hang_report(hang: Hang, host: str) -> str:
    """The rank that is stuck, and where."""
    in_step = hang.activity == "step"
    where = f"in step {hang.step}" if in_step else f"busy with {hang.activity!r} after step {hang.step}"
    flag = "--step-timeout sets it" if in_step else f"that of {hang.activity!r}"
    if hang.absent:
        where = "it has not come to jax.distributed.initialize, where others wait for it"
        flag = "that of 'join'"
    elif not hang.activity:
        where, flag = "no rank has printed a line", "--step-timeout sets it for a program that reports no steps"
    phase = f", phase {hang.phase}" if hang.phase else ""
    guess = f"; {hang.tied} ranks stand there and none is behind, so it may be another" if hang.tied > 1 else ""
    if hang.alone:
        guess += "; ranks of other hosts have launchers of their own, so see there for one that is further behind"
    return (
        f"rank {hang.rank} on host {host} is stuck: {where}{phase}, for {hang.seconds:.0f} s "
        f"(limit {hang.limit:.0f} s; {flag}){guess}"
    )
