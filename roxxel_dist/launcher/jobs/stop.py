"""Requests to the controller of a running job: to stop, or to let hosts join or leave it; and waiting for the end."""

import os
import select
import signal
import time
from collections.abc import Sequence

from roxxel_dist.launcher.control.inbox import mailbox
from roxxel_dist.launcher.control.record import JobRecord, is_alive
from roxxel_dist.launcher.output import info
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import claim

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
