"""`launch ray`: ranks on the nodes of a Ray cluster."""

import dataclasses
import sys
from contextlib import ExitStack

from roxxel_dist.cli.launch import JobArgs, job_of, launch_words, start
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import UsageError, usage_errors
from roxxel_dist.launcher.backends.ray.backend import RayBackend, RayOptions
from roxxel_dist.launcher.backends.ray.cluster import ClusterError
from roxxel_dist.launcher.spec import ranks_on


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayArgs(JobArgs, RayOptions):
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
        backend = RayBackend(args, args.gpus_per_host, _say)
        job = job_of(args, ranks_on(args.hosts, args.procs_per_host, 0, args.min_hosts), command, backend)
    with ExitStack() as stack:
        if not args.dry_run:
            try:
                with usage_errors():
                    stack.enter_context(backend.opened())
            except ClusterError as problem:
                _say(str(problem))
                return EXIT_PREFLIGHT
        return start(args, job, backend)


def _say(line: str) -> None:
    print(f"roxxel-dist: {line}", file=sys.stderr, flush=True)
