"""`launch slurm`: submits a job, prints its script, or runs on the nodes of the job that it is in."""

import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from roxxel_dist.cluster.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT
from roxxel_dist.launcher.backends import base
from roxxel_dist.launcher.backends.slurm.allocation import (
    Allocation,
    allocation,
    binds_cpus,
    nodes,
    run_in_allocation,
)
from roxxel_dist.launcher.backends.slurm.backend import SlurmBackend, check_container
from roxxel_dist.launcher.backends.slurm.script import (
    JOB_RUN_ID,
    NotSubmittedError,
    Request,
    hide_secrets,
    output_for,
    script,
    submit,
    take_options,
)
from roxxel_dist.launcher.environment import masked_words
from roxxel_dist.launcher.placement import ranks_on
from roxxel_dist.launcher.spec import HostOptions


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(HostOptions):
    """Which nodes."""

    nodes: int | None = None
    """Nodes that work; not given, 1, or inside a job all of its nodes."""
    procs_per_host: int = 1
    """Processes to start on each node."""
    spare_hosts: int = 0
    """Nodes that are asked for too, and take the place of one that fails (--no-kill)."""
    max_requeues: int = 100
    """How often SLURM is asked to queue the job again, after a time limit, a preemption or a lost node. 0: never."""
    container: str | None = None
    """An image in which the ranks run."""
    runtime: Literal["pyxis", "apptainer"] | None = None
    """What runs the image."""
    mount: tuple[str, ...] = ()
    """/PATH or /PATH:/INSIDE for the container, beside the working directory. Repeatable."""
    print: bool = False
    """Print the sbatch script instead of submitting it."""
    python: str | None = None
    """The interpreter on the nodes; not given, the path of this one, or python3 of the container."""
    directory: str | None = None
    """The working directory on the nodes; not given, that of the launcher."""


@dataclass(frozen=True, kw_only=True)
class Options(base.Options, SlurmOptions):
    """Start a program on the nodes of a SLURM job: `launch slurm --nodes 2 [options] -- CMD…`.

    Outside a job it is submitted: --slurm-KEY VALUE becomes `#SBATCH --KEY=VALUE`, for instance --slurm-partition gpu
    --slurm-time 4:00:00. Inside one (salloc, or a script of your own) it runs on the nodes of that job. Before the time
    limit all ranks save, the job is queued again, and goes on from there. docs/howto/slurm.md tells more.
    """

    example: ClassVar[str] = "--nodes 2"

    @classmethod
    def split_words(cls, words: list[str]) -> tuple[dict[str, str | None], list[str]]:
        """`--slurm-KEY VALUE` is for sbatch."""
        return take_options(words)

    def launch(self, request: base.LaunchRequest) -> int:
        """Submit a job, or start ranks on the nodes of the one this is in."""
        with request.usage_errors():
            for flag, value, least in (("--nodes", self.nodes, 1), ("--max-requeues", self.max_requeues, 0)):
                if value is not None and value < least:
                    raise ValueError(f"{flag} {value}: must be at least {least}")
            check_container(self.container, self.runtime, self.mount)
            if self.detach:
                raise ValueError("--detach: a submitted job does not need it, and one in an allocation ends with it")
        inside = allocation(os.environ)
        if inside is not None and inside.batch:  # SLURM's request may come before anybody listens: it waits
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if self.print or inside is None:
            return _submit(self, request)
        return _run(self, request, inside)


def _submit(options: Options, request: base.LaunchRequest) -> int:
    """Hand the job to sbatch, or print what it would be handed."""
    with request.usage_errors():
        if options.dry_run:
            raise ValueError("--dry-run: use --print, which prints the script; inside a job --dry-run tells each rank")
        count = (options.nodes or 1) + options.spare_hosts
        nprocs = ranks_on(count, options.procs_per_host, options.spare_hosts, options.min_hosts)
        job = request.job(options, nprocs, SlurmBackend("", [f"node {number}" for number in range(count)]))
        if masked_words(request.command) != list(request.command):
            raise ValueError(
                "the command holds a secret, which would stand in the script that SLURM keeps and shows: let it read "
                "a variable (--env NAME=VALUE, which is not in the script)"
            )
        # A printed script may be submitted again and again, so its runs are named by their jobs.
        run_id = JOB_RUN_ID if options.print and options.run_id is None else job.run_id
        log = Path(options.directory or os.getcwd()) / job.log_dir / "launcher.log"
        output = "slurm-%j.out" if options.print else output_for(str(log))
    if not options.print and shutil.which("sbatch") is None:
        _say(
            "not submitted: there is no `sbatch` on this machine: run this on a login node, or take the script of "
            "--print there"
        )
        return EXIT_PREFLIGHT
    shown, secrets = hide_secrets([word for word in request.words if word != "--print"])
    python = options.python if options.python and not options.container else sys.executable
    named = [] if options.run_id else ["--run-id", run_id]
    launch = [python, "-u", "-m", "roxxel_dist", "launch", "slurm", *named, *shown, "--", *request.command]
    notes = [f"export {name} before `sbatch`: it is a secret, and not in this script" for name in secrets]
    text = script(_request(options, count, request.passed, output), launch, notes)
    if options.print:
        print(text, end="")
        return 0
    log.parent.mkdir(parents=True, exist_ok=True)  # SLURM makes no folder, and tells nobody
    try:
        job_id, warning = submit(text, {**os.environ, **secrets})
    except NotSubmittedError as error:
        _say(f"not submitted: {error}")
        return EXIT_FAILED
    if warning:
        print(warning, file=sys.stderr)
    print(job_id, flush=True)
    _say(f"run {run_id} is SLURM job {job_id} (`squeue -j {job_id}`, `scancel {job_id}`)")
    _say(f"when it runs: `roxxel-dist attach {run_id}`; its lines are in {request.passed.get('output') or log}")
    return 0


def _request(options: Options, nodes: int, passed: Mapping[str, str | None], output: str) -> Request:
    return Request(
        nodes=nodes,
        procs_per_host=options.procs_per_host,
        output=output,
        directory=options.directory or os.getcwd(),
        grace=options.grace,
        gpus_per_host=options.gpus_per_host,
        stays=options.spare_hosts > 0 or options.min_hosts is not None,
        requeue=options.max_requeues > 0,
        options=passed,
    )


def _run(options: Options, request: base.LaunchRequest, inside: Allocation) -> int:
    """Run on the nodes that this job has."""
    with request.usage_errors():
        if request.passed:
            raise ValueError(
                f"--slurm-{next(iter(request.passed))} is for a job that is still to be submitted, and this is job "
                f"{inside.job_id}; leave it out, or unset SLURM_JOB_ID to submit another"
            )
        if shutil.which("srun") is None:
            raise ValueError(f"this is SLURM job {inside.job_id}, and there is no `srun`: add SLURM's commands to PATH")
        names = nodes(inside.nodelist)
        count = len(names) if options.nodes is None else options.nodes + options.spare_hosts
        if count > len(names):
            raise ValueError(
                f"--nodes {options.nodes}, --spare-hosts {options.spare_hosts}: job {inside.job_id} has {len(names)} "
                f"nodes ({', '.join(names)})"
            )
        backend = SlurmBackend(
            inside.job_id,
            names[:count],
            python=options.python or "",
            directory=options.directory or "",
            container=options.container,
            runtime=options.runtime,
            mounts=options.mount,
            gpus=options.gpus_per_host is not None,
            binds=binds_cpus(),
        )
        if inside.batch and options.run_id is None:
            options = dataclasses.replace(options, run_id=f"slurm-{inside.job_id}")  # the same when it is queued again
        nprocs = ranks_on(count, options.procs_per_host, options.spare_hosts, options.min_hosts)
        job = dataclasses.replace(request.job(options, nprocs, backend), first_attempt=inside.restarts)
    if options.dry_run:
        return request.start(options, job, backend)
    return run_in_allocation(job, backend, inside, options.max_requeues)


def _say(text: str) -> None:
    print(f"roxxel-dist: {text}", file=sys.stderr, flush=True)
