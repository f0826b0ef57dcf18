"""This user's index of jobs: one link to the record of each run directory, in `$XDG_STATE_HOME/roxxel-dist/jobs`."""

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from roxxel_dist.launcher.control.record import JobRecord, read
from roxxel_dist.launcher.job.spec import is_bucket, program_of
from roxxel_dist.launcher.output import info
from roxxel_dist.process.durable import state_dir
from roxxel_dist.process.exit_codes import UserError

KEPT_S = 7 * 24 * 3600.0
FORGOTTEN_S = 24 * 3600.0
"""Seconds after which `ps` lists a lost job no longer, and `ps --prune` takes off one that is not reported."""
UNREPORTED_S = 60 * 24 * 3600.0
MAX_LISTED = 10
ANSWER_LIMIT_S = 5.0
"""Seconds that the file systems of all run directories have to give their records."""
READERS, PATIENCE_S = 8, 0.05
"""Threads that read records; if none was read for so long, there is one more."""


def entries() -> list[JobRecord]:
    """The jobs of the index whose run directories are there, in the order in which they began.

    Directories on a file system that does not answer are left out, with one line.
    """
    links = list(state_dir().glob("*"))
    jobs = _linked(links)
    if silent := [os.readlink(link) for link in links if link not in jobs]:
        info(f"{len(silent)} jobs are left out: their file system does not answer, such as at {silent[0]}")
    found = {job.path: job for job in jobs.values() if job}
    return sorted(found.values(), key=lambda job: job.begun)


def _linked(links: Iterable[Path]) -> dict[Path, JobRecord | None]:
    """The records of links, None where there is none; without the links whose targets do not answer in time.

    Threads read them: one that waits for a network file system whose server is gone cannot be ended. There is one more
    for each that waits.
    """
    jobs: dict[Path, JobRecord | None] = {}
    pending = list(links)
    threads: list[threading.Thread] = []

    def work() -> None:
        while pending:
            with contextlib.suppress(IndexError):  # another thread has the last one
                link, job = pending.pop(), None
                with contextlib.suppress(OSError):  # no link
                    job = read(Path(os.readlink(link)))
                jobs[link] = job

    end = time.monotonic() + ANSWER_LIMIT_S
    while pending and time.monotonic() < end:
        try:
            for _ in range(1 if threads else READERS):
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                threads.append(thread)
        except RuntimeError:  # no more can be started: this one reads too, and may have to wait
            work()
        known = -1
        while pending and threads and len(jobs) > known:
            known = len(jobs)
            threads[-1].join(PATIENCE_S)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(jobs)


def knows(run_id: str) -> bool:
    """Whether a job of this user had, or has, this run id."""
    with contextlib.suppress(OSError):
        return any(state_dir().glob(f"{run_id}.{'?' * 16}"))
    return False


def of_directory(directory: str | Path) -> JobRecord | None:
    """The newest job of a run directory; None where none was launched."""
    logs = Path(os.path.abspath(directory), "logs")
    return read(logs / "launcher.json") or next(filter(None, map(read, sorted(logs.glob("launcher-*.json")))), None)


def forget(*, over_s: float = 0.0, unreported_s: float = FORGOTTEN_S) -> list[JobRecord]:
    """Take jobs that ended so long ago off the index, and those elsewhere without a change; returns these jobs.

    Run directories keep their records. A link whose target is gone (the directory was deleted, or is on another
    machine) and other files go after the same times.
    """
    forgotten = []
    for path, job in _linked(state_dir().glob("*")).items():
        with contextlib.suppress(OSError):
            updated = path.lstat().st_mtime if job is None else job.updated
            limit = over_s if job is not None and job.is_over else unreported_s
            limit = limit if path.is_symlink() else KEPT_S
            if time.time() - updated >= limit and (job is None or job.is_over or not job.is_known):
                path.unlink()
                forgotten += [job] if job else []
    return forgotten


def forget_old() -> None:
    """Forget what is over for a week, in a thread: a start does not wait for the disks of other runs."""

    def work() -> None:
        with contextlib.suppress(OSError):
            forget(over_s=KEPT_S, unreported_s=UNREPORTED_S)

    with contextlib.suppress(RuntimeError):  # no thread can be started: a later start forgets them
        threading.Thread(target=work, daemon=True).start()


def find(name: str) -> JobRecord:
    """The job that a person means: a run directory, its address in a bucket, a run id, or the beginning of one.

    Raises UserError for none, and for several; names the nearest one, or those that run.
    """
    if name and not is_bucket(name) and (job := of_directory(name)):
        return job
    among = entries()
    if not among:
        what = f"there is no run {name!r}: " if name else "say which run, by its run directory: "
        raise UserError(f"{what}no job of this user is known here")
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
