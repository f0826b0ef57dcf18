"""The commands for jobs that run already: ps, logs, attach, stop."""

import dataclasses
import json
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from roxxel_dist.cli.flags import Positional, Short
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.control import index
from roxxel_dist.launcher.control import jobs as tail
from roxxel_dist.launcher.control.jobs import change_hosts
from roxxel_dist.launcher.control.jobs import stop as stop_job
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.launcher.output import info, printable
from roxxel_dist.place.directory import LOGS, is_run
from roxxel_dist.place.run_place import local_folder
from roxxel_dist.process.exit_codes import EXIT_FAILED, OK_CODES, UserError
from roxxel_dist.process.file_lock import LOCK, holding_process
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.display import aligned

NO_JOB = "no job runs; `roxxel-dist top` shows runs that `train` began"
LINES = 40
PIDS = 4
"""Ranks whose process ids `ps` shows; `ps --json` and `top` have all."""
SLACK_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    run: Positional[str] = ""
    """A run id, the beginning of one, or a run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsArgs:
    """List the jobs that you launched from this machine. `lost` means that the launcher of the job was killed.

    The state of a job whose launcher runs on another machine has the age that is shown.
    """

    all: bool = False
    """Also list jobs that ended in the last week, or were lost more than a day ago."""
    prune: bool = False
    """Remove from the list: jobs that ended or were lost, and jobs on other machines without news for a day. Their run
    directories keep the records."""
    json: bool = False
    """Print a JSON list of the jobs, with the processes of their ranks."""


def ps(words: list[str]) -> int:
    """List running jobs."""
    args = parse(PsArgs, words, "ps")
    with usage_errors():
        if args.prune:
            forgotten = index.forget()
            names = f": {', '.join(job.run_id for job in forgotten)}" if forgotten else ""
            info(f"{len(forgotten)} jobs removed from the list{names}")
        jobs = tail.look_at(index.entries())
    recent = time.time() - index.FORGOTTEN_S
    shown = [job for job in jobs if args.all or not job.is_over or (job.state == "lost" and job.updated > recent)]
    if args.json:
        values = [
            dataclasses.asdict(job) | {"run_dir": job.run_dir} | ({} if job.is_known else {"state": "unknown"})
            for job in shown
        ]
        print(json.dumps(values, indent=2))
    elif shown:
        rows = [("RUN", "STATE", "HOST", "RANKS", "PIDS", "ATTEMPT", "STEP", "SINCE", "COMMAND"), *map(_row, shown)]
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in aligned(rows, left=None):
            print(printable(line)[:columns])
    else:
        info(f"no job runs; --all lists {len(jobs)} that ended" if jobs else NO_JOB)
    return 0


def _row(job: JobRecord) -> tuple[str, ...]:
    state = f"ended {job.code}" if job.state == "ended" else job.state
    if reason := job.queue_reason.partition(",")[0].removeprefix("None"):
        state += f" ({reason})"
    if not job.is_known:
        age = max(time.time() - job.updated, 0)
        units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
        unit, length = next((unit for unit in units if age >= 2 * unit[1]), units[-1])
        state += f" {age / length:.0f} {unit} ago"
    host = job.controller.host + (f" +{len(job.hosts) - 1}" if len(job.hosts) > 1 else "")
    pids = ",".join(str(rank.pid) for rank in job.ranks[:PIDS]) + "…" * (len(job.ranks) > PIDS)
    counts = (str(job.nprocs), pids or "-", str(job.attempt), str(job.step or "-"))
    return job.run_id, state, host, *counts, _clock(job.begun), job.command.replace("\n", "\\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogsArgs(_Run):
    """Show the last lines of the log of a job: of rank 0, of another rank, or of the launcher."""

    rank: int = 0
    """The rank."""
    launcher: bool = False
    """Show the output of the detached launcher instead."""
    follow: Annotated[bool, Short("-f")] = False
    """Print new lines until the job ends."""
    lines: Annotated[int, Short("-n")] = LINES
    """Number of lines."""


def logs(words: list[str]) -> int:
    """Show the log of a job."""
    args = parse(LogsArgs, words, "logs")
    with usage_errors():
        if args.lines < 0:
            raise UserError(f"--lines {args.lines}: must be 0 or more")
        job = _find(args.run, "logs")
        if args.launcher and not job.detached:
            raise UserError(
                f"run {job.run_id} was launched without --detach: the output of its launcher went to its terminal; "
                f"leave --launcher out for the lines of rank 0"
            )
        if not 0 <= args.rank < job.nprocs:
            raise UserError(f"--rank {args.rank}: run {job.run_id} has the ranks 0 to {job.nprocs - 1}")
        log = job.launcher_log if args.launcher else Path(job.log_dir, f"rank-{args.rank}.log")
        if not log.exists() and (job.is_over or not args.follow):
            _report_end(job)
            others = ", ".join(sorted(path.name for path in log.parent.glob("*.log")))
            raise UserError(
                f"{log} is not there: nothing was printed{'' if job.is_over else ' yet'}, or it was moved"
                + (f"; there are {others} in {log.parent}" if others else "")
            )
        _report_end(_show(job, log, args.lines, follow=args.follow))
    return 0


def _show(job: JobRecord, log: Path, count: int, *, follow: bool) -> JobRecord:
    """Show the last lines of a log, and those that come; the record as it is then."""
    if follow and not job.is_known:
        where = f"the launcher of run {job.run_id} runs on {job.controller.host}"
        info(f"{where}: this machine sees when the job ends, not when it is killed; Ctrl-C ends only this command")
    lines = tail.run_lines(log, job.run_id, last=count)
    tail.show(list(iter(lambda: next(lines), None)))
    return tail.follow(lines, job) if follow else tail.look(job)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachArgs(_Run):
    """Show the output of the launcher until the job ends, and exit with the exit code of the job.

    Ctrl-C ends this command. The job continues.
    """


def attach(words: list[str]) -> int:
    """Follow a job to its end."""
    args = parse(AttachArgs, words, "attach")
    with usage_errors():
        job = _find(args.run, "attach")
        if job.is_queued:
            info(tail.words(job))
        try:
            job = _show(job, job.launcher_log if job.detached else Path(job.log_dir, "rank-0.log"), LINES, follow=True)
        except KeyboardInterrupt:
            info(f"run {job.run_id} goes on; `{job.line('stop')}` ends it")
            raise
    _report_end(job)
    return EXIT_FAILED if job.code is None else job.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopArgs(_Run):
    """Stop a job: all ranks save a checkpoint and exit. The command waits for them. Exit code 0: every rank saved, or
    had ended without an error."""

    kill: bool = False
    """Kill the ranks at once, without a checkpoint."""
    timeout: float | None = None
    """Seconds to wait. Default: the --grace of the job and one minute."""


def stop(words: list[str]) -> int:
    """Stop a job: its ranks save a checkpoint and exit."""
    args = parse(StopArgs, words, "stop")
    with usage_errors():
        job = _find(args.run, "stop")
        if job.is_queued:
            if (job := tail.cancel(job)).is_over:
                was = "waited to go on" if job.ran else "had not begun"
                info(f"run {job.run_id} {was}: SLURM job {job.slurm_job} is cancelled")
                return 0
            _check_place(job, "stop")
        limit = job.grace + SLACK_S if args.timeout is None else args.timeout
        try:
            job = stop_job(job, kill=args.kill, timeout_s=limit)
        except KeyboardInterrupt:
            info(f"run {job.run_id} is stopping, as requested")
            raise
    if not job.is_over:
        info(f"run {job.run_id} is {job.state} after {limit:g} s: `roxxel-dist stop {job.run_id} --kill` ends it")
        return EXIT_FAILED
    _report_end(job)
    return 0 if job.code in OK_CODES else EXIT_FAILED


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinArgs(_Run):
    """Add hosts to a running job of `launch ssh` or `launch exec`. A host that passes the checks of a start joins: the
    ranks save, and the job continues with it. The batch and the data stay the same."""

    hosts: str
    """Names of the hosts, separated by commas."""


def join(words: list[str]) -> int:
    """Add hosts to a running job."""
    return _change_hosts(parse(JoinArgs, words, "join"), joins=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaveArgs(_Run):
    """Remove hosts from a running job of `launch ssh` or `launch exec`: the ranks save, and the job continues without
    them. At least --min-hosts hosts stay."""

    hosts: str
    """Names of the hosts, separated by commas."""


def leave(words: list[str]) -> int:
    """Remove hosts from a running job."""
    return _change_hosts(parse(LeaveArgs, words, "leave"), joins=False)


def _change_hosts(args: JoinArgs | LeaveArgs, *, joins: bool) -> int:
    with usage_errors():
        job = _find(args.run, "join" if joins else "leave")
        hosts = [host.strip() for host in args.hosts.split(",") if host.strip()]
        return 0 if change_hosts(job, hosts, joins=joins) else EXIT_FAILED


def _find(name: str, command: str) -> JobRecord:
    """The job meant. Raises UserError where there is none, or where `command` needs another machine."""
    run, jobs = local_folder(name), [] if name else index.entries()
    trainer = None if run is None else holding_process(run / LOCK)
    if not name and command != "logs" and all(job.is_over for job in jobs):
        raise UserError(f"no job runs{f'; `roxxel-dist ps --all` lists {len(jobs)} that ended' if jobs else ''}")
    try:
        job = index.find(name)
    except UserError as error:
        if run is not None and (trainer or is_run(run)):
            raise UserError(_not_launched(run, command, trainer)) from error
        raise
    if run is not None and trainer and job.is_over and name != job.run_id:
        raise UserError(_not_launched(run, command, trainer))
    job = tail.look(job)
    if command == "stop":
        _check_place(job, command)
    return job


def _check_place(job: JobRecord, command: str) -> None:
    """Raise UserError where `command` needs the machine of the launcher: the files of a job are where its record is."""
    if job.is_over or job.is_queued or job.is_here:
        return
    if job.slurm_job:
        raise UserError(
            f"run {job.run_id} is SLURM job {job.slurm_job}: `scancel --batch --signal=INT {job.of_slurm}` asks its "
            f"ranks to save and exit; `scancel {job.of_slurm}` ends it, also where it waits to be started again"
        )
    raise UserError(f"the launcher of run {job.run_id} runs on {job.controller.host}: use `{job.line(command)}`")


def _not_launched(run: Path, command: str, trainer: Mapping[str, Any] | None) -> str:
    """Why a run directory has no job here, with what a person can do in its place."""
    log = run / LOGS / "rank-0.log"
    where = f"its log is {log}" if log.exists() else f"it has no log {log}"
    if trainer is None:
        return f"{run} has no record of a launch, and nothing trains there now: {where}"
    on_host = "" if trainer["host"] == socket.gethostname() else f" on {trainer['host']}"
    cure = f": `kill -INT {trainer['pid']}`{on_host} makes it save and exit" if command == "stop" else f": {where}"
    return f"pid {trainer['pid']}{on_host} trains in {run} and was not launched from here{cure}"


def _clock(when: float) -> str:
    """A time for people: that of today, or a day."""
    then = time.localtime(when)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%Y-%m-%d", then)


def _report_end(job: JobRecord) -> None:
    if not job.is_over and not job.path.exists():
        info(f"run {job.run_id} was not started, or its run directory was deleted: there is no record of it")
    elif job.is_queued:
        info(tail.words(job))
    elif job.state == "lost" and job.slurm_job and not job.ran:
        info(f"run {job.run_id} never began, and SLURM job {job.slurm_job} is gone: `sacct -j {job.of_slurm}` says why")
    elif job.state == "lost":
        info(f"run {job.run_id} is lost: its launcher (pid {job.controller.pid}) was killed, and its ranks with it")
    elif job.state == "ended":
        meaning = {0: " (all went well)", 42: " (stopped, every rank saved)"}.get(job.code or 0, "")
        step = f" in step {job.step}" if job.step else ""
        info(f"run {job.run_id} ended{step} at {_clock(job.ended or job.updated)} with {job.code}{meaning}")
