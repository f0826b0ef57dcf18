"""What a launch would run, shown without running it."""

import os
import shlex
from typing import Any

from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.environment import masked, masked_words, shell_line
from roxxel_dist.launcher.job.placement import coordinator_port, placements, worker_argv, working_hosts
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.transport.pool import agent_words
from roxxel_dist.process.exit_codes import MEMORY_ENV, PIPE_ENV
from roxxel_dist.process.progress import ENV


def describe(job: JobSpec, backend: Backend) -> dict[str, Any]:
    """The job as plain values, secrets masked: run, limits, and for each rank its host, variables and words.

    Raises ValueError as a launch would: a port in use, GPUs that do not divide.
    """
    if job.world is not None:  # it may be on another machine
        coordinator = f"{backend.address}:{job.port}"
    elif backend.address is not None:
        coordinator = f"{backend.address}:{coordinator_port(job.port)}"
    else:
        coordinator = f"<address of {backend.hosts[0]}>:{job.port or '<a free port>'}"
    words = worker_argv(masked_words(job.command), backend.python)
    return {
        "run_id": job.run_id,
        "log_dir": str(job.log_dir),
        "working_directory": backend.directory or os.getcwd(),
        "coordinator": coordinator,
        "max_restarts": job.max_restarts,
        "step_timeout": job.step_timeout,
        "grace": job.grace,
        "exit_timeout": job.exit_timeout,
        "set_by_the_agent": [ENV, PIPE_ENV, *[MEMORY_ENV] * job.is_restartable],
        "agents": {host: masked_words(backend.argv(host, *agent_words(backend, job.limits))) for host in backend.hosts},
        "ranks": [
            {"rank": rank, "host": place.host, "env": masked(env), "argv": words}
            for place in placements(job, working_hosts(job, backend.hosts), coordinator, backend.environment)
            for rank, env in place.ranks.items()
        ],
    }


def as_text(job: JobSpec, backend: Backend) -> str:
    """`describe` for people: a line a rank that a shell understands, beside the host's own variables."""
    plan = describe(job, backend)
    hosts = len({rank["host"] for rank in plan["ranks"]})
    limit = "adaptive" if job.step_timeout is None else f"{job.step_timeout:g} s"
    size = f"{job.nprocs} rank{'s' * (job.nprocs != 1)} on {hosts} host{'s' * (hosts != 1)}"
    set_by_the_agent = [f"{ENV} (a temporary file)", f"{PIPE_ENV} (a pipe)"]
    set_by_the_agent += [f"{MEMORY_ENV} (a folder in shared memory)"] * job.is_restartable
    lines = [
        f"run {job.run_id}: {size}, logs in {job.log_dir}",
        f"restarts {job.max_restarts}, step time-out {limit}; nothing was started",
        *(f"agent on {host}: {shlex.join(words)}" for host, words in plan["agents"].items()),
        f"in {plan['working_directory']}, with the host's variables, {', '.join(set_by_the_agent)}:",
        *(f"{rank['rank']} on {rank['host']}: {shell_line(rank['env'], rank['argv'])}" for rank in plan["ranks"]),
    ]
    return "\n".join(lines)
