"""The launcher inside a SLURM job: which nodes it has, and whether the job is queued again when it ends."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_HANG
from roxxel_dist.launcher.backends.slurm.backend import SlurmBackend
from roxxel_dist.launcher.control.restart import INFRASTRUCTURE, Decision
from roxxel_dist.launcher.control.supervisor import JobResult, supervise
from roxxel_dist.launcher.jobs.record import JobRecorder
from roxxel_dist.launcher.jobs.tail import header
from roxxel_dist.launcher.spec import JobSpec

KILLED_IN_S = 120.0
"""How long SLURM may take to end a job that it will queue again."""
GOES_ON = ("RUNNING", "SIGNALING")
"""States of a job that SLURM has not begun to end; the second one while it sends the signal before the time limit."""
ASK_S = 10.0
NO_DAEMON = re.compile("Unable to contact|timed out|Connection refused", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What SLURM's variables say of the job that this process is in."""

    job_id: str
    nodelist: str
    batch: bool
    """Started by sbatch: it can be queued again."""
    restarts: int
    """How often it was."""
    node: str
    """The node of this process; empty on a login node, with salloc."""


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in, or None.

    A rank of a launch, which is in a job too, is not: what it starts is its own affair.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id or "ROXXEL_PROCESS_ID" in environ:
        return None
    return Allocation(
        job_id=job_id,
        nodelist=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),
        batch=environ.get("ENVIRONMENT") == "BATCH",
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node=environ.get("SLURMD_NODENAME", ""),
    )


def nodes(nodelist: str) -> list[str]:
    """The names behind `n[1-3,7]`. Raises ValueError where SLURM cannot tell."""
    told = _scontrol("show", "hostnames", nodelist)
    if told.returncode != 0:
        raise ValueError(f"scontrol cannot tell the nodes of SLURM_JOB_NODELIST={nodelist}: {told.stderr.strip()}")
    return told.stdout.split()


def binds_cpus() -> bool:
    """Whether this SLURM binds tasks to CPUs; one that does not would complain when it is told not to."""
    told = _scontrol("show", "config").stdout
    return re.search(r"^TaskPlugin\s*=\s*(task/none|\(null\))$", told, re.MULTILINE) is None


def run_in_allocation(job: JobSpec, backend: SlurmBackend, inside: Allocation, max_requeues: int) -> int:
    """Run a job on the nodes of an allocation, and have SLURM queue it again where that helps; its exit code."""
    recorder = JobRecorder(
        job,
        backend,
        detached=_is_stdout(job.log_dir / "launcher.log"),
        slurm_job=inside.job_id if inside.node else "",
    )
    if recorder.entry.detached:
        print(header(recorder.entry), end="", flush=True)
    result = supervise(job, backend, recorder)
    decision = requeue(result, inside, max_requeues, job_state(inside.job_id) if inside.batch else "")
    if decision.why:
        print(f"roxxel-dist: {decision.why}", file=sys.stderr, flush=True)
    if decision.again:
        _requeue(inside.job_id)
    return result.code


def requeue(result: JobResult, inside: Allocation, max_requeues: int, state: str) -> Decision:
    """What a job that ended so does next; `state` is what SLURM says of it.

    SLURM asks with SIGTERM, some time before the limit. A person asks with Ctrl-C or `roxxel-dist stop` (SIGINT). A job
    that is no longer RUNNING is ended by SLURM: after `scancel` it must not come back, and where it was preempted, or
    has lost a node, SLURM queues it again itself.
    """
    code = result.code
    if result.requested == SIGTERM and (code in (EXIT_DRAINED, EXIT_HANG, 128 + SIGTERM) or code in INFRASTRUCTURE):
        unsaved = (
            "" if code == EXIT_DRAINED else ", and the ranks did not save in time (a longer --grace would give it)"
        )
        cause = f"SLURM asked it to end{unsaved}"
    elif result.requested in (None, SIGTERM) and result.host_lost:
        cause = "a node is out of reach"
    else:
        return Decision(again=False)
    if result.idle:
        cause += "; there was no time for a step, which a longer --slurm-time gives"
    if not inside.batch:
        return Decision(again=False)
    if state not in GOES_ON:
        return Decision(
            again=False, why=f"{cause}; job {inside.job_id} is {state or 'unknown to SLURM'}: SLURM decides"
        )
    if inside.restarts >= max_requeues:
        return Decision(
            again=False,
            why=f"{cause}; not queued again: it was {inside.restarts} times, and --max-requeues is {max_requeues}",
        )
    count = f"requeue {inside.restarts + 1} of {max_requeues}"
    return Decision(again=True, why=f"{cause}; job {inside.job_id} is queued again ({count})")


def job_state(job_id: str) -> str:
    """JobState; empty where SLURM does not know the job (any more)."""
    found = re.search(r"\bJobState=(\w+)", _scontrol("show", "job", "-o", job_id).stdout)
    return found[1] if found else ""


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    """What scontrol answers, asked again for a while where its daemon is restarted."""
    end = time.monotonic() + ASK_S
    while True:
        try:
            told = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return subprocess.CompletedProcess(words, 127, "", "there is no `scontrol` on this machine")
        if not NO_DAEMON.search(told.stderr) or time.monotonic() > end:
            return told
        time.sleep(1)


def _requeue(job_id: str) -> None:
    """Ask, and wait for the end: a process that exits before SLURM ends it would show as FAILED."""
    told = _scontrol("requeue", job_id)
    if told.returncode == 0:
        time.sleep(KILLED_IN_S)
        return
    reason = told.stderr.strip() or f"scontrol ended with {told.returncode}"
    print(f"roxxel-dist: job {job_id} was not queued again: {reason}", file=sys.stderr, flush=True)


def _is_stdout(path: Path) -> bool:
    """Whether SLURM writes what this process says to this file."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(path))
    except OSError:
        return False
