"""The job that the flags of `launch` ask for, and the commands that start it on hosts that they name."""

import dataclasses
import os
import re
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from roxxel_dist.launcher.control import index
from roxxel_dist.launcher.host.worker import PYTHON, SUBCOMMANDS
from roxxel_dist.launcher.job.backend import Backend, LaunchRequest, Options
from roxxel_dist.launcher.job.placement import (
    assignments,
    coordinator_port,
    is_secret,
    masked,
    masked_words,
    placements,
    read_env_file,
    shell_line,
    worker_argv,
    working_hosts,
)
from roxxel_dist.launcher.job.spec import SCALE_ENV, JobSpec, Limits, log_dir_for, new_run_id
from roxxel_dist.launcher.output import info
from roxxel_dist.launcher.transport.pool import agent_words
from roxxel_dist.process.exit_codes import MEMORY_ENV, PIPE_ENV, UserError
from roxxel_dist.process.platforms import why_no_devices
from roxxel_dist.process.progress import ENV

DOLLAR = re.compile(r"\$(\w+|\{\w+\})")


def job_of(options: Options, request: LaunchRequest, nprocs: int, backend: Backend) -> JobSpec:
    """The job of these options, so many ranks and a backend.

    Raises UserError, before any process starts, for a slip in them.
    """
    if options.json and not options.dry_run:
        raise UserError("--json prints what would run: give it with --dry-run")
    if options.env_from:
        _warn_of_dollars(read_env_file(options.env_from), options.env_from)
    limits = Limits().scaled(float(os.environ.get(SCALE_ENV, "1")))
    shared = {field.name for field in dataclasses.fields(JobSpec)} - {"env", "nprocs", "run_id"}
    run_id = options.run_id or new_run_id(index.knows)
    job = JobSpec(
        command=request.command,
        nprocs=nprocs,
        run_id=run_id,
        log_dir=log_dir_for(request.command, run_id),
        env={**(read_env_file(options.env_from) if options.env_from else {}), **assignments(options.env, os.environ)},
        limits=limits,
        device_needs=request.device_needs,
        **{name: value for name, value in dataclasses.asdict(options).items() if name in shared},
    )
    placements(job, working_hosts(job, backend.hosts), "", backend.environment)  # the GPUs of a host must divide
    if backend.is_local and job.log_dir.parent.is_file():
        raise UserError(f"run_dir is {job.log_dir.parent}, a file: name a folder")
    if backend.is_local and not options.dry_run:
        _check_program(request.command[0], {**os.environ, **job.env}.get("PATH"))
    if backend.is_local and job.program.reports_steps and (why := why_no_devices(job.jax_environment(os.environ))):
        raise UserError(why)
    return job


def _check_program(word: str, path: str | None) -> None:
    """Raises UserError for a program that is not on this machine, before anything is made for the job."""
    if "/" in word or word in {*PYTHON, *SUBCOMMANDS} or word.endswith(".py") or shutil.which(word, path=path):
        return
    near = get_close_matches(word, SUBCOMMANDS, 1)
    hint = f"did you mean {near[0]!r}?" if near else "check the first word after `--`, or give its full path"
    raise UserError(f"program not found: {word!r}; {hint}")


def _warn_of_dollars(variables: Mapping[str, str], path: str) -> None:
    """A file for a shell is no --env-from: nothing in it is expanded."""
    if found := [name for name, value in variables.items() if DOLLAR.search(value) and not is_secret(name)]:
        info(
            f"warning: --env-from {path}: {found[0]}={variables[found[0]]} stays as it stands, for no shell reads the "
            f"file; write the value itself, or use --env {found[0]} for that of this shell"
        )


@dataclass(frozen=True, kw_only=True)
class BackendOptions(Options):
    """The flags of a command that starts the ranks from here, on the hosts of a backend that they say all of."""

    @abstractmethod
    def backend(self) -> tuple[Backend, int]:
        """The backend, and how many processes there are in all. Raises ValueError for a slip."""

    def launch(self, request: LaunchRequest) -> int:
        """Start the ranks."""
        with request.usage_errors():
            backend, nprocs = self.backend()
            job = job_of(self, request, nprocs, backend)
        return request.start(self, job, backend)


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
