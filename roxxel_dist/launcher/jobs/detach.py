"""A controller that nobody has to stay for: in a session of its own, with `launcher.log` for its screen.

`python -m roxxel_dist.launcher.jobs.detach` reads a job from stdin: no secret is in its words. Until the job has
started, its messages are those of the command that asked for it; then it answers on stdout and lets go of its caller.
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
from roxxel_dist.launcher.backends.ssh import SshBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.jobs import record
from roxxel_dist.launcher.jobs.record import JobRecord, JobRecorder
from roxxel_dist.launcher.jobs.tail import header
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.protocol import encode, take_stdout

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
    host = backend.hosts[0]
    spec = {"job": _plain(job), "backend": dict(backend.describe()), "host": host}
    with HostPool(backend, words=(MODULE,)) as pool:
        answer = pool.ask({host: spec}, START_S).get(host)
    stderr = [line for link in pool.all for line in link.stderr]  # whole: the controller has let go of it
    if answer is None:
        reason = f"roxxel-dist: the job could not be started on {host}: {pool.gone[host]}"
        raise StartError(EXIT_FAILED, "\n".join([*(stderr if len(stderr) > 1 else []), reason]))
    if "entry" not in answer:
        raise StartError(answer["code"], "\n".join([*stderr, *_hint(answer["code"], backend, host)]))
    for line in stderr:
        print(line, file=sys.stderr, flush=True)
    entry = record.from_values(answer["entry"])
    if entry.run_id != job.run_id or "/" in entry.controller.host:  # they become the name of a file
        wrong = f"{host} started run {entry.run_id!r} on {entry.controller.host!r} where it was told {job.run_id!r}"
        raise StartError(EXIT_FAILED, f"roxxel-dist: {wrong}: look there, with `ps`, for what runs")
    with contextlib.suppress(OSError):  # the job runs; it is only not listed here
        record.write(dataclasses.replace(entry, copied=True), new_only=True)
    return entry


def _hint(code: int, backend: Backend, host: str) -> list[str]:
    if code != EXIT_PREFLIGHT or backend.describe()["kind"] == "local":
        return []
    return [f"roxxel-dist: this was asked from {host}: with --detach it must reach every host, itself too, by ssh"]


def _plain(job: JobSpec) -> dict[str, Any]:
    return {**dataclasses.asdict(job), "log_dir": str(job.log_dir)}


def _job(values: dict[str, Any]) -> JobSpec:
    tuples = {name: tuple(values[name]) for name in ("command", "micro_batches") if name in values}
    return JobSpec(**{**values, **tuples, "log_dir": Path(values["log_dir"])})


class NobodyWaitsError(Exception):
    """Who asked for the job is gone."""


class _Caller:
    """The command that asked for the job: it has our stdout and stderr until it is answered."""

    def __init__(self) -> None:
        self._answers = os.fdopen(take_stdout(), "wb", buffering=0)

    def started(self, entry: JobRecord) -> None:
        """Send what is said from here on to the log, and answer. Raises OSError: then the job must not go on."""
        Path(entry.log_dir).mkdir(parents=True, exist_ok=True)
        log = os.open(entry.launcher_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(log, header(entry).encode(errors="backslashreplace"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        os.close(log)
        try:
            self._answer({"entry": dataclasses.asdict(entry)})
        except BrokenPipeError:
            raise NobodyWaitsError from None

    def ended(self, code: int) -> None:
        """The job is over; if that was before it started, nobody knows yet."""
        if not self._answers.closed:
            with contextlib.suppress(BrokenPipeError):
                self._answer({"code": code})

    def _answer(self, answer: dict[str, Any]) -> None:
        with self._answers as answers:
            answers.write(encode(answer))


def _control(spec: dict[str, Any], caller: _Caller) -> int:
    try:
        job, backend = _job(spec["job"]), make(spec["backend"])
    except ValueError as error:  # such as a file of --ssh-config that is not here
        print(f"roxxel-dist: on {spec['host']}, where the launcher would run: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    reach = backend.reach(spec["host"]) if isinstance(backend, SshBackend) else ()
    try:
        return run(job, backend, JobRecorder(job, backend, started=caller.started, reach=reach))
    except NobodyWaitsError:
        print("roxxel-dist: nobody waits for this job to start any more, so it does not", file=sys.stderr, flush=True)
        return EXIT_FAILED


def main() -> None:
    """Read what to do, leave the caller's session, and do it."""
    spec = json.loads(sys.stdin.readline())
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher takes it for a wish to stay
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, sys.stdin.fileno())
    os.close(nowhere)
    caller = _Caller()
    code = _control(spec, caller)
    caller.ended(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
