"""The record of a job: `launcher.json` beside the logs of its ranks, and this user's index of such records.

The controller replaces the file at each change, and holds the lock beside it for as long as it lives. So a record that
says that a job goes on, while no process holds the lock, is of a controller that was killed, whatever process has its
number by now. The index, `$XDG_STATE_HOME/roxxel-dist/jobs`, has one link to the record of each run directory.
"""

import contextlib
import hashlib
import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.file_lock import is_held, process_record, release_lock, take_lock
from roxxel_dist.cluster.process_stat import STARTED, STATE, stat
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.claims import folder
from roxxel_dist.launcher.job.environment import masked_words
from roxxel_dist.launcher.job.program import is_bucket, program_of
from roxxel_dist.launcher.job.spec import RUN_ID, JobSpec
from roxxel_dist.launcher.output.console import info

State = Literal["starting", "running", "restarting", "stopping", "ended", "lost"]
"""`lost`: the controller was killed. It is what a reader finds; no record says so."""
KEPT_S = 7 * 24 * 3600.0
FORGOTTEN_S = 24 * 3600.0
"""After which `ps` no longer lists a job that was lost, and `ps --prune` takes off one that is not reported."""
UNREPORTED_S = 60 * 24 * 3600.0
WRITE_S = 1.0
MAX_LISTED = 10
ANSWER_LIMIT_S = 5.0
"""Seconds that the file systems of all run directories have to give their records."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of one machine: its number alone may belong to another one by now."""

    host: str
    boot: str
    pid: int
    start: int
    """When it started, in ticks since the boot."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank that runs now."""

    rank: int
    host: str
    pid: int
    """The process that trains, as it reports; of a program that reports nothing, the one that was started."""
    step: int
    """The step it has entered; 0 before the first."""
    activity: str = ""
    """Its reported activity: "step", "compile", "save" and so on; "" if it reports none."""
    moved: float = 0.0
    """When the launcher saw `step` or `activity` change last, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """That an attempt ended and another one followed."""

    attempt: int
    """The one that ended."""
    time: float
    """When, in seconds since 1970."""
    step: int
    """The largest step that any of its ranks had entered."""
    cause: str
    """Why it ended, in a line."""


KEPT_RESTARTS = 20
"""In a record; preempted jobs may be started again without end."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What is known of one job. Times are seconds since 1970."""

    run_id: str
    controller: Process
    hosts: tuple[str, ...]
    nprocs: int
    command: str
    """Secrets are masked."""
    log_dir: str
    """The folder that the record lies in, as an absolute path."""
    begun: float
    updated: float
    grace: float
    """Seconds that the ranks get to save."""
    ended: float | None = None
    state: State = "starting"
    attempt: int = 0
    step: int = 0
    """The largest step that any rank has entered."""
    ranks: tuple[RankProcess, ...] = ()
    """Those that run, in their order; as old as `updated`."""
    restarts: tuple[Restart, ...] = ()
    """The last `KEPT_RESTARTS`, in order."""
    code: int | None = None
    """The exit code of the job; None where it has not ended, or was lost."""
    detached: bool = False
    slurm_job: str = ""
    """The number of its SLURM job."""
    ran: bool = False
    """Whether its ranks were started; False for a job that preflight refused."""
    first_rank: int = 0
    """Not 0: one of several launchers of a job, each of which starts part of the ranks and has a record."""

    @property
    def run_dir(self) -> str:
        """The run directory."""
        return str(Path(self.log_dir).parent)

    @property
    def path(self) -> Path:
        """Its file."""
        return Path(self.log_dir, f"launcher-{self.first_rank}.json" if self.first_rank else "launcher.json")

    def now(self) -> "JobRecord":
        """As `read`; the record as it was where its file is gone."""
        return read(self.path) or self

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("ended", "lost")

    @property
    def is_here(self) -> bool:
        """Whether the controller is a process of this machine."""
        return self.controller.host == socket.gethostname()

    @property
    def is_known(self) -> bool:
        """Whether this machine sees that the state is so now: locks may not reach from another one to here."""
        return self.is_over or self.is_here or is_held(_lock_of(self.path), unknown=False)

    def line(self, command: str) -> str:
        """What a person types, here, for `command` of this job."""
        there = () if self.is_here else ("ssh", self.controller.host)
        return shlex.join([*there, "roxxel-dist", command, self.run_id if self.is_here else self.run_dir])

    @property
    def launcher_log(self) -> Path:
        """The output of a detached launcher."""
        return Path(self.log_dir, "launcher.log")


def this_process() -> Process:
    """The process that calls."""
    process = _process(os.getpid())
    assert process is not None
    return process


def is_alive(process: Process) -> bool:
    """Whether this very process runs; ask only for one of this machine (whose names may be several: of containers)."""
    now = _process(process.pid)
    return now is not None and (now.boot, now.start) == (process.boot, process.start)


def _process(pid: int) -> Process | None:
    """A process of this machine; None for one that is gone or waits to be reaped."""
    with contextlib.suppress(OSError):
        fields = stat(pid)
        if fields[STATE] not in b"ZX":
            boot = process_record().get("boot", "")
            return Process(host=socket.gethostname(), boot=boot, pid=pid, start=int(fields[STARTED]))
    return None


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def read(path: Path) -> JobRecord | None:
    """The record in a file, as it is now; None where it is gone or no record.

    Where it says that a job of this machine goes on and no process holds its lock, the job is `lost`.
    """
    was_lost = False
    while True:
        try:
            record = from_values(json.loads(path.read_text(encoding="utf-8")), str(path.parent))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if record.is_over or not record.is_here or is_held(_lock_of(path), unknown=True):
            return record
        if was_lost:
            return replace(record, state="lost", ranks=())
        was_lost = True  # read it again: the end may have been written between the two looks


def from_values(values: Any, log_dir: str) -> JobRecord:
    """The record that `dataclasses.asdict` made plain, found in a folder. Raises TypeError, ValueError or KeyError."""
    if not isinstance(values, dict) or not RUN_ID.fullmatch(values["run_id"]):
        raise TypeError(f"no record of a job: {values!r}")
    known: dict[str, Any] = _fields_of(JobRecord, values) | {"log_dir": log_dir}
    known["controller"] = Process(**values["controller"])
    known["hosts"] = tuple(known["hosts"])
    known["ranks"] = tuple(RankProcess(**_fields_of(RankProcess, rank)) for rank in known.get("ranks", ()))
    known["restarts"] = tuple(Restart(**_fields_of(Restart, restart)) for restart in known.get("restarts", ()))
    return JobRecord(**known)


def _fields_of(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those that the class has: another version has written others."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def entries() -> list[JobRecord]:
    """The jobs of the index whose run directories are there, in the order in which they began.

    Directories on a file system that does not answer are left out, with one line.
    """
    links = list(folder().glob("*"))
    jobs = _linked(links)
    if silent := [os.readlink(link) for link in links if link not in jobs]:
        info(f"{len(silent)} jobs are left out: their file system does not answer, such as at {silent[0]}")
    found = {job.path: job for job in jobs.values() if job}
    return sorted(found.values(), key=lambda job: job.begun)


def _linked(links: Iterable[Path]) -> dict[Path, JobRecord | None]:
    """The records of links, None where there is none; without the links whose targets do not answer in time.

    Each is read by a thread of its own: one that waits for a network file system whose server is gone cannot be ended.
    """
    jobs: dict[Path, JobRecord | None] = {}

    def work(link: Path) -> None:
        job = None
        with contextlib.suppress(OSError):  # no link
            job = read(Path(os.readlink(link)))
        jobs[link] = job

    threads = [threading.Thread(target=work, args=(link,), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ANSWER_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(jobs)


def knows(run_id: str) -> bool:
    """Whether a job of this user had, or has, this run id."""
    with contextlib.suppress(OSError):
        return any(folder().glob(f"{run_id}.{'?' * 16}"))
    return False


def of_directory(directory: str | Path) -> JobRecord | None:
    """The newest job of a run directory; None where none was launched."""
    logs = Path(os.path.abspath(directory), "logs")
    return read(logs / "launcher.json") or next(filter(None, map(read, sorted(logs.glob("launcher-*.json")))), None)


def _enter(record: JobRecord) -> None:
    """Put a record in the index, in place of an earlier one of its run directory. Raises OSError."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    key = hashlib.blake2b(os.fsencode(record.path), digest_size=8).hexdigest()
    link = folder() / f"{record.run_id}.{key}"
    for earlier in folder().glob(f"*.{key}"):
        if earlier != link:
            earlier.unlink(missing_ok=True)
    if not link.is_symlink():
        link.symlink_to(record.path)


def forget(*, over_s: float = 0.0, unreported_s: float = FORGOTTEN_S) -> list[JobRecord]:
    """Take jobs that ended so long ago off the index, and those elsewhere without a change; returns these jobs.

    Run directories keep their records. A link whose target is gone (the directory was deleted, or is on another
    machine) and other files go after the same times.
    """
    forgotten = []
    for path, job in _linked(folder().glob("*")).items():
        with contextlib.suppress(OSError):
            updated = path.lstat().st_mtime if job is None else job.updated
            limit = over_s if job is not None and job.is_over else unreported_s
            limit = limit if path.is_symlink() else KEPT_S
            if time.time() - updated >= limit and (job is None or job.is_over or not job.is_known):
                path.unlink()
                forgotten += [job] if job else []
    return forgotten


class JobRecorder:
    """The record of the job that this process controls, kept up to date while the context is open.

    If it cannot be written, the job goes on with one warning. A job that ends before its ranks were started leaves the
    run directory, and the record of an earlier job there, as they were.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        *,
        started: Callable[[JobRecord], None] | None = None,
        detached: bool = False,
        slurm_job: str = "",
    ) -> None:
        begun = time.time()
        self._started = started
        self._wrote = 0.0
        self._failed = False
        self._lock: int | None = None
        self._folder: int | None = None  # of the logs, wherever it is moved
        self._unusable: OSError | None = None
        self._made: list[Path] = []
        self._before: str | None = None
        self.entry: JobRecord = JobRecord(
            run_id=job.run_id,
            controller=this_process(),
            hosts=tuple(backend.hosts),
            nprocs=job.total,
            command=shlex.join(masked_words(job.command)),
            log_dir=os.path.abspath(job.log_dir),
            begun=begun,
            updated=begun,
            grace=job.grace,
            detached=detached or started is not None,
            slurm_job=slurm_job,
            first_rank=job.first_rank,
        )
        self._kept: JobRecord | None = None
        self._entered: Path | None = None

    def __enter__(self) -> Self:
        """Raises UserError if another launcher's job goes on in the run directory."""
        path = self.entry.path
        self._made = [each for each in (path.parent, *path.parent.parents) if not each.exists()]
        try:
            self._lock = take_lock(_lock_of(path))
            if self._lock is None:
                raise UserError(_goes_on(path))
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._before = path.read_text(encoding="utf-8")
        except OSError as error:
            self._unusable = error  # preflight reports it
        self.update(state="starting")
        with contextlib.suppress(OSError):
            forget(over_s=KEPT_S, unreported_s=UNREPORTED_S)
        return self

    def __exit__(self, *error: object) -> None:
        if self.entry.state != "ended":  # an exception of the launcher
            self.end(1)
        if self._folder is not None:
            if not self.entry.ran:
                with contextlib.suppress(OSError):
                    self._withdraw(self._folder)
            os.close(self._folder)
        if self._lock is not None:
            release_lock(self._lock)

    def _withdraw(self, logs: int) -> None:
        path = self.entry.path
        if self._before is not None:
            write_file(path, self._before, sync=False)
            if before := read(path):
                _enter(before)
            return
        if {path.name, _lock_of(path).name} >= {*os.listdir(logs)}:  # a log that says why there are no ranks stays
            for name in (path.name, _lock_of(path).name):
                os.unlink(name, dir_fd=logs)
            for link in folder().glob(f"{self.entry.run_id}.*"):
                if link.is_symlink() and os.readlink(link) == str(path):
                    link.unlink()
            for made in self._made:
                made.rmdir()

    def update(self, *, step: int = 0, ranks: tuple[RankProcess, ...] | None = None, **changes: Any) -> None:
        """Note changed fields of the record: steps and ranks are written once a second at most, the rest at once.

        Step 0 changes nothing: a new attempt has come to no step yet.
        """
        is_new = any(value != getattr(self.entry, name) for name, value in changes.items())
        ranks = self.entry.ranks if ranks is None else ranks
        ran = self.entry.ran or changes.get("state") == "running"
        self.entry = replace(self.entry, step=step or self.entry.step, ranks=ranks, ran=ran, **changes)
        if self.entry != self._kept and (is_new or time.monotonic() >= self._wrote + WRITE_S):
            self._kept = self.entry = replace(self.entry, updated=time.time())
            self._wrote = time.monotonic()
            try:
                self._write()
            except OSError as error:
                self._warn(error)
        if changes.get("state") == "running" and self._started is not None:
            started, self._started = self._started, None
            started(self.entry)

    def _write(self) -> None:
        if self._folder is not None:
            folder = Path(f"/proc/self/fd/{self._folder}")
            where = os.readlink(folder)
            if where != self.entry.log_dir and os.path.isdir(where):  # it was moved
                self._kept = self.entry = replace(self.entry, log_dir=where)
            write_file(folder / self.entry.path.name, json.dumps(asdict(self.entry)) + "\n", sync=False)
            if self.entry.path != self._entered:
                _enter(self.entry)
                self._entered = self.entry.path
        elif self.entry.ran and self._unusable is not None:
            raise self._unusable

    def _warn(self, error: OSError) -> None:
        where = self.entry.path if str(error.filename).startswith("/proc/") else error.filename
        if self._failed or not self.entry.ran:  # what is wrong before the start is named by preflight
            return
        self._failed = True
        with contextlib.suppress(OSError):  # a terminal that was closed
            what = f"cannot write {where or 'the list of jobs'} ({error.strerror})"
            info(f"{what}: `ps` does not show how this job goes")

    def restarts(self, cause: str) -> None:
        """The attempt that was noted last ended for this cause, and another one follows."""
        now = self.entry
        last = Restart(attempt=now.attempt, time=time.time(), step=now.step, cause=cause)
        self.update(state="restarting", restarts=(*now.restarts, last)[-KEPT_RESTARTS:])

    def end(self, code: int) -> int:
        """The job is over; returns its code."""
        self.update(state="ended", code=code, ended=time.time(), ranks=())
        return code


def _goes_on(path: Path) -> str:
    """Why no job can be launched where another one's record is locked."""
    job, run = read(path), path.parent.parent
    if job is None:
        return f"another launcher has begun in {run}: wait for its end, or name another folder"
    return (
        f"run {job.run_id} goes on in {run}: its launcher is pid {job.controller.pid} on {job.controller.host}; "
        f"`{job.line('stop')}` ends it, or name another folder"
    )


def find(name: str) -> JobRecord:
    """The job that a person means: a run directory, its address in a bucket, a run id, or the beginning of one.

    Raises UserError for none, and for several; names the nearest one, or those that run.
    """
    if name and not is_bucket(name) and (job := of_directory(name)):
        return job
    among = entries()
    if not among:
        raise UserError(f"there is no run {name!r}: no job of this user is known here")
    living = [record for record in among if not record.is_over]
    if not name:
        raise UserError(f"{'' if living else 'no job runs; '}say which run:{_list(living or among)}")
    matches = [record for record in among if name == record.run_id]
    matches = matches or [record for record in among if name.rstrip("/") == _bucket(record)][-1:]
    matches = matches or [record for record in among if record.run_id.startswith(name)]
    if len({record.run_dir for record in matches}) == 1:  # several launchers of one job share a directory
        return matches[0]
    if matches:
        what = f"{len(matches)} runs are meant by {name!r}: say which, by its id or its run directory"
        raise UserError(f"{what}:{_list(matches)}")
    import difflib  # slow, and no launch needs it

    if near := difflib.get_close_matches(name, [record.run_id for record in among], n=1, cutoff=0.5):
        raise UserError(f"there is no run {name!r}: did you mean {near[0]}?")
    if living:
        raise UserError(f"there is no run {name!r}: these run:{_list(living)}")
    raise UserError(f"there is no run {name!r}, and no job runs; `roxxel-dist ps --all` lists {len(among)} that ended")


def _bucket(job: JobRecord) -> str | None:
    """The address of the run in a bucket that a job trains; None for another job."""
    return program_of(shlex.split(job.command)).bucket


def _list(among: Sequence[JobRecord]) -> str:
    lines = [f"\n  {record.run_id}  {record.state:<10}  {record.run_dir}" for record in reversed(among)]
    more = f"\n  and {len(lines) - MAX_LISTED} more; `roxxel-dist ps --all` lists them" * (len(lines) > MAX_LISTED)
    return "".join(lines[:MAX_LISTED]) + more
