"""`launch slurm`: submits a job, prints its script, or runs on the nodes of the job that it is in."""

import dataclasses
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from roxxel_dist.cli.arguments import Switch, plain_switches
from roxxel_dist.cli.launch import JobArgs, job_of, launch_words, start
from roxxel_dist.cluster.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT
from roxxel_dist.config import UsageError, usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.slurm.allocation import Allocation
    from roxxel_dist.launcher.backends.slurm.script import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeArgs:
    """Which nodes; a class of its own so that `--help` begins with it."""

    nodes: int | None = None
    """Nodes that work; not given, 1, or inside a job all of its nodes."""
    procs_per_host: int = 1
    """Processes to start on each node."""
    spare_hosts: int = 0
    """Nodes that are asked for too, and take the place of one that fails (--no-kill)."""
    min_hosts: int | None = None
    """Go on with so many nodes where others stay out of reach (--no-kill); not given, all are needed."""
    host_timeout: float = 60.0
    """Seconds that a node may be out of reach after a failure before the job goes on, or ends, without it."""
    max_requeues: int = 100
    """How often SLURM is asked to queue the job again, after a time limit, a preemption or a lost node. 0: never."""
    container: str | None = None
    """An image in which the ranks run."""
    runtime: Literal["pyxis", "apptainer"] | None = None
    """What runs the image."""
    mount: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """/PATH or /PATH:/INSIDE for the container, beside the working directory. Repeatable."""
    print: Switch = False
    """Print the sbatch script instead of submitting it."""
    python: str | None = None
    """The interpreter on the nodes; not given, the path of this one, or python3 of the container."""
    directory: str | None = None
    """The working directory on the nodes; not given, that of the launcher."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmArgs(JobArgs, NodeArgs):
    """Start a program on the nodes of a SLURM job: `launch slurm --nodes 2 [options] -- CMD…`.

    Outside a job it is submitted: --slurm-KEY VALUE becomes `#SBATCH --KEY=VALUE`, for instance --slurm-partition gpu
    --slurm-time 4:00:00. Inside one (salloc, or a script of your own) it runs on the nodes of that job. Before the time
    limit all ranks save, the job is queued again, and goes on from there. docs/howto/slurm.md tells more.
    """


def launch_slurm(words: list[str]) -> int:
    """Submit a SLURM job, or start ranks on the nodes of the one this is in."""
    from roxxel_dist.launcher.backends.slurm.allocation import allocation
    from roxxel_dist.launcher.backends.slurm.script import take_options

    cut = words.index("--") if "--" in words else len(words)
    with usage_errors():
        options, own = take_options(words[:cut])
    own = plain_switches(own, SlurmArgs)  # so that no form of --print gets into the script
    args, command = launch_words(SlurmArgs, [*own, *words[cut:]], "slurm", "--nodes 2")
    with usage_errors():
        _check(args)
    inside = allocation(os.environ)
    if inside is not None and inside.batch:  # SLURM's request may come before anybody listens: it waits
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if args.print or inside is None:
        return _submit(args, options, own, command)
    if options:
        raise UsageError(
            f"--slurm-{next(iter(options))} is for a job that is still to be submitted, and this is job "
            f"{inside.job_id}; leave it out, or unset SLURM_JOB_ID to submit another"
        )
    return _run(args, command, inside)


def _check(args: SlurmArgs) -> None:
    from roxxel_dist.launcher.backends.slurm.backend import check_container

    for flag, value, least in (
        ("--nodes", args.nodes, 1),
        ("--procs-per-host", args.procs_per_host, 1),
        ("--max-requeues", args.max_requeues, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value}: must be at least {least}")
    check_container(args.container, args.runtime, args.mount)
    if args.detach:
        raise ValueError("--detach: a submitted job does not need it, and one in an allocation ends with it")


def _submit(args: SlurmArgs, options: dict[str, str | None], own: list[str], command: list[str]) -> int:
    """Hand the job to sbatch, or print what it would be handed."""
    from roxxel_dist.launcher.backends.slurm.backend import SlurmBackend
    from roxxel_dist.launcher.backends.slurm.script import (
        JOB_RUN_ID,
        NotSubmittedError,
        hide_secrets,
        output_for,
        script,
        submit,
    )
    from roxxel_dist.launcher.environment import masked_words
    from roxxel_dist.launcher.spec import count_working

    with usage_errors():
        if args.dry_run:
            raise ValueError("--dry-run: use --print, which prints the script; inside a job --dry-run tells each rank")
        wanted = (args.nodes or 1) + args.spare_hosts
        working = count_working(wanted, args.spare_hosts, args.min_hosts)
        nodes = SlurmBackend("", [f"node {number}" for number in range(wanted)])
        job = job_of(args, args.procs_per_host * working, command, nodes)
        if masked_words(command) != command:
            raise ValueError(
                "the command holds a secret, which would stand in the script that SLURM keeps and shows: let it read "
                "a variable (--env NAME=VALUE, which is not in the script)"
            )
    # A printed script may be submitted again and again, so its runs are named by their jobs.
    run_id = JOB_RUN_ID if args.print and args.run_id is None else job.run_id
    log = Path(args.directory or os.getcwd()) / job.log_dir / "launcher.log"
    with usage_errors():
        output = "slurm-%j.out" if args.print else output_for(str(log))
    if not args.print and shutil.which("sbatch") is None:
        why = "there is no `sbatch` on this machine: run this on a login node, or take the script of --print there"
        print(f"roxxel-dist: not submitted: {why}", file=sys.stderr, flush=True)
        return EXIT_PREFLIGHT
    shown, secrets = hide_secrets([word for word in own if word != "--print"])
    python = args.python if args.python and not args.container else sys.executable
    named = [] if args.run_id else ["--run-id", run_id]
    launch = [python, "-u", "-m", "roxxel_dist", "launch", "slurm", *named, *shown, "--", *command]
    notes = [f"export {name} before `sbatch`: it is a secret, and not in this script" for name in secrets]
    text = script(_request(args, wanted, options, output), launch, notes)
    if args.print:
        print(text, end="")
        return 0
    log.parent.mkdir(parents=True, exist_ok=True)  # SLURM makes no folder, and tells nobody
    try:
        job_id, said = submit(text, {**os.environ, **secrets})
    except NotSubmittedError as error:
        print(f"roxxel-dist: not submitted: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    if said:
        print(said, file=sys.stderr)
    print(job_id, flush=True)
    told = f"run {run_id} is SLURM job {job_id} (`squeue -j {job_id}`, `scancel {job_id}`)"
    later = f"when it runs: `roxxel-dist attach {run_id}`; its lines are in {options.get('output') or log}"
    print(f"roxxel-dist: {told}\nroxxel-dist: {later}", file=sys.stderr, flush=True)
    return 0


def _request(args: SlurmArgs, nodes: int, options: dict[str, str | None], output: str) -> "Request":
    from roxxel_dist.launcher.backends.slurm.script import Request

    return Request(
        nodes=nodes,
        procs_per_host=args.procs_per_host,
        output=output,
        directory=args.directory or os.getcwd(),
        grace=args.grace,
        gpus_per_host=args.gpus_per_host,
        stays=args.spare_hosts > 0 or args.min_hosts is not None,
        requeue=args.max_requeues > 0,
        options=options,
    )


def _run(args: SlurmArgs, command: list[str], inside: "Allocation") -> int:
    """Run on the nodes that this job has."""
    with usage_errors():
        from roxxel_dist.launcher.backends.slurm.backend import SlurmBackend
        from roxxel_dist.launcher.spec import count_working

        if shutil.which("srun") is None:
            raise ValueError(f"this is SLURM job {inside.job_id}, and there is no `srun`: add SLURM's commands to PATH")
        from roxxel_dist.launcher.backends.slurm.allocation import binds_cpus, nodes, run_in_allocation

        names = nodes(inside.nodelist)
        wanted = len(names) if args.nodes is None else args.nodes + args.spare_hosts
        if wanted > len(names):
            raise ValueError(
                f"--nodes {args.nodes}, --spare-hosts {args.spare_hosts}: job {inside.job_id} has {len(names)} nodes "
                f"({', '.join(names)})"
            )
        hosts = names[:wanted]
        working = count_working(len(hosts), args.spare_hosts, args.min_hosts)
        backend = SlurmBackend(
            inside.job_id, hosts, python=args.python, directory=args.directory, container=args.container,
            runtime=args.runtime, mounts=args.mount, gpus=args.gpus_per_host is not None, binds=binds_cpus(),
        )  # fmt: skip
        if inside.batch and args.run_id is None:
            args = dataclasses.replace(args, run_id=f"slurm-{inside.job_id}")  # the same when the job is queued again
        job = job_of(args, args.procs_per_host * working, command, backend)
        job = dataclasses.replace(job, first_attempt=inside.restarts)
    if args.dry_run:
        return start(args, job, backend)
    return run_in_allocation(job, backend, inside, args.max_requeues)
