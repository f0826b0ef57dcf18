"""A controller that runs without a terminal: in its own session, with its output in `launcher.log`.

`python -m roxxel_dist.launcher.jobs.detach` reads a job from stdin, so that its arguments show no secret. Until the job
has started, it shares the output of the command that asked for it; then it answers on stdout and detaches from it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT, EXIT_USAGE
from roxxel_dist.launcher.backends import make
from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.jobs import record
from roxxel_dist.launcher.jobs.record import JobRecord, JobRecorder
from roxxel_dist.launcher.jobs.tail import header
from roxxel_dist.launcher.output.console import info
from roxxel_dist.launcher.output.printable import printable
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.protocol import Message, encode, take_stdout

START_S = 300.0
"""For the connection and the preflight of all hosts."""
MODULE = "roxxel_dist.launcher.jobs.detach"


class StartError(Exception):
    """The job did not start; `code` is that of the command, the message is for people and may be empty."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def detach(job: JobSpec, backend: Backend) -> JobRecord:
    """Start a controller for the job on the first host of the backend, and return when the ranks are being started.

    Raises:
        StartError: why not.
    """
    host, described = backend.hosts[0], backend.describe()
    spec = {
        "job": dataclasses.asdict(job) | {"log_dir": str(job.log_dir)},
        "backend": dict(described),
        "host": host,
    }
    with HostPool(backend, words=(MODULE,)) as pool:
        answer = pool.ask({host: spec}, START_S).get(host)
    stderr = [line for connection in pool.all for line in connection.stderr]  # whole: the controller has let go of it
    if answer is None:
        reason = f"roxxel-dist: the job could not be started on {host}: {pool.unreachable[host]}"
        raise StartError(EXIT_FAILED, "\n".join([*(stderr if len(stderr) > 1 else []), reason]))
    if "entry" not in answer:
        if answer["code"] == EXIT_PREFLIGHT and described["kind"] != "local":
            hint = f"this was asked from {host}: with --detach it must reach every host, itself too, by ssh"
            stderr.append(f"roxxel-dist: {hint}")
        raise StartError(answer["code"], "\n".join(stderr))
    for line in stderr:
        print(printable(line), file=sys.stderr, flush=True)
    entry = record.from_values(answer["entry"])
    if entry.run_id != job.run_id or "/" in entry.controller.host:  # they become the name of a file
        wrong = f"{host} started run {entry.run_id!r} on {entry.controller.host!r} where it was told {job.run_id!r}"
        raise StartError(EXIT_FAILED, f"roxxel-dist: {wrong}: look there, with `ps`, for what runs")
    with contextlib.suppress(OSError):  # the job runs; it is only not listed here
        record.write(dataclasses.replace(entry, copied=True), new_only=True)
    return entry


class ClientGoneError(Exception):
    """The command that asked for the job is gone."""


class _Client:
    """The command that asked for the job: it has our stdout and stderr until it is answered."""

    def __init__(self) -> None:
        self._answers = os.fdopen(take_stdout(), "wb", buffering=0)

    def started(self, entry: JobRecord) -> None:
        """Send all later output to the log, and answer. Raises OSError: then the job must not go on."""
        Path(entry.log_dir).mkdir(parents=True, exist_ok=True)
        with entry.launcher_log.open("ab", buffering=0) as log:
            log.write(header(entry).encode(errors="backslashreplace"))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        try:
            self.answer({"entry": dataclasses.asdict(entry)})
        except BrokenPipeError:
            raise ClientGoneError from None

    def answer(self, message: Message) -> None:
        """Send the result to the caller, unless it was sent before."""
        if not self._answers.closed:
            with self._answers:
                self._answers.write(encode(message))


def _control(spec: dict[str, Any], client: _Client) -> int:
    values = spec["job"]
    values |= {name: tuple(values[name]) for name in ("command", "micro_batches") if name in values}
    try:
        job, backend = JobSpec(**{**values, "log_dir": Path(values["log_dir"])}), make(spec["backend"])
    except ValueError as error:  # such as a file of --ssh-config that is not here
        info(f"on {spec['host']}, where the launcher would run: {error}")
        return EXIT_USAGE
    reach = backend.reach(spec["host"])
    try:
        return run(job, backend, JobRecorder(job, backend, started=client.started, reach=reach))
    except ClientGoneError:
        info("the command that waited for this job has ended, so the job does not start")
        return EXIT_FAILED


def main() -> None:
    """Read what to do, leave the caller's session, and do it."""
    spec = json.loads(sys.stdin.readline())
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher takes it for a wish to stay
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        os.dup2(nowhere.fileno(), sys.stdin.fileno())
    client = _Client()
    code = _control(spec, client)
    with contextlib.suppress(BrokenPipeError):
        client.answer({"code": code})
    sys.exit(code)


if __name__ == "__main__":
    main()
