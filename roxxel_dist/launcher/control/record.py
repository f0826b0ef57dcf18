"""The record of a job: `launcher.json` beside the logs of its ranks.

The controller replaces the file at each change (`recorder`), and holds the lock beside it for as long as it lives. So a
record that says that a job goes on, while no process holds the lock, is of a controller that was killed, whatever
process has its number by now.
"""

import json
import os
import shlex
import socket
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from roxxel_dist.launcher.job.spec import RUN_ID
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.file_lock import is_held
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
    changed_at: float = 0.0
    """When the launcher saw `step` or `activity` change last, in seconds since 1970; 0 where neither has."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """An attempt that ended, and another one that followed."""

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
    """Not 0: one of several launchers of a job, each of which starts part of the ranks and has a record."""

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
