"""The record of a job: `launcher.json` beside the logs of its ranks.

The controller replaces the file at each change (`JobRecorder`), and holds the lock beside it for as long as it lives.
So a record that says that a job goes on, while no process holds the lock, is of a controller that was killed, whatever
process has its number by now.
"""

import contextlib
import hashlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import masked_words
from roxxel_dist.launcher.job.spec import RUN_ID, JobSpec
from roxxel_dist.launcher.output import info
from roxxel_dist.launcher.policy.outcome import LONG_S
from roxxel_dist.process.durable import state_dir, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import is_held, release_lock, take_lock
from roxxel_dist.process.process_stat import boot_id, start_of

State = Literal["queued", "starting", "running", "restarting", "stopping", "ended", "lost"]
"""`queued`: a batch system has the job, and has not started it. `lost`: the controller was killed; it is what a reader
finds, and no record says so."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of one machine: its number alone may belong to another one by now."""

    host: str
    boot: str
    pid: int
    start: int
    """The time of its start, in ticks since the boot."""


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
    changed_at: float = 0.0
    """The time of the last change of `step` or `activity`, in seconds since 1970; 0 where neither has changed."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """An attempt that ended, and another one that followed."""

    attempt: int
    """The one that ended."""
    time: float
    """The time of its end, in seconds since 1970."""
    step: int
    """The largest step that any of its ranks had entered."""
    cause: str
    """Why it ended, in a line."""


KEPT_RESTARTS = 20
"""Restarts in a record; preempted jobs may be started again without end."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job, as far as it is known. Times are seconds since 1970."""

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
    """The exit code of the job; None where it has not ended, or was lost. Of one that is queued again: of its last
    start."""
    detached: bool = False
    slurm_job: str = ""
    """The number of its SLURM job."""
    slurm_cluster: str = ""
    """The cluster that has it, where sbatch named one (--clusters)."""
    furthest: int = 0
    """The largest step that an earlier start of the SLURM job entered."""
    requeues: int = 0
    """How often SLURM was asked to queue the job again, in a row without a step beyond that."""
    queue_reason: str = ""
    """Why SLURM has not started a queued job, in its word: Priority, PartitionDown, JobHeldUser …; "" if not asked."""
    ran: bool = False
    """Whether its ranks were started; False for a job that preflight refused."""
    takes_hosts: bool = False
    """Whether hosts can join it, and leave it."""
    first_rank: int = 0
    """The first of its ranks; not 0: other launchers of the job start those before, and have records of their own."""

    @property
    def run_dir(self) -> str:
        """The run directory."""
        return str(Path(self.log_dir).parent)

    @property
    def path(self) -> Path:
        """The file of the record."""
        return Path(self.log_dir, f"launcher-{self.first_rank}.json" if self.first_rank else "launcher.json")

    def now(self) -> "JobRecord":
        """Read the record again; as it was where its file is gone."""
        return read(self.path) or self

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("ended", "lost")

    @property
    def is_queued(self) -> bool:
        """Whether it has no launcher yet."""
        return self.state == "queued"

    @property
    def is_here(self) -> bool:
        """Whether the controller is a process of this machine."""
        return self.controller.host == socket.gethostname()

    @property
    def is_known(self) -> bool:
        """Whether this machine sees that the state is so now: locks may not reach from another one to here."""
        return self.is_over or self.is_queued or self.is_here or is_held(lock_of(self.path), unknown=False)

    def line(self, command: str) -> str:
        """The line that a person types, here, for `command` of this job."""
        client = () if self.is_here else ("ssh", self.controller.host)
        return shlex.join([*client, "roxxel-dist", command, self.run_id if self.is_here else self.run_dir])

    @property
    def of_slurm(self) -> str:
        """The words by which SLURM's commands know its SLURM job: the number, and a cluster that sbatch named."""
        return self.slurm_job + f" -M {self.slurm_cluster}" * bool(self.slurm_cluster)

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
    start = start_of(pid)
    return None if start is None else Process(host=socket.gethostname(), boot=boot_id(), pid=pid, start=start)


def lock_of(path: Path) -> Path:
    """The file whose lock the controller of a record holds."""
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
        if record.is_over or record.is_queued or not record.is_here or is_held(lock_of(path), unknown=True):
            return record
        if was_lost:
            return replace(record, state="lost", ranks=())
        was_lost = True  # read it again: the end may have been written between the two looks


def write(record: JobRecord, path: Path) -> None:
    """Replace the record in a file. Raises OSError."""
    write_file(path, json.dumps(record, default=vars) + "\n", sync=False)


def from_values(values: Any, log_dir: str) -> JobRecord:
    """The record that `write` made plain, found in a folder. Raises TypeError, ValueError or KeyError."""
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


def enter(record: JobRecord) -> None:
    """Put a record in the index, in place of an earlier one of its run directory. Raises OSError."""
    state_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    key = hashlib.blake2b(os.fsencode(record.path), digest_size=8).hexdigest()
    link = state_dir() / f"{record.run_id}.{key}"
    for earlier in state_dir().glob(f"*.{key}"):
        if earlier != link:
            earlier.unlink(missing_ok=True)
    if not link.is_symlink():
        link.symlink_to(record.path)


WRITE_S = 1.0


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
        slurm_cluster: str = "",
    ) -> None:
        begun, self._began = time.time(), time.monotonic()
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
            slurm_cluster=slurm_cluster,
            takes_hosts=backend.takes_hosts and job.is_restartable,
            first_rank=job.first_rank,
        )
        self._kept: JobRecord | None = None
        self._entered: Path | None = None

    def __enter__(self) -> Self:
        """Raises UserError if another launcher's job goes on in the run directory."""
        path = self.entry.path
        self._made = [each for each in (path.parent, *path.parent.parents) if not each.exists()]
        try:
            self._lock = take_lock(lock_of(path))
            if self._lock is None:
                raise UserError(_goes_on(path))
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(FileNotFoundError, ValueError):
                before = read(path)
                if before and before.slurm_job == self.entry.slurm_job != "":
                    self.entry = replace(
                        self.entry,
                        slurm_cluster=before.slurm_cluster,  # only who submits it learns it
                        furthest=max(before.furthest, before.step),
                        requeues=before.requeues,
                    )
                self._before = None if before and before.is_queued else path.read_text(encoding="utf-8")
        except OSError as error:
            self._unusable = error  # preflight reports it
        self.update(state="starting")
        return self

    def __exit__(self, *error: object) -> None:
        if not (self.entry.is_over or self.entry.is_queued):  # an exception of the launcher
            self.end(1)
        if self._folder is not None:
            if not (self.entry.ran or self.entry.is_queued):
                with contextlib.suppress(OSError):
                    self._withdraw(self._folder)
            os.close(self._folder)
        if self._lock is not None:
            release_lock(self._lock)

    def queue(self) -> None:
        """Enter the job as one that a batch system has, and is to start."""
        self.entry = replace(self.entry, state="queued")
        self._replace()

    def settle(self, code: int) -> None:
        """End a job that the batch system has refused to queue again, when the context is closed."""
        self.entry = replace(self.entry, state="ended", code=code, ended=time.time())
        self._replace()

    def _replace(self) -> None:
        path = self.entry.path
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if (lock := take_lock(lock_of(path))) is not None:  # else another one's job goes on there
                write(self.entry, path)
                enter(self.entry)
                release_lock(lock)

    def _withdraw(self, logs: int) -> None:
        path = self.entry.path
        if self._before is not None:
            write_file(path, self._before, sync=False)
            if before := read(path):
                enter(before)
            return
        if {path.name, lock_of(path).name} >= {*os.listdir(logs)}:  # a log that says why there are no ranks stays
            for name in (path.name, lock_of(path).name):
                os.unlink(name, dir_fd=logs)
            for link in state_dir().glob(f"{self.entry.run_id}.*"):
                if link.is_symlink() and os.readlink(link) == str(path):
                    link.unlink()
            for made in self._made:
                made.rmdir()

    def note_progress(self, state: State, step: int, ranks: Callable[[], tuple[RankProcess, ...]]) -> None:
        """Write how the ranks go, once a second at most, or where the state is another one; `ranks` is called then."""
        if state != self.entry.state or time.monotonic() >= self._wrote + WRITE_S:
            self.update(step=step, ranks=ranks(), state=state)

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
            write(self.entry, folder / self.entry.path.name)
            if self.entry.path != self._entered:
                enter(self.entry)
                self._entered = self.entry.path
        elif self.entry.ran and self._unusable is not None:
            raise self._unusable

    def _warn(self, error: OSError) -> None:
        is_own = str(error.filename).startswith(f"/proc/self/fd/{self._folder}/")
        where = self.entry.path if is_own else error.filename
        if self._failed or not self.entry.ran:  # what is wrong before the start is named by preflight
            return
        self._failed = True
        with contextlib.suppress(OSError):  # a terminal that was closed
            what = f"cannot write {where or 'the list of jobs'} ({error.strerror})"
            cure = "; set XDG_STATE_HOME to a folder that can be written" if where and not is_own else ""
            info(f"{what}: `ps` does not show how this job goes{cure}")

    def restarts(self, cause: str) -> None:
        """The attempt that was noted last ended for this cause, and another one follows."""
        now = self.entry
        last = Restart(attempt=now.attempt, time=time.time(), step=now.step, cause=cause)
        self.update(state="restarting", restarts=(*now.restarts, last)[-KEPT_RESTARTS:])

    def queue_again(self, code: int) -> None:
        """The job ended so, and a batch system is to start it again."""
        self.update(state="queued", code=code, ranks=())

    def requeues(self, *, counts: bool) -> int:
        """The requeues of the SLURM job in a row without a new step; where the program does not count
        steps, without an hour in which it ran."""
        entry = self.entry
        is_long = not (counts or entry.step) and time.monotonic() - self._began >= LONG_S
        return 0 if entry.step > entry.furthest or is_long else entry.requeues

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
