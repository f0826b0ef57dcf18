"""The command that a pod or a container runs: its own part of a job."""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.launch import JobArgs, job_of, launch_words, start
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.kubernetes.node import Member
    from roxxel_dist.launcher.spec import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceArgs:
    """Which host this is; a class of its own so that `--help` begins with it."""

    hosts: int | None = None
    """Hosts of the job. Not given: ROXXEL_HOSTS, or 1."""
    index: int | None = None
    """The number of this host, from 0. Not given: ROXXEL_INDEX, or JOB_COMPLETION_INDEX, which Kubernetes sets."""
    first: str | None = None
    """The name or address by which hosts find host 0. Not given: ROXXEL_FIRST_HOST."""
    procs_per_host: int | None = None
    """Processes on each host. Not given: ROXXEL_PROCS_PER_HOST, or 1."""
    attempt: int | None = None
    """How often the whole job was started before; ranks resume where it is not 0. Not given: ROXXEL_RESTARTS, or 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberArgs(JobArgs, PlaceArgs):
    """Start one host's ranks of a job, on that host: `launch member [options] -- CMD…`.

    What starts a job this way (JobSet, compose) starts this command on every host, ends all of them when one ends, and
    starts them again together.
    """

    run_id: str | None = None
    """The same on all hosts: names the run, and its folder runs/run_ID. Not given: ROXXEL_RUN_NAME."""
    port: int | None = None
    """The coordinator's port on host 0. Not given: ROXXEL_PORT, or 29500."""
    max_restarts: int = 0
    """Restarts of this host's ranks alone: usually the whole job is started again."""
    host_timeout: float = 600.0
    """Seconds to wait until the name of host 0 is known."""


def launch_member(words: list[str]) -> int:
    """Start this host's ranks of a job that pods or containers make up."""
    args, command = launch_words(MemberArgs, words, "member", "--hosts 2 --index 0 --first NAME")
    with usage_errors():
        from roxxel_dist.launcher.backends.local import MemberBackend

        args, member = _complete(args)
        job = _job(args, member, command, MemberBackend(member.first, leads=member.leads))
    if args.dry_run:
        return start(args, job, MemberBackend(member.first, leads=member.leads))
    address = _find(member, job.host_timeout)
    if isinstance(address, int):
        return address
    return start(args, job, MemberBackend(address, leads=member.leads))


def _complete(args: MemberArgs) -> tuple[MemberArgs, "Member"]:
    """The arguments with what the environment says. Raises ValueError."""
    from roxxel_dist.launcher.backends.kubernetes.node import PORT, VARIABLES, Member, told

    if args.detach:
        raise ValueError("--detach: a container ends with its first process, so a member stays; leave it out")
    found: dict[str, Any] = told({name: getattr(args, name) for name in VARIABLES}, os.environ)
    hosts = 1 if found["hosts"] is None else found["hosts"]
    if hosts > 1:
        for flag, name in (("--index", "index"), ("--first", "first"), ("--run-id", "run_id")):
            if found[name] is None:
                raise ValueError(f"{flag} is not given, nor {' or '.join(VARIABLES[name])}: {hosts} hosts need it")
    member = Member(
        hosts=hosts,
        index=found["index"] or 0,
        first="localhost" if found["first"] is None else found["first"],
        procs=1 if found["procs_per_host"] is None else found["procs_per_host"],
    )
    port = PORT if found["port"] is None else found["port"]
    attempt = found["attempt"] or 0
    if attempt < 0:
        raise ValueError(f"--attempt {attempt}: must be 0, or how often the job was started before")
    return dataclasses.replace(args, run_id=found["run_id"], port=port, attempt=attempt), member


def _job(args: MemberArgs, member: "Member", command: list[str], backend: Any) -> "JobSpec":
    job = job_of(args, member.procs, command, backend)
    return dataclasses.replace(
        job,
        first_rank=member.index * member.procs,
        world=member.hosts * member.procs,
        first_attempt=args.attempt or 0,
    )


def _find(member: "Member", limit_s: float) -> str | int:
    """Where rank 0 is; or the exit code, where that was not found out."""
    from roxxel_dist.launcher.backends.kubernetes.node import NoFirstHostError, find_first
    from roxxel_dist.launcher.control.signals import SignalPipe

    asked: list[int] = []
    with SignalPipe(_say) as signals:  # the first process of a container would not even end without a handler

        def pause(seconds: float) -> bool:
            asked.extend(signals.wait(seconds))
            return bool(asked)

        try:
            address = find_first(member, limit_s, _say, pause)
        except NoFirstHostError as problem:
            _say(str(problem))
            return EXIT_PREFLIGHT
    return 128 + asked[0] if address is None else address


def _say(text: str) -> None:
    print(f"roxxel-dist: {text}", file=sys.stderr, flush=True)
