"""The jobs of this user on this machine: the records that controllers write, and the functions that read them.

A job is one JSON file in `$XDG_STATE_HOME/roxxel-dist/jobs`, replaced atomically at each change. A controller that was
killed writes nothing more; whether it is gone is decided from its process, never from the file.
"""

import contextlib
import json
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.claims import folder
from roxxel_dist.launcher.environment import masked_words
from roxxel_dist.launcher.host.process_tree import STARTED, STATE, stat
from roxxel_dist.launcher.output.console import info
from roxxel_dist.launcher.preflight.host_info import boot_id
from roxxel_dist.launcher.spec import JobSpec, flag, trains_in_bucket

State = Literal["starting", "running", "restarting", "stopping", "ended", "lost"]
"""`lost`: a controller that is gone without having said `ended`. It never says so itself."""
KEPT_S = 7 * 24 * 3600.0
FORGOTTEN_S = 24 * 3600.0
"""After which `ps` no longer lists a job that was lost, nor keeps one elsewhere of which nothing is heard."""
UNHEARD_S = 60 * 24 * 3600.0
WRITE_S = 1.0
MAX_LISTED = 10


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
    """The process that trains, as it says itself; of a program that says nothing, the one that was started."""
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
    """What is known of one job. Paths are absolute, times are seconds since 1970."""

    run_id: str
    controller: Process
    hosts: tuple[str, ...]
    nprocs: int
    command: str
    """Secrets are masked."""
    log_dir: str
    run_dir: str
    directory: str
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
    reach: tuple[str, ...] = ()
    """The words before a command that run it on the machine of the controller, from elsewhere; empty for `local`."""
    slurm_job: str = ""
    """The number of its SLURM job."""
    ran: bool = False
    """Whether its ranks were started; False for a job that preflight refused."""
    copied: bool = False
    """Copied from another machine when the job began: it is not kept up to date."""

    @property
    def path(self) -> Path:
        """Its file. Two jobs can have one run id: it is unique among those of one working directory alone."""
        return folder() / f"{self.run_id}.{self.controller.host}.{self.controller.pid}.json"

    def now(self) -> "JobRecord":
        """As `read`; the record as it was where its file is gone."""
        return read(self.path) or self

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("ended", "lost")

    @property
    def is_here(self) -> bool:
        """Whether the controller belongs to this machine, so that its process can be looked at."""
        known = not (self.reach or self.slurm_job) or self.controller.boot == boot_id()
        return self.controller.host == socket.gethostname() and known

    @property
    def is_known(self) -> bool:
        """Whether this machine can tell that the state is so now."""
        return self.is_over or self.is_here

    def line(self, command: str) -> str:
        """What a person types, here, for `command` of this job."""
        there = () if self.is_here else self.reach or ("ssh", self.controller.host, "roxxel-dist")
        return shlex.join([*(there or ("roxxel-dist",)), command, self.run_id])

    @property
    def launcher_log(self) -> Path:
        """What a detached launcher says."""
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
            return Process(host=socket.gethostname(), boot=boot_id(), pid=pid, start=int(fields[STARTED]))
    return None


def read(path: Path) -> JobRecord | None:
    """The record in a file, as it is now; None where it is gone or no record.

    Where the file says that a job goes on and its controller is gone, the job is `lost`.
    """
    was_lost = False
    while True:
        try:
            record = from_values(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if record.is_over or not record.is_here or is_alive(record.controller):
            return record
        if was_lost:
            return replace(record, state="lost", ranks=())
        was_lost = True  # read it again: its last words may have come between the two looks


def from_values(values: Any) -> JobRecord:
    """The record that `dataclasses.asdict` made plain. Raises TypeError or KeyError for anything else."""
    if not isinstance(values, dict):
        raise TypeError(f"no record of a job: {values!r}")
    known = _fields_of(JobRecord, values)
    controller = Process(**values["controller"])
    numbers = (controller.pid, controller.start)
    names = (values["run_id"], controller.host)  # they become the name of a file
    if not all(isinstance(number, int) for number in numbers) or any("/" in name or "\0" in name for name in names):
        raise TypeError(f"no record of a job: {values!r}")
    tuples = {name: tuple(known[name]) for name in ("hosts", "reach") if name in known}
    ranks = tuple(RankProcess(**_fields_of(RankProcess, rank)) for rank in known.get("ranks", ()))
    tuples["restarts"] = tuple(Restart(**_fields_of(Restart, restart)) for restart in known.get("restarts", ()))
    return JobRecord(**{**known, **tuples, "ranks": ranks, "controller": controller})


def _fields_of(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those that the class has: another version has written others."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def entries() -> list[JobRecord]:
    """All jobs, in the order in which they began."""
    return sorted(filter(None, map(read, folder().glob("*.json"))), key=lambda record: record.begun)


def knows(run_id: str) -> bool:
    """Whether a job of this user had, or has, this run id."""
    with contextlib.suppress(OSError):
        return any(folder().glob(f"{run_id}.*.json"))
    return False


def write(record: JobRecord, *, new_only: bool = False) -> None:
    """Write a record in one move; with `new_only` not over one that is there. Raises OSError."""
    record.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = record.path.with_suffix(f".{os.urandom(4).hex()}.tmp")  # containers may share home and pid
    try:
        temporary.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
        if new_only:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, record.path)
        else:
            temporary.replace(record.path)
    finally:
        temporary.unlink(missing_ok=True)


def forget(*, over_s: float = 0.0, unheard_s: float = FORGOTTEN_S) -> list[JobRecord]:
    """Remove the records of jobs that ended so long ago, and of silent ones on other machines; returns these records.

    Half-written files of killed controllers are removed after `KEPT_S`.
    """
    forgotten = []
    for path in folder().glob("*"):
        with contextlib.suppress(OSError):
            written, record = path.stat().st_mtime, read(path)
            if record is None:
                limit = KEPT_S
            elif record.is_known:
                limit = over_s if record.is_over else math.inf
            else:
                limit = unheard_s
            if time.time() - min(written, record.updated if record else written) >= limit:
                path.unlink()
                forgotten += [record] if record else []
    return forgotten


class JobRecorder:
    """The record of the job that this process controls, kept up to date while the context is open.

    If it cannot be written, the job goes on with one warning.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        *,
        started: Callable[[JobRecord], None] | None = None,
        detached: bool = False,
        reach: Sequence[str] = (),
        slurm_job: str = "",
    ) -> None:
        try:
            directory = os.getcwd()
        except OSError:  # it was taken away
            directory = os.environ.get("PWD", "")
        begun, log_dir = time.time(), Path(directory, job.log_dir)
        self._started = started
        self._wrote = 0.0
        self._failed = False
        self.entry: JobRecord = JobRecord(
            run_id=job.run_id,
            controller=this_process(),
            hosts=tuple(backend.hosts),
            nprocs=job.total,
            command=shlex.join(masked_words(job.command)),
            log_dir=str(log_dir),
            run_dir=str(log_dir.parent),
            directory=directory,
            begun=begun,
            updated=begun,
            grace=job.grace,
            detached=detached or started is not None,
            reach=tuple(reach),
            slurm_job=slurm_job,
        )
        self._kept: JobRecord | None = None

    def __enter__(self) -> Self:
        self.update(state="starting")
        with contextlib.suppress(OSError):
            forget(over_s=KEPT_S, unheard_s=UNHEARD_S)
        return self

    def __exit__(self, *error: object) -> None:
        if self.entry.state != "ended":  # an exception of the launcher's own
            self.end(1)

    def update(self, *, step: int = 0, ranks: tuple[RankProcess, ...] | None = None, **changes: Any) -> None:
        """Note changed fields of the record: steps and ranks are written once a second at most, the rest at once.

        Step 0 changes nothing: a new attempt has come to no step yet.
        """
        ranks = self.entry.ranks if ranks is None else ranks
        ran = self.entry.ran or changes.get("state") == "running"
        self.entry = replace(self.entry, step=step or self.entry.step, ranks=ranks, ran=ran, **changes)
        if self.entry != self._kept and (changes or time.monotonic() >= self._wrote + WRITE_S):
            self._kept = self.entry = replace(self.entry, updated=time.time())
            self._wrote = time.monotonic()
            try:
                write(self.entry)
            except OSError as error:
                where = error.filename or "the list of jobs"
                with contextlib.suppress(OSError):  # a terminal that was closed
                    if not self._failed:
                        info(f"cannot write {where} ({error.strerror}): `ps` does not show how this job goes")
                self._failed = True
        if changes.get("state") == "running" and self._started is not None:
            started, self._started = self._started, None
            started(self.entry)

    def restarts(self, cause: str) -> None:
        """The attempt that was noted last ended for this cause, and another one follows."""
        now = self.entry
        last = Restart(attempt=now.attempt, time=time.time(), step=now.step, cause=cause)
        self.update(state="restarting", restarts=(*now.restarts, last)[-KEPT_RESTARTS:])

    def end(self, code: int) -> int:
        """The job is over; returns its code."""
        self.update(state="ended", code=code, ended=time.time(), ranks=())
        return code


def find(name: str, among: Sequence[JobRecord], trainer: tuple[str, int] | None = None) -> JobRecord:
    """The job that a person means: a run id, the beginning of one, or a run directory (see `of_directory`).

    Raises UserError for none, and for several; names the nearest one, or those that run.
    """
    if not among:
        raise UserError(f"there is no run {name!r}: no job of this user is known here")
    living = [record for record in among if not record.is_over]
    ended = len(among) - len(living)
    if not name:
        raise UserError(f"{'' if living else 'no job runs; '}say which run:{_list(living or among)}")
    matches = [record for record in among if name in (record.run_id, record.path.stem)]
    if not matches and (matches := of_directory(name, among, trainer)) and len(matches) > 1:
        raise UserError(f"{len(matches)} jobs run in {name}: say which, by its id:{_list(matches)}")
    if not matches:
        matches = [record for record in among if record.run_id.startswith(name)]
    if len({(record.run_id, record.run_dir) for record in matches}) == 1:
        return meant(matches)[-1]  # a SLURM job that was queued again has a record a launch
    if matches:
        what = f"{len(matches)} runs are meant by {name!r}: say which, by its id or its run directory"
        raise UserError(f"{what}:{_list(matches)}")
    import difflib  # slow, and no launch needs it

    if near := difflib.get_close_matches(name, [record.run_id for record in among], n=1, cutoff=0.5):
        raise UserError(f"there is no run {name!r}: did you mean {near[0]}?")
    if living:
        raise UserError(f"there is no run {name!r}: these run:{_list(living)}")
    raise UserError(f"there is no run {name!r}, and no job runs; `roxxel-dist ps --all` lists {ended} that ended")


def of_directory(
    directory: str, among: Sequence[JobRecord], trainer: tuple[str, int] | None = None
) -> Sequence[JobRecord]:
    """The jobs that a person means by a run directory: none, one, or several that run there at the same time.

    Args:
        directory: its path, or the address of a run in a bucket.
        among: the jobs, in the order in which they began.
        trainer: (host, pid) of the process that trains there now. The job of this process is meant, also where its
            record has another path: the directory was moved, or a link to it leads elsewhere now.
    """
    for job in among:
        if trainer and not job.is_over and trainer in [(rank.host, rank.pid) for rank in job.ranks]:
            return [job]
    if trains_in_bucket(("train", "--run_dir", directory)):
        address = directory.rstrip("/")
        return meant([job for job in among if (_bucket(job) or "").rstrip("/") == address])
    path = os.path.realpath(directory)
    return meant([job for job in among if os.path.realpath(job.run_dir) == path])


def meant(jobs: Sequence[JobRecord]) -> Sequence[JobRecord]:
    """Those of the jobs of one run directory that its name means: all that run there now, else the newest one.

    A job whose ranks were started counts before one that was refused, or that may be refused still.
    """
    living = [job for job in jobs if job.is_here and not job.is_over]
    if living:
        return [job for job in living if job.ran] or living
    return ([job for job in jobs if job.ran] or jobs)[-1:]


def _bucket(job: JobRecord) -> str | None:
    """The address of the run in a bucket that a job trains; None for another job."""
    words = tuple(shlex.split(job.command))
    return flag(words, "run_dir") if trains_in_bucket(words) else None


def _list(among: Sequence[JobRecord]) -> str:
    lines = [f"\n  {record.run_id}  {record.state:<10}  {record.run_dir}" for record in reversed(among)]
    more = f"\n  and {len(lines) - MAX_LISTED} more; `roxxel-dist ps --all` lists them" * (len(lines) > MAX_LISTED)
    return "".join(lines[:MAX_LISTED]) + more
