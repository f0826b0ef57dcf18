"""What the end of an attempt means: which rank failed first, one exit code, and whether another attempt follows.

Pure functions of how the ranks ended, and the words for it. Decision 22.
"""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Literal

from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_FILES,
    EXIT_GIVEN_UP,
    EXIT_HANG,
    EXIT_LOST_RANK,
    EXIT_NOT_STARTED,
    EXIT_PORT,
    EXIT_PREFLIGHT,
    EXIT_RUNTIME,
    EXIT_USAGE,
    OK_CODES,
    SCHEDULER_SIGNALS,
)

IN_SHUTDOWN = re.compile(r'distributed\.py", line \d+ in shutdown')
"""A frame of a stack in which jax waits for the other ranks."""
FOLLOWING = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)
"""Signals by which a rank ends because of another: jax aborts when the coordinator is gone."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of one rank."""

    rank: int
    host: str
    pid: int
    code: int
    """Negative: the signal that killed it."""
    killed_by_us: bool
    """Killed by the launcher; its code says nothing."""
    step: int
    """The step it had entered; 0 when it never reported one."""


@dataclass(frozen=True, kw_only=True)
class HostLost:
    """An agent that is gone, or out of reach: its ranks are dead, or will be when it has received nothing for long."""

    host: str
    code: int
    """The exit code of a job that ends by it."""
    text: str
    """A description for the user."""
    last_seen: float = 0.0
    """The time of its last message, by the launcher's clock."""
    with_host: bool = False
    """The host is out of reach; an agent that ended by itself leaves a host that can be used."""
    gone_by: float = 0.0
    """The time when its ranks have ended, wherever they are, by the launcher's clock; 0: they have."""
    by_link: bool = False
    """The near end of its connection ended, so nothing is known of the host."""
    died: bool = False
    """The agent ended before its ranks: no rank can have caused that."""


@dataclass(frozen=True, kw_only=True)
class CodeDiffers:
    """A rank that runs other sources than another one."""

    rank: int
    host: str
    text: str
    """A description for the user."""


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A rank that still ran when its time to end was over."""

    rank: int
    host: str
    pid: int
    step: int
    """The step it had entered; 0 when it never reported one."""
    exits: bool
    """Its program has ended: something keeps its process, or it waits for others."""
    stack: Sequence[str] = ()
    """Empty where it gave none."""

    @property
    def waits(self) -> bool:
        """Whether it waits for others, in the end of jax.distributed."""
        return self.exits and any(IN_SHUTDOWN.search(line) for line in self.stack)


@dataclass(kw_only=True)
class AttemptResult:
    """The facts that determine the exit code of a job, and the report about it."""

    exits: Sequence[RankExit] = field(default_factory=list)
    """The ends of the ranks, in their order."""
    requested: int | None = None
    """The signal that asked the launcher to stop."""
    late: bool = False
    """Ranks were killed because they stayed after another had ended well."""
    stayed: Sequence["LateRank"] = ()
    """Those ranks, in order."""
    lost: HostLost | None = None
    """The first agent that was lost before its ranks had ended."""
    hosts: int = 0
    """How many had ranks."""
    cut: set[str] = field(default_factory=set)
    """Hosts whose connection ended here."""
    gone_by: dict[str, float] = field(default_factory=dict)
    """`HostLost.gone_by` of each host that was lost."""
    failed: float = 0.0
    """The time of the first report of a failed rank, by the launcher's clock."""
    hang: Hang | None = None
    """A rank did not go on within its limit; all were killed."""
    hang_host: str = ""
    stack: Sequence[str] = ()
    """The stack of the rank that hung."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks that may keep them from each other."""
    differs: CodeDiffers | None = None
    """Two ranks ran different sources; all were killed."""
    reached: int = 0
    """The largest step that any rank had entered."""
    saved: int = 0
    """The largest step of which rank 0 has reported a checkpoint."""
    departing: list[str] = field(default_factory=list)
    """Hosts whose system asked them to end while the job goes on: a preemption, a reboot."""
    host_change: str = ""
    """How the job goes on, where all were asked to save and leave because hosts join or leave it; else empty."""


def is_cut_off(result: AttemptResult) -> bool:
    """Whether the connections of all hosts ended: what they all go through, such as an API server, was replaced."""
    return 1 < result.hosts == len(result.cut)


def is_drain(result: AttemptResult) -> bool:
    """Whether all ranks were asked to save and leave, for whatever reason: until the grace is over, the end of one rank
    is no reason to end the others, which may be saving."""
    return result.requested is not None or bool(result.host_change)


def first_failure(result: AttemptResult) -> RankExit | None:
    """The rank whose end is the job's: the first that failed by itself. A rank that a requested stop ended has not.

    The first failure ends all ranks, so if several failed by themselves, they did so within moments, and one that
    crashed is the cause of one that gave up: it closes its connections before its end can be seen. A lost host is also
    a cause if it was already silent, or if its agent died: its earlier messages may be read after the failure.
    """
    failures = [end for end in result.exits if end.code not in OK_CODES and not end.killed_by_us]
    if not failures or failures[0].code == EXIT_USAGE:
        return failures[0] if failures else None
    first = failures[0]
    if is_drain(result):
        asked = (signal.SIGTERM, signal.SIGINT, *SCHEDULER_SIGNALS)
        return None if as_code(first.code) - 128 in asked else first
    lost = result.lost
    if lost is not None and first.code > 0 and (lost.died or lost.last_seen <= result.failed):
        return None
    return next((end for end in failures if end.code < 0 and -end.code not in FOLLOWING), first)


def as_code(code: int) -> int:
    """The exit code a shell would see: 128 + s for signal s."""
    return code if code >= 0 else 128 - code


def exit_code(result: AttemptResult) -> int:
    """The job's exit code; never 0 where the launcher has killed a rank."""
    if result.requested is None and (result.hang is not None or result.differs is not None):
        return EXIT_PREFLIGHT if result.hang is None else EXIT_HANG
    if (failure := first_failure(result)) is not None:
        return as_code(failure.code)
    codes = {end.code for end in result.exits}
    if result.lost is not None:
        return result.lost.code
    if result.late and not result.host_change and any(end.killed_by_us for end in result.exits):
        return EXIT_HANG
    if result.requested is not None and not codes <= set(OK_CODES):
        return 128 + result.requested
    left = EXIT_DRAINED in codes or (result.host_change and codes != {0})  # in whatever way
    return EXIT_DRAINED if left else next((as_code(code) for code in codes if code not in OK_CODES), 0)


def how(code: int) -> str:
    """`exit code 7`, `signal SIGKILL`."""
    if code == EXIT_RUNTIME:
        return f"exit code {code} (an exception of jax's runtime)"
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGBUS:
        return "signal SIGBUS (a mapped file, such as a shard of the data, was truncated, or its disk failed)"
    return f"signal {signal.Signals(-code).name if -code in {*signal.Signals} else -code}"


BACKOFF_S, BACKOFF_TIMES, BACKOFF_MOST_S = 0.5, 4, 60.0
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
CRASHES = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)
INFRASTRUCTURE = {*NOT_OF_A_RANK, EXIT_RUNTIME, EXIT_NOT_STARTED, *(128 + number for number in CRASHES)}
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
    if result.host_change or is_preempted or code in PREEMPTED:  # however a program ends that is asked to
        return Cause.PREEMPTED
    return Cause.INFRASTRUCTURE if code in INFRASTRUCTURE else Cause.USER


def summary(result: AttemptResult, *, seconds: float, counts: bool) -> AttemptSummary:
    """An attempt for `next_action`. `counts`: the program is known to report its steps, even if it has not yet."""
    failure = first_failure(result)
    is_of_a_rank = failure is None or failure.code not in NOT_OF_A_RANK
    culprit = result.differs or (result.hang or failure if is_of_a_rank else None)
    return AttemptSummary(
        cause=classify(result),
        code=exit_code(result),
        rank=culprit.rank if culprit else None,
        host=result.hang_host if isinstance(culprit, Hang) else culprit.host if culprit else "",
        step=0 if culprit is None or isinstance(culprit, CodeDiffers) else culprit.step,
        reached=result.reached,
        saved=result.saved,
        counts=counts or result.reached > 0 or result.differs is not None,  # an edit meanwhile: none of the program
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

    A rank that fails twice in the same step, with no new step in between, would fail there again, unless the fault is
    its host's, and another host is there: a rank that has failed there on two hosts is tried on no third one. A step
    that another attempt has passed is no such place, and step 0 stands for a start: a program that has entered a
    step can start.
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
    since = _since_progress(attempts)
    failures = [attempt for attempt in since if is_failure(attempt, restart_on)]
    same_host = _failures_of_host(attempts, restart_on)
    replaced = last.host if same_host > 1 and can_replace(last.host) else ""
    same = _same_failures(attempts, restart_on) if last.counts and last.rank is not None else ()
    others = [attempt.reached for attempt in attempts[:-1] if attempt not in same]
    can_pass = max(others, default=0) > last.step + bool(last.step)
    of_program = any(attempt.host != last.host for attempt in same) or not replaced
    if same and of_program and not can_pass:
        place = f"in step {last.step}" if last.step else "before its first step"
        why = f"not started again: rank {last.rank} failed {place} in an earlier attempt too, so a restart would "
        why += "not help"
        return Decision(again=False, code=last.code, why=why)
    if len(failures) > max_restarts:
        got_on = "came to a new step" if last.counts or last.reached else f"lasted {LONG_S / 3600:g} h"
        why = f"no restart is left: --max-restarts is {max_restarts}, and since the first of them no attempt {got_on}"
        return Decision(again=False, code=EXIT_GIVEN_UP, why=why)
    wait, when = _restart_after(len(since) - 1)
    why = f"restart {len(failures)} of {max_restarts}, {when}"
    if len(since) == 1 and any(is_failure(attempt, restart_on) for attempt in attempts[:-1]):
        why += " (the job got on, so the count began anew)"
    if replaced:
        why += f", without host {replaced}, whose ranks failed in {same_host} attempts"
    return Decision(again=True, wait=wait, why=why, set_aside=replaced)


def _since_progress(attempts: Sequence[AttemptSummary]) -> Sequence[AttemptSummary]:
    """The attempts from the last one on that got on; all, where none did: the first has nothing to be new beside.

    An attempt gets on that enters a new step, or saves one. A program that fails at one place comes to no new step.
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
    host = attempts[-1].host if attempts[-1].rank is not None else ""
    ages = accumulate((attempt.seconds for attempt in reversed(attempts)), initial=0.0)
    recent = [attempt for attempt, age in zip(reversed(attempts), ages, strict=False) if age <= REPEAT_S]
    failed = [attempt.host for attempt in recent if attempt.rank is not None and is_failure(attempt, restart_on)]
    return failed.count(host) if host else 0


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
    wait, when = _restart_after(idle)
    return Decision(again=True, wait=wait, why=f"preempted; restart {when} (it counts for nothing)")


def backoff(first_s: float, times: int, most_s: float, factor: float = 2.0) -> float:
    """Seconds to wait: `first_s`, made longer by `factor` so many times (it may be thousands), and `most_s` at most."""
    return min(most_s, first_s * factor ** min(times, 64))


def _restart_after(failed: int) -> tuple[float, str]:
    """Seconds to wait after so many failed attempts, none after 0; and the words for it."""
    wait = backoff(BACKOFF_S, failed - 1, BACKOFF_MOST_S, BACKOFF_TIMES) if failed else 0.0
    return wait, f"in {wait:g} s" if wait else "immediately"
