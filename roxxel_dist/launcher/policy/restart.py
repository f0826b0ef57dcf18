"""Whether a job that ended is started again: a pure function of how its attempts ended, and the words for it.

Decision 22.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Literal

from roxxel_dist.launcher.policy.outcome import AttemptResult, as_code, exit_code, first_failure, is_cut_off
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_FILES,
    EXIT_LOST_RANK,
    EXIT_NOT_STARTED,
    EXIT_PORT,
    EXIT_RUNTIME,
    EXIT_USAGE,
    SCHEDULER_SIGNALS,
)

EXIT_GIVEN_UP = 75
"""Restarts were made, and came to nothing."""
BACKOFF_S = 0.5
BACKOFF_TIMES = 4
BACKOFF_MOST_S = 60.0
BRIEF_S = 60.0
LONG_S = 3600.0
"""A program that reports no steps has got on where an attempt lasted so long: nothing else is known of it."""
REPEAT_S = 86_400.0
"""Failures of one host that are further apart have nothing to do with each other."""
IDLE_PREEMPTIONS = 10
"""Preemptions in a row, each within a minute and without a new step, after which it is no preemption any more."""

PREEMPTED = {EXIT_DRAINED, *(128 + number for number in (signal.SIGTERM, signal.SIGHUP, *SCHEDULER_SIGNALS))}
NOT_OF_A_RANK = {EXIT_PORT, EXIT_FILES, EXIT_LOST_RANK}
"""Codes by which a rank reports a failure that is not its own: the same rank may end with them again and again."""
INFRASTRUCTURE = (
    NOT_OF_A_RANK
    | {EXIT_RUNTIME, EXIT_NOT_STARTED}
    | {128 + number for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)}
)


OF_THE_COMMAND = {EXIT_USAGE, 126, 127}
"""A command that is wrong, cannot be run or is not found (as a shell says it): no restart changes that."""
RestartOn = Literal["infrastructure", "any"]


class Cause(Enum):
    """Causes of the end of an attempt."""

    DONE = "done"
    REQUESTED = "stopped on request"
    PREEMPTED = "preempted"
    INFRASTRUCTURE = "an infrastructure failure"
    USER = "an error of the program"


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """One attempt, as far as it matters for the next one and for the end of the job."""

    cause: Cause
    code: int
    """The exit code of the job, if this was its last attempt."""
    rank: int | None = None
    """The rank that failed first, or that hung."""
    host: str = ""
    """The host of that rank."""
    step: int = 0
    """The step that rank had entered."""
    reached: int = 0
    """The largest step that any rank had entered."""
    saved: int = 0
    """The largest step of which it saved a checkpoint, as far as the program reports that."""
    counts: bool = False
    """Whether the program reports its steps: if not, a `reached` of 0 means nothing."""
    seconds: float = 0.0
    """How long the attempt lasted."""
    changes_hosts: bool = False
    """Whether it ended because hosts were to join the job or to leave it."""
    failed_growth: str = ""
    """Hosts that were taken in for it and with which it came to nothing: it counts for nothing."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next act: another attempt in `wait` seconds, or the end with `code`. `why` is for people, or empty."""

    again: bool
    why: str = ""
    wait: float = 0.0
    code: int = 0
    set_aside: str = ""
    """A host whose ranks fail again and again: the next attempt does without it."""


def classify(result: AttemptResult) -> Cause:
    """Classify why an attempt ended. `bash -c` reports a signal as 128 + s, and is understood."""
    code = exit_code(result)
    if result.requested is not None:
        return Cause.REQUESTED
    if code == 0:
        return Cause.DONE
    is_preempted = result.lost is not None and (result.lost.host in result.departing or is_cut_off(result))
    if result.hang is not None or (result.lost is not None and not is_preempted) or result.differs is not None:
        return Cause.INFRASTRUCTURE
    if result.host_change or is_preempted:  # however a program ends that is asked to
        return Cause.PREEMPTED
    if (failure := first_failure(result)) is not None:
        code = as_code(failure.code)
    if code in PREEMPTED:
        return Cause.PREEMPTED
    return Cause.INFRASTRUCTURE if code in INFRASTRUCTURE else Cause.USER


def summary(result: AttemptResult, *, seconds: float, counts: bool) -> AttemptSummary:
    """An attempt for `next_action`. `counts`: the program is known to report its steps, even if it has not yet."""
    failure = first_failure(result)
    culprit = None if failure is not None and failure.code in NOT_OF_A_RANK else result.hang or failure
    if result.differs is not None:  # an edit in the middle of a start: the next one may find the same code everywhere
        differs = result.differs
        found = {"rank": differs.rank, "host": differs.host, "reached": result.reached, "counts": True}
        return AttemptSummary(cause=classify(result), code=exit_code(result), seconds=seconds, **found)
    return AttemptSummary(
        cause=classify(result),
        code=exit_code(result),
        rank=culprit.rank if culprit else None,
        host="" if culprit is None else result.hang_host if result.hang else getattr(culprit, "host", ""),
        step=culprit.step if culprit else 0,
        reached=result.reached,
        saved=result.saved,
        counts=counts or result.reached > 0,
        seconds=seconds,
        changes_hosts=bool(result.host_change) and not result.departing,
    )


def has_come_to_nothing(attempt: AttemptSummary, before: int) -> bool:
    """Whether an attempt failed before a rank entered a step beyond `before`; where steps are unknown, in a minute."""
    if attempt.cause not in (Cause.INFRASTRUCTURE, Cause.USER):
        return False
    return attempt.reached <= before if attempt.counts or before else attempt.seconds < BRIEF_S


def is_failure(attempt: AttemptSummary, restart_on: RestartOn) -> bool:
    """Whether an attempt ended by what a restart may mend."""
    if attempt.failed_growth:
        return False
    if restart_on == "any" and attempt.cause is Cause.USER:
        return attempt.code not in OF_THE_COMMAND
    return attempt.cause is Cause.INFRASTRUCTURE


def next_action(
    attempts: Sequence[AttemptSummary],
    max_restarts: int,
    restart_on: RestartOn = "infrastructure",
    can_replace: Callable[[str], bool] = lambda host: False,
) -> Decision:
    """Decide what follows after these attempts.

    Args:
        attempts: at least one, the newest last.
        max_restarts: restarts after failures since the job got on last; 0: none, not even after a preemption.
        restart_on: which ends are failures.
        can_replace: whether the job can go on without a host.
    """
    last = attempts[-1]
    if last.failed_growth and max_restarts:
        why = f"the job goes on without {last.failed_growth}, as before; restart immediately (it counts for nothing)"
        return Decision(again=True, why=why)
    attempts = [attempt for attempt in attempts if not attempt.failed_growth]
    if max_restarts == 0 or not (last.cause is Cause.PREEMPTED or is_failure(last, restart_on)):
        return Decision(again=False, code=last.code)
    if last.cause is Cause.PREEMPTED:
        return _after_preemption(attempts)
    return _after_failure(attempts, max_restarts, restart_on, can_replace)


def _after_failure(
    attempts: Sequence[AttemptSummary], max_restarts: int, restart_on: RestartOn, can_replace: Callable[[str], bool]
) -> Decision:
    """What follows after these attempts, of which the last is a failure.

    A rank that fails twice in the same step, with no new step in between, would fail there again, unless the fault is
    its host's, and another host is there: a rank that has failed there on two hosts is tried on no third one. A step
    that another attempt has passed is no such place, and step 0 stands for a start: a program that has entered a
    step can start.
    """
    since = _since_progress(attempts)
    failures = [attempt for attempt in since if is_failure(attempt, restart_on)]
    last = failures[-1]
    same_host = _failures_of_host(attempts, restart_on)
    replaced = last.host if same_host > 1 and can_replace(last.host) else ""
    same = _same_failures(attempts, restart_on) if last.counts and last.rank is not None else ()
    others = [attempt.reached for attempt in attempts[:-1] if attempt not in same]
    can_pass = max(others, default=0) > last.step + bool(last.step)
    of_program = any(attempt.host != last.host for attempt in same) or not replaced
    if same and of_program and not can_pass:
        place = f"in step {last.step}" if last.step else "before its first step"
        why = (
            f"not started again: rank {last.rank} failed {place} in an earlier attempt too, so a restart would not help"
        )
        return Decision(again=False, code=last.code, why=why)
    if len(failures) > max_restarts:
        got_on = "came to a new step" if last.counts or last.reached else f"lasted {LONG_S / 3600:g} h"
        why = f"no restart is left: --max-restarts is {max_restarts}, and since the first of them no attempt {got_on}"
        return Decision(again=False, code=EXIT_GIVEN_UP, why=why)
    wait = _backoff(len(since) - 1)
    why = f"restart {len(failures)} of {max_restarts}, {_when(wait)}"
    if len(since) == 1 and any(is_failure(attempt, restart_on) for attempt in attempts[:-1]):
        why += " (the job got on, so the count began anew)"
    if replaced:
        why += f", without host {replaced}, whose ranks failed in {same_host} attempts"
    return Decision(again=True, wait=wait, why=why, set_aside=replaced)


def _since_progress(attempts: Sequence[AttemptSummary]) -> Sequence[AttemptSummary]:
    """The attempts from the last one on that got on; all, where none did: the first has nothing to be new beside.

    An attempt gets on that enters a new step, or saves one. Saves alone would not do: where failures are frequent, some
    attempts in a row end before their first save by chance. A program that fails at one place comes to no new step.
    """
    start, reached, saved = 0, 0, 0
    for number, attempt in enumerate(attempts):
        is_long = not (attempt.counts or attempt.reached) and attempt.seconds >= LONG_S
        if attempt.reached > reached or attempt.saved > saved or is_long:
            start = number
        reached, saved = max(reached, attempt.reached), max(saved, attempt.saved)
    return attempts[start:]


def _failures_of_host(attempts: Sequence[AttemptSummary], restart_on: RestartOn) -> int:
    """In how many attempts of the last day ranks of the host failed whose rank failed last.

    A host or an agent that was lost has no rank: such things happen at any time.
    """
    host, count, seconds = attempts[-1].host, 0, 0.0
    if attempts[-1].rank is None or not host:
        return 0
    for attempt in reversed(attempts):
        count += attempt.rank is not None and attempt.host == host and is_failure(attempt, restart_on)
        seconds += attempt.seconds
        if seconds > REPEAT_S:
            break
    return count


def _same_failures(attempts: Sequence[AttemptSummary], restart_on: RestartOn) -> Sequence[AttemptSummary]:
    """Earlier failures of the rank that failed last, in the same step, with no new step since then.

    One step more is none: the others may or may not enter the next step before they notice a rank that fails.
    """
    last, found = attempts[-1], list[AttemptSummary]()
    before, since = [*accumulate((attempt.reached for attempt in attempts), max)], last.reached
    for number in reversed(range(len(attempts) - 1)):
        attempt = attempts[number]
        if since > before[number] + 1:  # and so it is after all earlier ones
            break
        if is_failure(attempt, restart_on) and (attempt.rank, attempt.step) == (last.rank, last.step):
            found.append(attempt)
        since = max(since, attempt.reached)
    return found


def _when(wait: float) -> str:
    return f"in {wait:g} s" if wait else "immediately"


def _after_preemption(attempts: Sequence[AttemptSummary]) -> Decision:
    """Preemptions are free; but a job that ends repeatedly before it has done anything counts as failed."""
    if attempts[-1].changes_hosts:
        return Decision(again=True, why="restart immediately, with other hosts (it counts for nothing)")
    attempts = [attempt for attempt in attempts if not attempt.changes_hosts]
    idle = 0
    for number in reversed(range(len(attempts))):
        attempt = attempts[number]
        new_step = attempt.reached > max((earlier.reached for earlier in attempts[:number]), default=0)
        if attempt.cause is not Cause.PREEMPTED or attempt.seconds >= BRIEF_S or new_step:
            break
        idle += 1
    if idle >= IDLE_PREEMPTIONS:
        why = f"not started again: preempted {idle} times in a row within a minute, without a new step"
        return Decision(again=False, code=attempts[-1].code, why=why)
    wait = _backoff(idle)
    return Decision(again=True, wait=wait, why=f"preempted; restart {_when(wait)} (it counts for nothing)")


def backoff(first_s: float, times: int, most_s: float, factor: float = 2.0) -> float:
    """Seconds to wait: `first_s`, made longer by `factor` so many times (it may be thousands), and `most_s` at most."""
    return min(most_s, first_s * factor ** min(times, 64))


def _backoff(times: int) -> float:
    """Seconds to wait after so many failed attempts; none after 0."""
    return backoff(BACKOFF_S, times - 1, BACKOFF_MOST_S, BACKOFF_TIMES) if times else 0.0
