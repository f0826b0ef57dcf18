"""Jobs of one node each that join a SLURM job when they start, and leave it before they end (--grow-jobs).

One that leaves because its time is nearly over has another one submitted in its place.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.launcher.output import info
from roxxel_dist.process.exit_codes import UserError

ASK_S, CANCEL_S = 30.0, 5.0
"""SLURM's time for an answer, and at the end of the job, which may be near its time limit."""
LEAVE_S = 30
"""A node leaves the job so long, and the ranks' grace, before its time is over."""
SCRIPT = """\
#!/bin/bash
# Holds a node for SLURM job {job}, whose launcher starts ranks here. It ends with that job.
while sleep 30; do
    running=$(squeue --noheader --user="$(id -u)" --states=RUNNING --format=%A) || continue
    grep -qx {job} <<< "$running" || exit 0
done
"""
OF_ONE_JOB = {
    "begin", "dependency", "error", "hold", "job-name", "nodefile", "nodelist", "open-mode", "output", "signal",
}  # fmt: skip
"""Options of sbatch that mean one job alone."""


@dataclass(eq=False)
class GrowJobs:
    """An array of jobs of one node each; the nodes of those that run are hosts of the job.

    It is a `HostSource`. Each option of sbatch is `KEY` or `KEY=VALUE`; ours win over them.
    """

    job_id: str
    """The job that they join."""
    count: int
    _: KW_ONLY
    options: Sequence[str]
    procs_per_host: int
    gpus_per_host: int | None
    exclude: Sequence[str]
    """Nodes of the job."""
    leave_s: float
    """A node whose job has no more seconds than this is no host any more."""
    environ: Mapping[str, str] = field(repr=False)
    """The variables for the commands of SLURM."""
    source: str = "--grow-jobs"
    is_file: bool = False
    jobs: dict[str, str] = field(default_factory=dict)
    """Node to job, for each node that was ever a host."""
    _arrays: list[str] = field(default_factory=list)
    _working_jobs: set[str] = field(default_factory=set)
    """Jobs whose nodes were hosts, and that have not been replaced."""
    _log: Path = Path()

    def submit(self, log: Path) -> None:
        """Hand them to SLURM; their errors go to `log`. A job that cannot grow runs as it is, and people read why."""
        self._log = log
        with suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)  # SLURM does not make it, and the jobs would fail
        if array := self._submit(self.count, "no node joins"):
            info(f"--grow-jobs: the nodes of SLURM job {array} join when they are there (`squeue -j {array}`)")

    def _submit(self, count: int, otherwise: str) -> str | None:
        """The number of the array; None where SLURM takes none, and people read why."""
        answer = answer_of(self.words(self._log, count), ASK_S, env=self.environ, text=SCRIPT.format(job=self.job_id))
        if answer.returncode:
            why = " ".join(answer.stderr.split()) or f"sbatch ended with {answer.returncode}"
            info(f"--grow-jobs {count}: not submitted, and {otherwise}: {why}")
            return None
        self._arrays.append(answer.stdout.strip().partition(";")[0])
        return self._arrays[-1]

    def words(self, log: Path, count: int) -> list[str]:
        """The sbatch that submits so many of them."""
        given = {"exclusive": ""}  # or else two of them may be on one node
        given |= {key: value for key, _, value in (option.partition("=") for option in self.options)}
        exclude = [*self.exclude, *filter(None, [given.pop("exclude", "")])]
        if self.gpus_per_host is not None and not any(key.startswith(("gpu", "gres")) for key in given):
            given["gres"] = f"gpu:{self.gpus_per_host}"
        ours = {
            "array": f"1-{count}",
            "nodes": "1",
            "ntasks-per-node": str(self.procs_per_host),
            "exclude": ",".join(exclude),
            "job-name": "roxxel-dist-grow",
            "output": str(log).replace("%", "%%"),
            "open-mode": "append",
        }
        options = {**given, **ours}.items()
        return ["sbatch", "--parsable", *(f"--{key}={value}" if value else f"--{key}" for key, value in options)]

    def read(self) -> tuple[list[str], None]:
        """The nodes of those that run. Raises UserError where SLURM does not say."""
        if not self._arrays:
            return [], None
        asked = ["squeue", "--noheader", f"--jobs={','.join(self._arrays)}", "--states=RUNNING", "--format=%A|%N|%e"]
        answer = answer_of(asked, ASK_S, env=self.environ)
        if answer.returncode and "Invalid job id" not in answer.stderr:  # so it says when all have ended some time ago
            why = " ".join(answer.stderr.split()) or f"it ended with {answer.returncode}"
            raise UserError(f"--grow-jobs: squeue does not say which nodes are there: {why}")
        least = datetime.now() + timedelta(seconds=self.leave_s)
        found, late = nodes_of(answer.stdout, least), late_jobs(answer.stdout, least) & self._working_jobs
        self.jobs = {**self.jobs, **found}
        self._working_jobs = (self._working_jobs | {*found.values()}) - late
        if late and (array := self._submit(len(late), "no node comes in place of those whose time is nearly over")):
            info(
                f"--grow-jobs: SLURM job {array} takes the place of {', '.join(sorted(late))}: their time is over soon"
            )
        return list(found), None

    def end(self) -> None:
        """End nothing: between two looks nothing runs."""

    def cancel(self) -> None:
        """End them, with the job."""
        if self._arrays:
            answer_of(["scancel", *self._arrays], CANCEL_S, env=self.environ)
            self._arrays.clear()


def nodes_of(printed: str, least: datetime) -> dict[str, str]:
    """Node to job, of the lines `JOB|NODE|END` of jobs that end after `least`; of two on a node the first one."""
    found: dict[str, str] = {}
    for job, node, is_late in sorted(_jobs_of(printed, least), key=lambda one: (len(one[0]), one)):
        if not is_late:
            found.setdefault(node, job)
    return found


def late_jobs(printed: str, least: datetime) -> set[str]:
    """The jobs, of such lines, that do not end after `least`."""
    return {job for job, _, is_late in _jobs_of(printed, least) if is_late}


def _jobs_of(printed: str, least: datetime) -> Iterator[tuple[str, str, bool]]:
    """(job, node, whether it ends by then) of each line."""
    for line in printed.splitlines():
        job, node, end = [*line.split("|"), "", ""][:3]
        try:
            is_late = datetime.fromisoformat(end) <= least
        except ValueError:  # it has no limit
            is_late = False
        if job and node:
            yield job, node, is_late


def options_of(given: str | None) -> list[str]:
    """The options in --grow-options. Raises UserError for words that are none."""
    try:
        words = shlex.split(given or "")
    except ValueError as error:
        raise UserError(f"--grow-options {given!r}: {error}; write them as in a shell") from error
    options = [word.removeprefix("--") for word in words]
    for word, option in zip(words, options, strict=True):
        key = option.partition("=")[0]
        if not re.fullmatch(r"[a-z][a-z-]*", key):
            raise UserError(f"--grow-options: {word!r}: write KEY=VALUE, as in --grow-options 'partition=gpu time=60'")
        if key in OF_ONE_JOB:
            raise UserError(f"--grow-options: {key} is for one job, and these join another one: leave it out")
    return options


def options_from(passed: Mapping[str, str | None]) -> str:
    """The values of --slurm-KEY that are for them too, as --grow-options has them."""
    kept = {key: value for key, value in passed.items() if key not in OF_ONE_JOB}
    return shlex.join(key if value is None else f"{key}={value}" for key, value in kept.items())
