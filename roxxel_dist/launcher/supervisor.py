"""The controller: attempts at a job until one ends it, and the job's exit code."""

import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roxxel_dist.cluster.contract import EXIT_DRAINED, EXIT_USAGE
from roxxel_dist.launcher.attempt import Attempt, say, write_lines
from roxxel_dist.launcher.job import JobSpec, Placement, coordinator_port, placements
from roxxel_dist.launcher.link import Backend
from roxxel_dist.launcher.logs import Logs, Screen
from roxxel_dist.launcher.report import report_of
from roxxel_dist.launcher.restart import Cause, Ended, decide, ended
from roxxel_dist.launcher.signals import Signals


@dataclass(frozen=True, kw_only=True)
class _Told:
    """An attempt that is over."""

    ended: Ended
    report: list[str]


def run(job: JobSpec, backend: Backend) -> int:
    """Run a job to its end and return its exit code. Call it from the main thread.

    Raises ValueError, before anything was started, where the port of the job is in use or its GPUs do not divide.
    """
    placed = _place(job, backend, 0, job.port)
    told: list[_Told] = []
    with Signals() as signals, Screen(all_ranks=job.all_ranks) as screen:
        while True:
            told.append(_attempt(job, backend, placed, len(told), signals, screen))
            decision = decide([one.ended for one in told], job.max_restarts)
            write_lines(told[-1].report)
            if decision.why:
                say(decision.why)
            if not decision.again:
                if len(told) > 1:
                    _tell_first_cause(told)
                return decision.code
            stopped = _wait(decision.wait, signals)
            if stopped is not None:
                say(f"{signal.Signals(stopped).name}: not started again")
                return EXIT_DRAINED if told[-1].ended.code == EXIT_DRAINED else 128 + stopped
            placed = _place(job, backend, len(told), None)


def _place(job: JobSpec, backend: Backend, attempt: int, port: int | None) -> list[Placement]:
    """The ranks of one attempt. Each gets a new port: a rank of the last one may live on behind a cut link."""
    coordinator = f"{backend.coordinator_host}:{coordinator_port(port)}"
    return placements(job, backend.hosts, coordinator, os.environ, attempt)


def _attempt(
    job: JobSpec, backend: Backend, placed: Sequence[Placement], number: int, signals: Signals, screen: Screen
) -> _Told:
    logs = Logs(job, number)
    begun = time.monotonic()
    attempt = Attempt(job, logs, screen, signals)
    try:
        outcome = attempt.run(backend, placed)
    finally:
        logs.close()
    now = ended(outcome, seconds=time.monotonic() - begun, counts=job.command[0] == "train")
    report = report_of(job, outcome, logs, attempt.stack)
    if now.code == EXIT_USAGE and number == 0:
        logs.remove()
    return _Told(ended=now, report=report)


def _wait(seconds: float, signals: Signals) -> int | None:
    """Pause before a restart; the signal that ended the pause, if one did."""
    ready, _, _ = select.select([signals.fd], [], [], seconds)
    return os.read(signals.fd, 1)[0] if ready else None


def _tell_first_cause(told: Sequence[_Told]) -> None:
    """After restarts in vain: what it was that went wrong first."""
    failures = [one for one in told if one.ended.cause in (Cause.INFRASTRUCTURE, Cause.USER)]
    if len(failures) < 2 or failures[-1] is not told[-1] or not failures[0].report:
        return
    say(f"the first cause, of {len(told)} attempts:")
    write_lines(failures[0].report)
