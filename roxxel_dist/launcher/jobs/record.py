"""The jobs of this user on this machine: what every controller writes of itself, and who reads it.

A job is one JSON file in `$XDG_STATE_HOME/roxxel-dist/jobs`, replaced in one move at each change. A controller that was
killed writes nothing more; that it is gone is told by its process, never by the file.
"""

import contextlib
import dataclasses
import difflib
import errno
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.environment import masked_words
from roxxel_dist.launcher.spec import JobSpec

State = Literal["starting", "running", "restarting", "stopping", "ended", "lost"]
"""`lost`: a controller that is gone without having said `ended`. It never says so itself."""
KEPT_S = 7 * 24 * 3600.0
FORGOTTEN_S = 24 * 3600.0
"""After which `ps` no longer lists a job that was lost, nor keeps one elsewhere of which nothing is heard."""
UNHEARD_S = 60 * 24 * 3600.0
WRITE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of one machine: its number alone may belong to another one by now."""

    host: str
    boot: str
    pid: int
    start: int
    """When it started, in ticks since the boot."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What is known of one job."""

    run_id: str
    controller: Process
    hosts: tuple[str, ...]
    nprocs: int
    command: str
    """Secrets are masked."""
    log_dir: str
    """Absolute, as the run directory and the working directory are."""
    run_dir: str
    directory: str
    begun: float
    """Seconds since 1970, as the other times are."""
    updated: float
    grace: float
    """Seconds that the ranks get to save."""
    ended: float | None = None
    state: State = "starting"
    attempt: int = 0
    step: int = 0
    """The largest step that any rank has entered."""
    code: int | None = None
    """The exit code of the job; None where it has not ended, or was lost."""
    detached: bool = False
    reach: tuple[str, ...] = ()
    """The words before a command that run it on the machine of the controller, from elsewhere; empty for `local`."""
    slurm_job: str = ""
    """The number of the SLURM job that it is."""
    copied: bool = False
    """Brought here from another machine when the job began: nobody keeps it up to date."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("ended", "lost")

    @property
    def is_here(self) -> bool:
        """Whether the controller belongs to this machine, so that its process can be looked at."""
        known = not (self.reach or self.slurm_job) or self.controller.boot == _boot()
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
    def one_line(self) -> str:
        """The command without line ends."""
        return self.command.replace("\n", "\\n")

    @property
    def launcher_log(self) -> Path:
        """What a detached launcher says."""
        return Path(self.log_dir, "launcher.log")


def folder() -> Path:
    """Where the entries are. Raises FileNotFoundError where this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise FileNotFoundError(errno.ENOENT, "no home directory: set HOME or XDG_STATE_HOME")
        state = os.path.join(home, ".local", "state")
    return Path(state, "roxxel-dist", "jobs")


def this_process() -> Process:
    """The process that calls."""
    pid = os.getpid()
    return Process(host=socket.gethostname(), boot=_boot(), pid=pid, start=_start(pid) or 0)


def is_alive(process: Process) -> bool:
    """Whether this very process runs; ask only for one of this machine."""
    return process.boot == _boot() and _start(process.pid) == process.start


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a container may hide /proc/sys
        return ""


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was taken away
        return os.environ.get("PWD", "")


def _start(pid: int) -> int | None:
    """When a process started; None for one that is gone or waits to be reaped."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read(path: Path) -> JobRecord | None:
    """The entry of a file, as it is now; None where it is gone or no entry.

    Where the file says that a job goes on and its controller is gone, the entry is `lost`.
    """
    entry = _parse(path)
    if entry is None or entry.is_over or not entry.is_here or is_alive(entry.controller):
        return entry
    entry = _parse(path)  # again: its last words may have come between the two looks
    return entry if entry is None or entry.is_over else dataclasses.replace(entry, state="lost")


def from_values(values: Any) -> JobRecord:
    """The entry that `dataclasses.asdict` made plain. Raises TypeError or KeyError for anything else."""
    if not isinstance(values, dict):
        raise TypeError(f"no entry of a job: {values!r}")
    known = {field.name for field in dataclasses.fields(JobRecord)}
    fields = {name: value for name, value in values.items() if name in known}
    several = {name: tuple(fields[name]) for name in ("hosts", "reach") if name in fields}
    return JobRecord(**{**fields, **several, "controller": Process(**values["controller"])})


def _parse(path: Path) -> JobRecord | None:
    try:
        return from_values(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def paths() -> list[Path]:
    """The files of all entries."""
    return sorted(folder().glob("*.json"))


def entries() -> list[JobRecord]:
    """All jobs, in the order in which they began."""
    found = (read(path) for path in paths())
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.begun)


def knows(run_id: str) -> bool:
    """Whether a job of this user had, or has, this run id."""
    with contextlib.suppress(OSError):
        return any(folder().glob(f"{run_id}.*.json"))
    return False


def path_of(entry: JobRecord) -> Path:
    """The file of an entry. Two jobs can have one run id: it is unique among those of one working directory alone."""
    return folder() / f"{entry.run_id}.{entry.controller.host}.{entry.controller.pid}.json"


def write(entry: JobRecord, *, new_only: bool = False) -> None:
    """Write an entry in one move; with `new_only` not over one that is there. Raises OSError."""
    path = path_of(entry)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(entry)) + "\n", encoding="utf-8")
        if new_only:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def forget(now: float) -> list[JobRecord]:
    """Take away the entries of jobs that are over, and of jobs elsewhere not heard of for a day; which they were."""
    gone = []
    for path in paths():
        entry = read(path)
        if entry is not None and (entry.is_over or (not entry.is_here and now - entry.updated > FORGOTTEN_S)):
            path.unlink(missing_ok=True)
            gone.append(entry)
    return gone


def sweep(now: float) -> None:
    """Take away what is left of jobs that were over a week ago, and of those elsewhere of which nothing was heard."""
    for path in folder().glob("*"):
        with contextlib.suppress(OSError):
            age = now - path.stat().st_mtime
            if age < KEPT_S:
                continue
            entry = read(path) if path.suffix == ".json" else None
            if entry is None or entry.is_over or (not entry.is_here and age > UNHEARD_S):
                path.unlink()


class JobRecorder:
    """The entry of the job that this process controls, kept up to date while the context is open.

    That it cannot be written ends no job: it is said once.
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
        now, directory = time.time(), _here()
        log_dir = Path(directory, job.log_dir)
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
            begun=now,
            updated=now,
            grace=job.grace,
            detached=detached or started is not None,
            reach=tuple(reach),
            slurm_job=slurm_job,
        )
        self._kept = self.entry

    def __enter__(self) -> "JobRecorder":
        with self._safely():
            write(self.entry)
            sweep(time.time())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.entry.state != "ended":  # an exception of the launcher's own
            self.end(1)

    def update(self, *, state: State | None = None, attempt: int | None = None, step: int | None = None) -> None:
        """Note what has changed. A state or an attempt is written at once, a step once a second at most."""
        told = {"state": state, "attempt": attempt, "step": step or None}  # a new attempt has come to no step yet
        self._change({name: value for name, value in told.items() if value is not None})
        if state == "running" and self._started is not None:
            tell, self._started = self._started, None
            tell(self.entry)

    def end(self, code: int) -> int:
        """The job is over; returns its code."""
        self._change({"state": "ended", "code": code, "ended": time.time()})
        return code

    def _change(self, fields: dict[str, Any]) -> None:
        self.entry = dataclasses.replace(self.entry, **fields)
        if self.entry == self._kept:
            return
        hurry = any(name != "step" for name in fields)
        if not hurry and time.monotonic() < self._wrote + WRITE_S:
            return
        self._kept = self.entry = dataclasses.replace(self.entry, updated=time.time())
        self._wrote = time.monotonic()
        with self._safely():
            write(self.entry)

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                with contextlib.suppress(OSError):  # a terminal that was closed
                    where = error.filename or "the list of jobs"
                    reason = f"cannot write {where} ({error.strerror}): `ps` does not show how this job goes"
                    print(f"roxxel-dist: {reason}", file=sys.stderr, flush=True)


MOST = 10


def find(name: str, among: Sequence[JobRecord]) -> JobRecord:
    """The job that a person means: a run id, the beginning of one, or a run directory (its newest job).

    Raises:
        ValueError: no job, or several; names the nearest one, or those that there are.
    """
    if not among:
        raise ValueError(f"there is no run {name!r}: no job of this user is known here")
    directory = os.path.realpath(name) if name else ""
    ways: list[Callable[[JobRecord], bool]] = [
        lambda entry: name in (entry.run_id, path_of(entry).stem),
        lambda entry: os.path.realpath(entry.run_dir) == directory,
        lambda entry: entry.run_id.startswith(name),
    ]
    for number, means in enumerate(ways):
        found = [entry for entry in among if name and means(entry)]
        if found and (number == 1 or len({(entry.run_id, entry.run_dir) for entry in found}) == 1):
            return found[-1]  # a SLURM job that was queued again has an entry a launch
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} runs are meant by {name!r}: say which, by its id or its run directory:{_list(found)}"
            )
        if found:
            return found[0]
    if not name:
        raise ValueError(f"say which run:{_list(among)}")
    near = difflib.get_close_matches(name, [entry.run_id for entry in among], n=1, cutoff=0.5)
    raise ValueError(
        f"there is no run {name!r}: " + (f"did you mean {near[0]}?" if near else f"they are{_list(among)}")
    )


def _list(among: Sequence[JobRecord]) -> str:
    lines = [f"\n  {entry.run_id}  {entry.state:<10}  {entry.run_dir}" for entry in reversed(among)]
    more = f"\n  and {len(lines) - MOST} more; `roxxel-dist ps --all` lists them" if len(lines) > MOST else ""
    return "".join(lines[:MOST]) + more
