"""The controller: attempts at a job until one ends it, and the job's exit code."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_PREFLIGHT, EXIT_USAGE
from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.report import report_of
from roxxel_dist.launcher.control.restart import Cause, Ended, decide, ended
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.launcher.jobs.record import JobRecorder
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.output.logs import Logs
from roxxel_dist.launcher.preflight.select_hosts import HostSelector, NotReadyError, ReadyHosts, StoppedError
from roxxel_dist.launcher.spec import JobSpec, placements, working_hosts


@dataclass(frozen=True, kw_only=True)
class _Told:
    """An attempt that is over."""

    ended: Ended
    report: list[str]
    requested: int | None
    lost: bool


@dataclass(frozen=True, kw_only=True)
class Result:
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


def supervise(job: JobSpec, backend: Backend, register: JobRecorder) -> Result:
    """As `run`, and tells more of the end."""
    with register as entry:
        result = _supervise(job, backend, entry)
        entry.end(result.code)
        return result


def _supervise(job: JobSpec, backend: Backend, entry: JobRecorder) -> Result:
    told: list[_Told] = []
    with (
        Console(all_ranks=job.all_ranks, first=job.first_rank) as screen,
        SignalPipe(screen.say, stays=backend.heartbeat_timeout_s is not None) as signals,
    ):
        selector = HostSelector(job, backend, signals, screen)
        while True:
            try:
                ready = selector.select(len(told))
            except StoppedError as request:
                return _stopped(request.number, told, screen)
            except NotReadyError as problem:
                again = bool(told) or job.first_attempt > 0
                return Result(code=_not_ready(problem, told, screen), host_lost=again and problem.unreachable)
            reached = max((one.ended.reached for one in told), default=0)
            told.append(_attempt(ready, backend, len(told), reached, signals, screen, entry))
            decision = decide([one.ended for one in told], job.max_restarts)
            screen.write(told[-1].report)
            if decision.why:
                screen.say(decision.why)
            if not decision.again:
                if len(told) > 1:
                    _tell_first_cause(told, screen)
                last = told[-1]
                idle = last.ended.counts and last.ended.reached == 0
                return Result(code=decision.code, requested=last.requested, host_lost=last.lost, idle=idle)
            entry.update(state="restarting")
            if numbers := signals.wait(decision.wait):
                return _stopped(numbers[0], told, screen)


def _stopped(number: int, told: Sequence[_Told], screen: Console) -> Result:
    """A job that a signal ended while no rank ran."""
    screen.say(f"{signal.Signals(number).name}: not started{' again' * bool(told)}")
    drained = bool(told) and told[-1].ended.code == EXIT_DRAINED
    return Result(code=EXIT_DRAINED if drained else 128 + number, requested=number)


def _not_ready(problem: NotReadyError, told: Sequence[_Told], screen: Console) -> int:
    """The code of a job whose hosts were not ready; says why, and what had ended it before."""
    screen.write([f"roxxel-dist: {line}" for line in str(problem).splitlines()])
    screen.say(f"not started{' again' * bool(told)}: see above; `roxxel-dist doctor` looks at everything")
    if told:
        _tell_first_cause(told, screen)
    return EXIT_PREFLIGHT


def _attempt(
    ready: ReadyHosts,
    backend: Backend,
    number: int,
    reached: int,
    signals: SignalPipe,
    screen: Console,
    entry: JobRecorder,
) -> _Told:
    screen.flush()  # a detached launcher lets go of its terminal here
    job = ready.assignment.job
    count = job.first_attempt + number
    entry.update(state="running", attempt=count)
    placed = placements(
        job, ready.assignment.hosts, ready.coordinator, backend.environment, count, ready.visible, ready.cores, reached
    )
    logs = Logs(job, screen.say, count)
    begun = time.monotonic()
    attempt = Attempt(job, logs, screen, signals, entry)
    try:
        outcome = attempt.run(backend, placed)
    finally:
        logs.close()
    entry.update(step=outcome.reached)
    now = ended(outcome, seconds=time.monotonic() - begun, counts=job.command[0] == "train")
    report = report_of(job, outcome, logs, attempt.stack)
    refused = job.command[0] == "train" or logs.hold_refusals_alone
    if now.code == EXIT_USAGE and count == 0 and outcome.reached == 0 and refused:
        logs.remove()
    lost = outcome.lost is not None and outcome.lost.with_host
    return _Told(ended=now, report=report, requested=outcome.requested, lost=lost)


def _tell_first_cause(told: Sequence[_Told], screen: Console) -> None:
    """After restarts in vain: what it was that went wrong first."""
    failures = [one for one in told if one.ended.cause in (Cause.INFRASTRUCTURE, Cause.USER)]
    if len(failures) < 2 or failures[-1] is not told[-1] or not failures[0].report:
        return
    screen.say(f"the first cause, of {len(told)} attempts:")
    screen.write(failures[0].report)
