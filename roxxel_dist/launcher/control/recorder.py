"""Keeps the record of a job while its controller lives."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from roxxel_dist.launcher.control.index import enter, forget_old
from roxxel_dist.launcher.control.record import (
    KEPT_RESTARTS,
    JobRecord,
    RankProcess,
    Restart,
    State,
    lock_of,
    read,
    this_process,
    write,
)
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import masked_words
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import info
from roxxel_dist.launcher.policy.restart import LONG_S
from roxxel_dist.process.durable import state_dir, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import release_lock, take_lock

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
        forget_old()
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
        is_long = not (counts or entry.step) and time.time() - entry.begun >= LONG_S
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
