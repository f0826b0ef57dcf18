"""Jobs that a batch system has, and has not started or is to start again: what is known of them, and their end."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from roxxel_dist.launcher.control.record import JobRecord, write
from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.process.exit_codes import UserError

ASK_S = 10.0
"""How long one answer of SLURM may take, and how often a command that follows a job asks."""
LEAVE_S = 60.0
"""How long `cancel` waits for a job that SLURM is just taking from its nodes, or starting."""
CANCELLED = 128 + signal.SIGTERM
"""The exit code of a job that never ran: as of one that SLURM ends."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
"""SLURM's states of a job that has no nodes."""
NEVER = "DependencyNeverSatisfied"
"""SLURM's reason for a job that it keeps and does not start."""


def look(job: JobRecord) -> JobRecord:
    """A job as it is now."""
    return look_at([job])[0]


def look_at(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Jobs as they are now, by one question to each cluster of SLURM: `queued` where it is to start them, for the first
    time or again; `lost` where it has them no more and no launcher wrote an end."""
    found = list(jobs)
    asked: dict[str, list[int]] = {}
    for place, job in enumerate(jobs):
        if job.slurm_job and not (job.state == "ended" and job.code == 0):
            asked.setdefault(job.slurm_cluster, []).append(place)
    for cluster, places in asked.items():
        numbers = ",".join(jobs[place].slurm_job for place in places)
        where = [f"--clusters={cluster}"] if cluster else []
        # %A is also of a task of an array the number that its launcher knows.
        answer = answer_of(["squeue", "--noheader", f"--jobs={numbers}", *where, "--format=%A|%U|%T|%r"], ASK_S)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            continue
        said = {number: words for number, *words in (line.split("|") for line in answer.stdout.splitlines()) if words}
        for place in places:
            found[place] = _now(jobs[place], said.get(jobs[place].slurm_job))
    return found


def _now(job: JobRecord, said: Sequence[str] | None) -> JobRecord:
    """A job about which SLURM says its user, state and reason, or that it does not have."""
    now = job.now()
    owner = -1
    with suppress(OSError):
        owner = now.path.stat().st_uid
    if said is not None and said[0] == str(owner):  # else the number is that of another job by now
        is_waiting = said[1] in WAITING
        state = "queued" if is_waiting else now.state
        return replace(now, state=state, queue_reason=said[2] if is_waiting else "", ranks=now.ranks * (not is_waiting))
    hides = os.getuid() not in (0, owner)  # a SLURM may hide the jobs of other users
    is_lost = now.is_queued or not (now.is_over or now.is_known)
    return replace(now, state="lost", ranks=()) if is_lost and not hides else now


def words(job: JobRecord) -> str:
    """A sentence for people about a job in the queue."""
    number, reason = job.slurm_job, job.queue_reason
    cure = ""
    if "held" in reason.lower():
        cure = f"; it is held: `scontrol release {job.of_slurm}` lets it start"
    elif reason == NEVER:
        cure = f"; it will never start: `scancel {job.of_slurm}`, and launch it again"
    again = "again " * job.ran
    shown = f", {reason}" * (reason not in ("", "None"))
    return (
        f"run {job.run_id} waits {again}in the queue of SLURM (job {number}{shown}): its lines come when it runs{cure}"
    )


def cancel(job: JobRecord) -> JobRecord:
    """Take a job out of SLURM's queue; its record then. One that has started meanwhile goes on.

    Raises UserError where SLURM does not do it.
    """
    end, now = time.monotonic() + LEAVE_S, job
    while now.is_queued and time.monotonic() < end:
        answer = answer_of(["scancel", "--state=PENDING", *job.of_slurm.split()], ASK_S)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            raise UserError(f"SLURM job {job.slurm_job} of run {job.run_id} is not cancelled: {answer.stderr.strip()}")
        if not (now := look(now)).is_queued:
            break
        time.sleep(1)  # it is in no queue yet, or no more
    if now.is_queued:
        raise UserError(
            f"SLURM job {job.slurm_job} of run {job.run_id} is not in the queue, and has not begun: `scancel "
            f"{job.of_slurm}` ends it"
        )
    if now.state != "lost":
        return now
    code = CANCELLED if job.code is None else job.code  # of one that had run: of its last start
    ended = replace(now, state="ended", code=code, ended=time.time())
    write(ended, job.path)
    return ended
