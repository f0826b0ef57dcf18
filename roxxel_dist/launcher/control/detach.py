"""A controller that runs without a terminal: in a process and session of its own, with its output in `launcher.log`.

Until the job has started, it shares the stderr of the command that asked for it, so that a refusal reads as without
`--detach`.
"""

import os
import signal
import sys
from pathlib import Path

from roxxel_dist.launcher.control.record import JobRecord, JobRecorder
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import header, info
from roxxel_dist.process.exit_codes import EXIT_FAILED


class NotStartedError(Exception):
    """The job did not start; `code` is that of the command. Why was printed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class CallerGoneError(Exception):
    """The command that asked for the job has ended."""


def detach(job: JobSpec, backend: Backend) -> int:
    """Start a controller for the job on this machine; its pid, when the ranks are being started.

    It is a fork of this process, which must have no threads. There this function ends with SystemExit, when the job
    has ended.

    Raises:
        NotStartedError: the job was refused.
    """
    answers, sender = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    controller = os.fork()
    if controller == 0:
        os.close(answers)
        sys.exit(_control(job, backend, sender))
    os.close(sender)
    with open(answers, "rb") as stream:
        if stream.read():
            return controller
    code = os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1])
    raise NotStartedError(code if code >= 0 else 128 - code)


def _control(job: JobSpec, backend: Backend, sender: int) -> int:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher takes it for a wish to stay
    for name in os.listdir("/proc/self/fd"):  # of a wrapper, such as the lock of `flock FILE`: not ours to keep open
        number = int(name)
        try:
            if number > 2 and os.get_inheritable(number):
                os.close(number)
        except OSError:  # that of the listing
            continue
    with open(os.devnull, "rb", buffering=0) as nowhere:
        os.dup2(nowhere.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for the run id alone

    def started(entry: JobRecord) -> None:
        """Send all later output to the log, and answer. Raises OSError: then the job must not go on."""
        Path(entry.log_dir).mkdir(parents=True, exist_ok=True)
        with entry.launcher_log.open("ab", buffering=0) as log:
            log.write(header(entry.run_id, entry.command).encode(errors="backslashreplace"))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        try:
            os.write(sender, b"1")
        except BrokenPipeError:
            raise CallerGoneError from None
        os.close(sender)

    try:
        return run(job, backend, JobRecorder(job, backend, started=started))
    except CallerGoneError:
        info("the command that waited for this job has ended, so the job does not start")
        return EXIT_FAILED
