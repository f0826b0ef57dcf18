"""Jobs that run already: the lines of their logs, what a batch system says of them, requests to stop, join, leave."""

import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from roxxel_dist.launcher.control.inbox import mailbox
from roxxel_dist.launcher.control.record import JobRecord, is_alive, read, write
from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.launcher.output import HEADER, info, printable
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import claim

PAUSE_MS = 100
BLOCK = 1 << 18


def run_lines(path: Path, run_id: str, last: int | None = None) -> Iterator[bytes | None]:
    """The lines of one run in a log, with their ends; None where there is no more yet, as often as it is asked.

    Other runs in the same directory may have begun the file, or gone on with it: `--resume` is another run.
    `last`: of the lines that are there, only so many; they are looked for from the end of the file.
    """
    while not path.exists():
        yield None
    line, is_of_run = b"", False
    with path.open("rb") as file:
        if last is not None:
            lines, end, is_of_run = _last_lines(file, run_id, last)
            yield from lines
            file.seek(end)
        while True:
            line += file.readline()
            if not line.endswith(b"\n"):
                yield None
                continue
            if match := HEADER.match(line):
                is_of_run = match[1] == os.fsencode(run_id)
            if is_of_run:
                yield line
            line = b""


def _last_lines(file: BinaryIO, run_id: str, count: int) -> tuple[list[bytes], int, bool]:
    """(the last complete lines of a run, where the complete lines end, whether what follows is of the run)."""
    end = stop = _find_before(file, b"\n", file.seek(0, os.SEEK_END)) + 1
    found: deque[bytes] = deque()
    is_of_run: bool | None = None
    while stop > 0 and (len(found) < count or is_of_run is None):
        begin, of_run = _section(file, stop, run_id)
        is_of_run = of_run if is_of_run is None else is_of_run
        while of_run and stop > begin and len(found) < count:
            start = max(begin, _find_before(file, b"\n", stop - 1) + 1)
            file.seek(start)
            found.appendleft(file.read(stop - start))
            stop = start
        stop = begin
    return list(found), end, bool(is_of_run)


def _section(file: BinaryIO, stop: int, run_id: str) -> tuple[int, bool]:
    """(where the last header before `stop` begins, or 0; whether it is of this run)."""
    while True:
        stop = _find_before(file, b"\n# ", stop - 1) + 1
        file.seek(stop)
        match = HEADER.match(file.readline())
        if match or stop == 0:  # else a line of a program that looks like one
            return stop, match is not None and match[1] == os.fsencode(run_id)


def _find_before(file: BinaryIO, text: bytes, stop: int) -> int:
    """Where `text` begins last in a file so that it begins before `stop`; -1 if it does not."""
    while stop > 0:
        start = max(0, stop - BLOCK)
        file.seek(start)
        if (at := file.read(stop - start + len(text) - 1).rfind(text)) >= 0:
            return start + at
        stop = start
    return -1


def show(lines: Iterable[bytes]) -> None:
    """Lines on stdout, byte for byte; on a terminal without what could command it, but for colours."""
    if sys.stdout.isatty():
        lines = (
            printable(line.decode(errors="backslashreplace"), colours=True).encode("utf-8", "backslashreplace")
            for line in lines
        )
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def follow(lines: Iterator[bytes | None], job: JobRecord) -> JobRecord:
    """Show new lines until the job is over, and return its record then.

    Raises BrokenPipeError when the reader of stdout is gone.
    """
    asked, said, waits = -math.inf, job.queue_reason, job.is_queued  # of a batch system that has the job
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # only to learn that its reader is gone
    while True:
        record = read(job.path)  # before the log: the last output must not be missed
        show(iter(lambda: next(lines), None))
        if record is None:
            return job
        if record.is_over or record.is_queued or not record.is_known:
            if time.monotonic() >= asked + ASK_S:
                asked, record = time.monotonic(), look(record)
                waits = record.is_queued
                if waits and record.queue_reason != said:
                    info(words(record))
                    said = record.queue_reason
            if record.is_over and not waits:
                return record
        else:
            waits, said = False, ""
        if reader.poll(PAUSE_MS):
            raise BrokenPipeError


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


REPORT_S = 5.0
"""How often a message says that a job still runs."""


def stop(job: JobRecord, *, kill: bool, timeout_s: float) -> JobRecord:
    """Ask a job to save and leave (`kill`: to kill its ranks), wait for its end, and return its record.

    A job that was asked before is not asked again: a second request would kill its ranks. After `timeout_s` the record
    is returned as it is. Raises UserError if the controller is in another container, or of another user.
    """
    try:
        controller = os.pidfd_open(job.controller.pid)
    except ProcessLookupError:
        return _ended_record(job)
    with open(controller, "rb", buffering=0):
        if not is_alive(job.controller):  # after the open: from here on the descriptor is this very process
            return _ended_record(job)
        _request(job, controller, kill=kill)
        poll = select.poll()
        poll.register(controller, select.POLLIN)
        begun = time.monotonic()
        while (left := begun + timeout_s - time.monotonic()) > 0 and not poll.poll(min(REPORT_S, left) * 1000):
            info(f"{progress(job.now())}, {time.monotonic() - begun:.0f} s after the request")
    return job.now()


def _ended_record(job: JobRecord) -> JobRecord:
    """The record of a job whose controller is no process here: it has ended, or another container has it."""
    now = job.now()
    if now.is_over:
        return now
    raise UserError(
        f"the launcher of run {job.run_id} (pid {job.controller.pid}) runs in another container of this machine: use "
        f"`roxxel-dist stop {job.run_dir}` there"
    )


def progress(job: JobRecord) -> str:
    """A line for people about what a job that was asked to stop does now."""
    if job.is_over:
        return f"run {job.run_id} has ended, its launcher (pid {job.controller.pid}) still exits"
    return f"run {job.run_id} is still {job.state}{f', in step {job.step}' if job.step else ''}"


def _request(job: JobRecord, controller: int, *, kill: bool) -> None:
    state = job.now().state
    if state == "ended":
        return
    # The controller may not have read an earlier request yet: the process that made it has claimed this name.
    if not kill and (state == "stopping" or not claim(f"stop-{job.controller.pid}-{job.controller.start}")):
        info(f"run {job.run_id} was asked to stop before")
        return
    rest = f"its ranks get {job.grace:g} s to save and exit; --kill does not wait for them"
    info(f"run {job.run_id}: {'killing its ranks' if kill else rest}")
    try:  # not SIGTERM: so SLURM asks, to go on later
        signal.pidfd_send_signal(controller, signal.SIGQUIT if kill else signal.SIGINT)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise UserError(f"run {job.run_id} was launched by another user, who alone can stop it") from error


LOOK_S = 0.1
ANSWER_S = 120.0
"""Seconds that a controller has for its answer: it gives none while it starts ranks."""


def change_hosts(job: JobRecord, hosts: Sequence[str], *, joins: bool) -> bool:
    """Ask that hosts join the job, or leave it, and say the answer; whether it is done.

    Raises:
        UserError: the job has ended, takes no hosts, or its folder cannot be written.
    """
    if job.is_over:
        raise UserError(f"run {job.run_id} is {job.state}: launch it again with other --hosts")
    if not job.takes_hosts:
        raise UserError(
            f"run {job.run_id} takes no hosts: those of `launch ssh` and `launch exec` do, without --max-restarts 0"
        )
    box = mailbox(job.log_dir)
    try:
        request = box.post({"joins": joins, "hosts": list(hosts)})
    except OSError as error:
        raise UserError(f"run {job.run_id} cannot be asked: {error.filename}: {error.strerror}") from error
    begun = reported = time.monotonic()
    try:
        while (answer := box.take_answer(request)) is None:
            now = time.monotonic()
            if (state := job.now()).is_over or now - begun > ANSWER_S:
                raise UserError(f"run {job.run_id} did not answer: it is {state.state}")
            if now - reported > REPORT_S:
                reported = now
                info(f"{progress(state)}, {now - begun:.0f} s after the request")
            time.sleep(LOOK_S)
    finally:
        box.withdraw(request)
    info(f"run {job.run_id}: {answer['text']}")
    return answer["done"]
