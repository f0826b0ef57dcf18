"""`launch ray`: ranks on the nodes of a Ray cluster."""

import dataclasses
import os
import sys
from contextlib import ExitStack

from roxxel_dist.cli.arguments import Switch
from roxxel_dist.cli.launch import JobArgs, job_of, launch_words, start
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import UsageError, usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeArgs:
    """Which nodes; a class of its own so that `--help` begins with it."""

    address: str
    """The cluster: `auto` on one of its nodes or in a Ray job, or HOST:PORT of its head."""
    hosts: int
    """How many nodes; Ray chooses which."""
    procs_per_host: int = 1
    """Processes to start on each node."""
    cpus_per_host: float = 1
    """CPUs of each node that Ray keeps for the job; processes may use more."""
    insecure: Switch = False
    """Use the cluster also without a token: whoever reaches such a one can run programs as you."""
    place_timeout: float = 60.0
    """Seconds that Ray may take to find the nodes."""
    min_hosts: int | None = None
    """Go on with so many nodes where others stay away after a failure; not given, all are needed."""
    host_timeout: float = 60.0
    """Seconds that a node may be away after a failure before the job goes on, or ends, without it."""
    python: str | None = None
    """The interpreter on the nodes; not given, the path of this one."""
    directory: str | None = None
    """The working directory on the nodes; not given, that of the launcher, or the working_dir of the Ray job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayArgs(JobArgs, NodeArgs):
    """Start a program on nodes of a Ray cluster: `launch ray --address auto --hosts N [options] -- CMD…`.

    The cluster is used with a token (RAY_AUTH_MODE=token). --gpus-per-host are asked of Ray too. To leave it to the
    cluster: `ray job submit --no-wait -- roxxel-dist launch ray --address auto --hosts N -- CMD…`.
    """


def launch_ray(words: list[str]) -> int:
    """Start ranks on nodes of a Ray cluster."""
    args, command = launch_words(RayArgs, words, "ray", "--address auto --hosts 2")
    if args.detach:
        raise UsageError(
            "--detach: leave the launcher to the cluster itself: `ray job submit --no-wait -- roxxel-dist launch "
            "ray --address auto …`; `ray job logs` and `ray job stop` go with it"
        )
    with usage_errors():
        from roxxel_dist.launcher.backends.ray.backend import RayBackend
        from roxxel_dist.launcher.backends.ray.cluster import ClusterError
        from roxxel_dist.launcher.spec import ranks_on

        if args.procs_per_host < 1:
            raise ValueError(f"--procs-per-host {args.procs_per_host}: must be at least 1")
        backend = RayBackend(
            args.address, args.hosts, cpus=args.cpus_per_host, gpus=args.gpus_per_host, python=args.python,
            directory=args.directory, insecure=args.insecure, place_s=args.place_timeout, say=_say,
        )  # fmt: skip
        job = job_of(args, ranks_on(args.hosts, args.procs_per_host, 0, args.min_hosts), command, backend)
    if args.dry_run:
        return start(args, job, backend)
    with ExitStack() as stack:
        try:
            with usage_errors():
                stack.enter_context(backend)
        except ClusterError as problem:
            _say(str(problem))
            return EXIT_PREFLIGHT
        code = start(args, job, backend)
    if backend.abandoned:
        sys.stdout.flush()
        os._exit(code)  # Ray's own handler would wait for a minute, and then choose another code
    return code


def _say(line: str) -> None:
    print(f"roxxel-dist: {line}", file=sys.stderr, flush=True)
