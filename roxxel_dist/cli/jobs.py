"""The commands for jobs that run already: ps, logs, attach, stop."""

import dataclasses
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated

import tyro

from roxxel_dist.cli.arguments import Switch, parse
from roxxel_dist.cluster.exit_codes import EXIT_FAILED, ORDERLY
from roxxel_dist.config import usage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roxxel_dist.launcher.jobs.record import JobRecord

LINES = 40
SLACK_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    run: tyro.conf.Positional[str] = ""
    """A run id, the beginning of one, or a run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsArgs:
    """List the jobs that this user launched from this machine; `lost` are those whose launcher was killed.

    Of a job whose launcher is on another machine, the state is as old as is said.
    """

    all: Switch = False
    """Also those that have ended or were lost more than a day ago; they are remembered for a week."""
    prune: Switch = False
    """Forget all that have ended or were lost, and those on other machines that were not heard of for a day."""
    json: Switch = False
    """Print a JSON list."""


def ps(words: list[str]) -> int:
    """List running jobs."""
    args = parse(PsArgs, words, "ps")
    with usage_errors():
        from roxxel_dist.launcher.jobs import record

        if args.prune:
            gone = record.forget(time.time())
            _say(f"{len(gone)} jobs forgotten" + (f": {', '.join(entry.run_id for entry in gone)}" if gone else ""))
        found = record.entries()
    recent = time.time() - record.FORGOTTEN_S
    shown = [
        entry for entry in found
        if args.all or not entry.is_over or (entry.state == "lost" and entry.updated > recent)
    ]  # fmt: skip
    if args.json:
        import json

        values = [
            dataclasses.asdict(entry) | ({} if entry.is_known else {"state": "unknown"})
            for entry in shown
        ]  # fmt: skip
        print(json.dumps(values, indent=2))
    elif shown:
        print(*_table(shown), sep="\n")
    else:
        _say("no job runs" + ("" if args.all or not found else f"; --all lists {len(found)} that ended"))
    return 0


def _table(entries: "Sequence[JobRecord]") -> list[str]:
    head = ("RUN", "STATE", "HOST", "RANKS", "ATTEMPT", "STEP", "SINCE", "COMMAND")
    rows = [head, *map(_row, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [line[:columns] for line in lines]


def _row(entry: "JobRecord") -> tuple[str, ...]:
    state = f"ended {entry.code}" if entry.state == "ended" else entry.state
    state += "" if entry.is_known else f" {_age(time.time() - entry.updated)} ago"
    step = str(entry.step) if entry.step else "-"
    host = entry.controller.host + (f" +{len(entry.hosts) - 1}" if len(entry.hosts) > 1 else "")
    since = _clock(entry.begun)
    return entry.run_id, state, host, str(entry.nprocs), str(entry.attempt), step, since, entry.one_line


def _clock(when: float) -> str:
    """A time for people: that of today, or a day."""
    then = time.localtime(when)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d", then)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogsArgs(_Run):
    """Show the last lines of a job's log: of rank 0, of another rank, or of its launcher."""

    rank: int = 0
    """The rank."""
    launcher: Switch = False
    """What a detached launcher said instead."""
    follow: Annotated[Switch, tyro.conf.arg(aliases=("-f",))] = False
    """Go on with the lines that come, until the job is over."""
    lines: Annotated[int, tyro.conf.arg(aliases=("-n",))] = LINES
    """How many lines."""


def logs(words: list[str]) -> int:
    """Show the log of a job."""
    args = parse(LogsArgs, words, "logs")
    with usage_errors():
        if args.lines < 0:
            raise ValueError(f"--lines {args.lines}: must be 0 or more")
        entry = _find(args.run, "logs")
        log = _log(entry, None if args.launcher else args.rank)
        if not log.exists() and (entry.is_over or not args.follow):
            _say_over(entry)
            raise ValueError(_no_log(entry, log))
        _say_over(_show(entry, log, args.lines, follow=args.follow))
    return 0


def _log(entry: "JobRecord", rank: int | None) -> "Path":
    """The log of a rank, or (None) of the launcher."""
    from pathlib import Path

    if rank is None and not entry.detached:
        raise ValueError(
            f"run {entry.run_id} was launched without --detach: what its launcher says went to its own terminal; "
            f"leave --launcher out for the lines of rank 0"
        )
    if rank is not None and not 0 <= rank < entry.nprocs:
        raise ValueError(f"--rank {rank}: run {entry.run_id} has the ranks 0 to {entry.nprocs - 1}")
    return entry.launcher_log if rank is None else Path(entry.log_dir, f"rank-{rank}.log")


def _no_log(entry: "JobRecord", log: "Path") -> str:
    there = sorted(path.name for path in log.parent.glob("*.log")) if log.parent.is_dir() else []
    others = f"; there are {', '.join(there)} in {log.parent}" if there else ""
    why = "nothing was printed, or the command was refused" if entry.is_over else "nothing was printed yet"
    return f"{log} is not there: {why}{others}"


def _show(entry: "JobRecord", log: "Path", lines: int, *, follow: bool) -> "JobRecord":
    """Show the last lines of a log, and those that come; the entry as it is then."""
    from roxxel_dist.launcher.jobs import record
    from roxxel_dist.launcher.jobs.tail import RunLines, show
    from roxxel_dist.launcher.jobs.tail import follow as go_on

    path, source = record.path_of(entry), RunLines(log, entry.run_id)
    if follow and not entry.is_known:
        where = f"the launcher of run {entry.run_id} runs on {entry.controller.host}"
        _say(f"{where}: its end is seen from here, but not that it was killed; Ctrl-C ends this command alone")
    show(source.last(lines))
    return (go_on(source, lambda: record.read(path)) if follow else record.read(path)) or entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachArgs(_Run):
    """Show what the launcher's own terminal would, until the job is over, and exit with the code of the job.

    Ctrl-C leaves the job running.
    """


def attach(words: list[str]) -> int:
    """Follow a job to its end."""
    args = parse(AttachArgs, words, "attach")
    with usage_errors():
        entry = _find(args.run, "attach")
        try:
            entry = _show(entry, _log(entry, None if entry.detached else 0), LINES, follow=True)
        except KeyboardInterrupt:
            _say(f"run {entry.run_id} goes on; `{entry.line('stop')}` ends it")
            raise
    _say_over(entry)
    return EXIT_FAILED if entry.code is None else entry.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopArgs(_Run):
    """Ask a job to save and leave, and wait until it has; exits with 0 where every rank saved, or had ended well."""

    kill: Switch = False
    """Kill the ranks without waiting for them to save."""
    timeout: float | None = None
    """Seconds to wait; the job's --grace and a minute where not given."""


def stop(words: list[str]) -> int:
    """Have a job save and leave."""
    args = parse(StopArgs, words, "stop")
    with usage_errors():
        entry = _find(args.run, "stop")
        from roxxel_dist.launcher.jobs.stop import stop as ask

        limit = entry.grace + SLACK_S if args.timeout is None else args.timeout
        try:
            entry = ask(entry, kill=args.kill, timeout_s=limit, say=_say)
        except KeyboardInterrupt:
            _say(f"run {entry.run_id} was asked to stop, and does")
            raise
    if not entry.is_over:
        _say(f"run {entry.run_id} is {entry.state} after {limit:g} s: `roxxel-dist stop {entry.run_id} --kill` ends it")
        return EXIT_FAILED
    _say_over(entry)
    return 0 if entry.code in ORDERLY else EXIT_FAILED


def _find(name: str, command: str) -> "JobRecord":
    """The job meant. Raises ValueError where there is none, or where `command` needs another machine."""
    from roxxel_dist.launcher.jobs.record import entries, find

    entry = find(name, entries())
    if entry.is_known or (command != "stop" and not entry.copied):  # its files are here: machines share them
        return entry
    if entry.slurm_job and command == "stop":
        number = entry.slurm_job
        raise ValueError(
            f"run {entry.run_id} is SLURM job {number}: `scancel --batch --signal=INT {number}` asks its ranks to save "
            f"and leave; `scancel {number}` ends it, also where it waits to be started again"
        )
    raise ValueError(f"the launcher of run {entry.run_id} runs on {entry.controller.host}: use `{entry.line(command)}`")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _say_over(entry: "JobRecord") -> None:
    if entry.state == "lost":
        _say(f"run {entry.run_id} is lost: its launcher (pid {entry.controller.pid}) was killed, and its ranks with it")
    elif entry.state == "ended":
        meaning = {0: "all went well", 42: "stopped, every rank saved"}.get(entry.code or 0)
        step = f" in step {entry.step}" if entry.step else ""
        told = f" ({meaning})" if meaning else ""
        _say(f"run {entry.run_id} ended{step} at {_clock(entry.ended or entry.updated)} with {entry.code}{told}")


def _say(text: str) -> None:
    print(f"roxxel-dist: {text}", file=sys.stderr, flush=True)
