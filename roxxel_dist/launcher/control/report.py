"""What a person reads when an attempt is over: who, where, why, and where to read more."""

from collections.abc import Sequence

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_HANG, EXIT_TIMEOUT_TEXT, EXIT_USAGE, OK_CODES
from roxxel_dist.launcher.control.hang import hang_report
from roxxel_dist.launcher.control.outcome import (
    AttemptResult,
    RankExit,
    exit_code,
    failure_report,
    first_failure,
    how,
    late_report,
)
from roxxel_dist.launcher.output.logs import Logs
from roxxel_dist.launcher.spec import JobSpec

STACK_LINES = 60


def report_of(job: JobSpec, outcome: AttemptResult, logs: Logs, stack: Sequence[str]) -> list[str]:
    """The lines about an attempt; none where all went well. `stack` is that of the rank that hung."""
    failure, code = first_failure(outcome), exit_code(outcome)
    if code == 0:
        return []
    if code == EXIT_DRAINED:
        if outcome.requested is None:
            return _said(f"the ranks saved and left ({EXIT_DRAINED}), and nobody had asked the launcher for it")
        return _said("stopped on request; every rank saved and left")
    if outcome.hang is not None and code == EXIT_HANG:
        return _hung(outcome, logs, stack)
    return _failed(job, outcome, failure, logs) if failure is not None else _ended(job, outcome, logs)


def _failed(job: JobSpec, outcome: AttemptResult, failure: RankExit, logs: Logs) -> list[str]:
    tail = logs.tail(failure.rank)
    words = tail or logs.tail(0)
    if failure.code == EXIT_USAGE and words and (job.command[0] == "train" or words[-1].startswith("roxxel-dist: ")):
        shown = job.all_ranks or failure.rank == 0 or set(tail[-1:]) & set(logs.tail(0))
        return [] if shown else tail
    if failure.code == EXIT_HANG and any(EXIT_TIMEOUT_TEXT in line for line in tail[-1:]):
        return _said(late_report(outcome, job.exit_timeout))
    return failure_report(failure, tail, logs.path(failure.rank))


def _ended(job: JobSpec, outcome: AttemptResult, logs: Logs) -> list[str]:
    """Where no rank failed by itself."""
    if outcome.lost is not None:
        others = [end for end in outcome.exits if end.code not in OK_CODES and not end.killed_by_us][:1]
        words = [line for end in others for line in failure_report(end, logs.tail(end.rank), logs.path(end.rank))]
        return [*words, *_said(outcome.lost.text)]
    if outcome.late:
        return _said(late_report(outcome, job.exit_timeout))
    return _said(f"stopped on request ({how(-(outcome.requested or 0))}) before the ranks had saved")


def _hung(outcome: AttemptResult, logs: Logs, stack: Sequence[str]) -> list[str]:
    assert outcome.hang is not None
    rank = outcome.hang.rank
    lines = _said(hang_report(outcome.hang, outcome.hang_host))
    if not stack:
        return lines + _said(f"rank {rank} gave no stack (stopped, or no Python); the logs have those of the others")
    head = _said(f"stack of rank {rank}; its log is {logs.path(rank)}; the logs have the stacks of the others too:")
    return [*lines, *head, *stack[-STACK_LINES:]]


def _said(text: str) -> list[str]:
    return [f"roxxel-dist: {text}"]


def count(number: int, what: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {what}{'s' * (number != 1)}"
