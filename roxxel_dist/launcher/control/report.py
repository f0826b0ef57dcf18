"""The report when an attempt is over: which rank, where, why, and where to read more."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import LIBRARY_LOG, NOISE_PREFIXES, Logs, shortened
from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.launcher.policy.outcome import (
    AttemptResult,
    LateRank,
    RankExit,
    exit_code,
    first_failure,
    how,
    is_cut_off,
)
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_HANG,
    EXIT_PREFLIGHT,
    EXIT_TIMEOUT_TEXT,
    EXIT_USAGE,
    OK_CODES,
)

STACK_LINES = 60
MOST_STACKS = 3
"""Of ranks that did not end in time."""
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
        words = tail or logs.tail(0)
        if (
            failure.code == EXIT_USAGE
            and words
            and (job.program.reports_steps or words[-1].startswith("roxxel-dist: "))
        ):
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
    ended = []
    for end in result.exits:
        if end is failure:
            break
        ended += [end.rank] if end.code == 0 and not end.killed_by_us else []
    if not ended:
        return []
    names = ", ".join(map(str, sorted(ended)))
    return [f"roxxel-dist: rank {names} had ended with 0 before: all ranks must do the same number of steps"]


def saved(result: AttemptResult) -> str:
    """The ends of the ranks that were asked to save: only the code 42 says that a rank has saved."""
    others = [end for end in result.exits if end.code not in OK_CODES]
    if not others:
        return f"every rank saved and exited ({EXIT_DRAINED})"
    names = "; ".join(
        f"rank {end.rank}: " + ("killed after the grace period" if end.killed_by_us else how(end.code))
        for end in others
    )
    return f"{len(result.exits) - len(others)} of {len(result.exits)} ranks saved and exited ({names})"


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
        elif _is_whole(words):
            break
    return words


def _is_whole(words: Sequence[str]) -> bool:
    """Whether lines that begin with a traceback have come to the exception, which stands at the margin."""
    return not words[-1][:1].isspace() and not words[-1].startswith(CRASH_HEADERS)


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
    if not suspects:
        return []
    shown = ", ".join(f"{name}={shortened(value)}" for name, value in suspects.items())
    return [f"roxxel-dist: the environment of the ranks can part them: {shown}"]


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
