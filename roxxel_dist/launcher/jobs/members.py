"""Asking the controller of a running job to let hosts join or leave it."""

import time
from collections.abc import Sequence

from roxxel_dist.launcher.control import member_requests
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.launcher.jobs.stop import REPORT_S, progress
from roxxel_dist.launcher.output.console import info
from roxxel_dist.process.exit_codes import UserError

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
    mailbox = member_requests.mailbox(job.log_dir)
    try:
        request = mailbox.post({"joins": joins, "hosts": list(hosts)})
    except OSError as error:
        raise UserError(f"run {job.run_id} cannot be asked: {error.filename}: {error.strerror}") from error
    begun = reported = time.monotonic()
    try:
        while (answer := mailbox.take_answer(request)) is None:
            now = time.monotonic()
            if (state := job.now()).is_over or now - begun > ANSWER_S:
                raise UserError(f"run {job.run_id} did not answer: it is {state.state}")
            if now - reported > REPORT_S:
                reported = now
                info(f"{progress(state)}, {now - begun:.0f} s after the request")
            time.sleep(LOOK_S)
    finally:
        mailbox.withdraw(request)
    info(f"run {job.run_id}: {answer['text']}")
    return answer["done"]
