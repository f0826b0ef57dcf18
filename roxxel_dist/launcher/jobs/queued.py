"""Jobs that a batch system has and has not started: what is known of them, and their end."""

import json
import signal
import subprocess
import time
from dataclasses import asdict, replace

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.control.record import JobRecord

ASK_S = 10.0
"""How long one answer of SLURM may take."""
CANCELLED = 128 + signal.SIGTERM
"""The exit code of a job that never ran: as of one that SLURM ends."""


def look(job: JobRecord) -> JobRecord:
    """A job as it is now; `lost` where SLURM has it no more and it never ran."""
    if not job.is_queued:
        return job
    answer = _run("squeue", "--noheader", f"--jobs={job.slurm_job}", "--format=%T")
    is_gone = "Invalid job id" in answer.stderr or (answer.returncode == 0 and not answer.stdout.strip())
    now = job.now()
    return replace(now, state="lost") if is_gone and now.is_queued else now


def cancel(job: JobRecord) -> JobRecord:
    """Take a job out of SLURM's queue; its record then. One that has started meanwhile goes on.

    Raises UserError where SLURM does not do it.
    """
    answer = _run("scancel", "--state=PENDING", job.slurm_job)
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise UserError(f"SLURM job {job.slurm_job} of run {job.run_id} is not cancelled: {answer.stderr.strip()}")
    now = look(job)
    if now.state != "lost":
        return now
    ended = replace(now, state="ended", code=CANCELLED, ended=time.time())
    write_file(job.path, json.dumps(asdict(ended)) + "\n", sync=False)
    return ended


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
