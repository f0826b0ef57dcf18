"""The controller: attempts at a job until one ends it, and the job's exit code."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_PREFLIGHT
from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.report import report_of
from roxxel_dist.launcher.control.restart import AttemptSummary, Cause, next_action, summary
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.launcher.jobs.record import JobRecorder
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.output.logs import Logs
from roxxel_dist.launcher.placement import placements, working_hosts
from roxxel_dist.launcher.preflight.select_hosts import HostSelector, NotReadyError, ReadyHosts, StoppedError
from roxxel_dist.launcher.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended."""

    code: int
    requested: int | None = None
    """The signal by which somebody asked for its end."""
    host_lost: bool = False
    """It could go on, with another host for one that is out of reach."""
    idle: bool = False
    """Its last attempt came to no step, though its program tells its steps."""


def run(job: JobSpec, backend: Backend, register: JobRecorder | None = None) -> int:
    """Run a job to its end and return its exit code. Call it from the main thread. `register` enters it as a job.

    Raises ValueError for a job that does not fit the hosts.
    """
    placements(job, working_hosts(job, backend.hosts), "", backend.environment)
    return supervise(job, backend, register or JobRecorder(job, backend)).code


def supervise(job: JobSpec, backend: Backend, register: JobRecorder) -> JobResult:
    """As `run`, and tells more of the end."""
    with register as entry:
        result = _supervise(job, backend, entry)
        entry.end(result.code)
        return result


def _supervise(job: JobSpec, backend: Backend, entry: JobRecorder) -> JobResult:
    attempts: list[AttemptSummary] = []
    with (
        Console(all_ranks=job.all_ranks, first=job.first_rank) as screen,
        SignalPipe(screen.info, stays=backend.heartbeat_timeout_s is not None) as signals,
    ):
        selector = HostSelector(job, backend, signals, screen)
        while True:
            try:
                ready = selector.select(len(attempts))
            except StoppedError as request:
                return _stopped(request.number, attempts, screen)
            except NotReadyError as problem:
                again = bool(attempts) or job.first_attempt > 0
                return JobResult(code=_not_ready(problem, attempts, screen), host_lost=again and problem.unreachable)
            reached = max((attempt.reached for attempt in attempts), default=0)
            last = _attempt(ready, backend, len(attempts), reached, signals, screen, entry)
            attempts.append(last)
            decision = next_action(attempts, job.max_restarts)
            screen.print(last.report)
            if decision.why:
                screen.info(decision.why)
            if not decision.again:
                _tell_first_cause(attempts, screen)
                return JobResult(
                    code=decision.code,
                    requested=last.requested,
                    host_lost=last.host_lost,
                    idle=last.counts and last.reached == 0,
                )
            entry.update(state="restarting")
            if numbers := signals.wait(decision.wait):
                return _stopped(numbers[0], attempts, screen)


def _stopped(number: int, attempts: Sequence[AttemptSummary], screen: Console) -> JobResult:
    """A job that a signal ended while no rank ran."""
    screen.info(f"{signal.Signals(number).name}: not started{' again' * bool(attempts)}")
    drained = bool(attempts) and attempts[-1].code == EXIT_DRAINED
    return JobResult(code=EXIT_DRAINED if drained else 128 + number, requested=number)


def _not_ready(problem: NotReadyError, attempts: Sequence[AttemptSummary], screen: Console) -> int:
    """The code of a job whose hosts were not ready; says why, and what had ended it before."""
    screen.print([f"roxxel-dist: {line}" for line in str(problem).splitlines()])
    screen.info(f"not started{' again' * bool(attempts)}: see above; `roxxel-dist doctor` looks at everything")
    _tell_first_cause(attempts, screen)
    return EXIT_PREFLIGHT


def _attempt(
    ready: ReadyHosts,
    backend: Backend,
    number: int,
    reached: int,
    signals: SignalPipe,
    screen: Console,
    entry: JobRecorder,
) -> AttemptSummary:
    job = ready.assignment.job
    count = job.first_attempt + number
    with ready.pool:
        screen.flush()  # a detached launcher lets go of its terminal here
        entry.update(state="running", attempt=count)
        outer, hosts = backend.environment, ready.assignment.hosts
        placed = placements(job, hosts, ready.coordinator, outer, count, ready.visible, ready.cores, reached)
        logs = Logs(job, screen.info, count)
        begun = time.monotonic()
        attempt = Attempt(job, ready.pool, logs, screen, signals, entry)
        try:
            outcome = attempt.run(placed)
        finally:
            logs.close()
    entry.update(step=outcome.reached)
    trains = job.command[0] == "train"
    report = report_of(job, outcome, logs, attempt.stack)
    return summary(outcome, seconds=time.monotonic() - begun, counts=trains, report=report)


def _tell_first_cause(attempts: Sequence[AttemptSummary], screen: Console) -> None:
    """After restarts in vain: what it was that went wrong first."""
    failures = [attempt for attempt in attempts if attempt.cause in (Cause.INFRASTRUCTURE, Cause.USER)]
    if len(failures) < 2 or failures[-1] is not attempts[-1] or not failures[0].report:
        return
    screen.info(f"the first cause, of {len(attempts)} attempts:")
    screen.print(failures[0].report)
