"""Asking the controller of a job of this machine to stop, and waiting until it has."""

import os
import select
import signal
import time

from roxxel_dist.launcher.jobs.record import JobRecord, is_alive, path_of, read
from roxxel_dist.launcher.output.console import info

REPORT_S = 5.0
"""How often a person is told that a job goes on."""


def stop(job: JobRecord, *, kill: bool, timeout_s: float) -> JobRecord:
    """Ask a job to save and leave (`kill`: to kill its ranks), wait for its end, and return its record.

    A job that was asked before is not asked again: a second request would kill its ranks. After `timeout_s` the record
    is returned as it is.
    """
    try:
        controller = os.pidfd_open(job.controller.pid)
    except ProcessLookupError:
        return read(path_of(job)) or job
    try:
        if is_alive(job.controller):  # after the open: from here on the descriptor is this very process
            _request(job, controller, kill=kill)
            _wait(job, controller, timeout_s)
    finally:
        os.close(controller)
    return read(path_of(job)) or job


def _request(job: JobRecord, controller: int, *, kill: bool) -> None:
    state = (read(path_of(job)) or job).state
    if state == "ended":
        return
    if kill:
        info(f"run {job.run_id}: killing its ranks")
    elif state == "stopping":
        info(f"run {job.run_id} was asked to stop before")
        return
    else:
        info(f"run {job.run_id}: its ranks get {job.grace:g} s to save and leave; --kill does not wait for them")
    try:  # not SIGTERM: so SLURM asks, to go on later
        signal.pidfd_send_signal(controller, signal.SIGQUIT if kill else signal.SIGINT)
    except ProcessLookupError:
        return


def _wait(job: JobRecord, controller: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(controller, select.POLLIN)
    begun = time.monotonic()
    while (left := begun + timeout_s - time.monotonic()) > 0 and not poll.poll(min(REPORT_S, left) * 1000):
        now = read(path_of(job)) or job
        step = f", in step {now.step}" if now.step else ""
        info(f"run {job.run_id} is still {now.state}{step}, {time.monotonic() - begun:.0f} s after the request")
