"""`launch slurm`: submits a job, prints its script, or runs on the nodes of the job that it is in."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from roxxel_dist.launcher.backends.slurm.backend import (
    KEPT,
    Allocation,
    SlurmBackend,
    binds_cpus,
    check_container,
    current_allocation,
    nodes,
    run_in_allocation,
)
from roxxel_dist.launcher.backends.slurm.grow import LEAVE_S, GrowJobs, options_from, options_of
from roxxel_dist.launcher.control.new_job import job_of
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import is_secret, masked_words, ranks_on
from roxxel_dist.launcher.job.spec import HostOptions, split_flags
from roxxel_dist.launcher.output import info, printable
from roxxel_dist.process.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT, UserError

SLACK_S = 15
"""From the end of the ranks' grace to the time limit: for the kill of those that stay, and for the requeue."""
REFUSED = {
    "gpus-per-task": "it hides the GPUs of a node from each other's tasks (jax#23452, #28194); use --gpus-per-host",
    "ntasks": "use --nodes and --procs-per-host",
    "ntasks-per-node": "use --procs-per-host",
    "nodes": "use --nodes, without slurm",
    "wrap": "the command comes after `--`",
    "chdir": "use --directory",
    "wait": "submit, then `roxxel-dist attach RUN`, which ends with the code of the job",
    "array": "each run has a folder of its own; submit one job a run",
}
OURS = {
    "ENVIRONMENT", "SLURM_RESTART_COUNT",
    "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_WAIT",
}  # fmt: skip
"""Variables that a shell within a job may have."""
JOB_RUN_ID = '"slurm-$SLURM_JOB_ID"'
"""A run id that stays when the job is requeued, for a script that may be submitted many times."""


@dataclass(frozen=True, kw_only=True)
class Options(base.Options, HostOptions):
    """Start a program on the nodes of a SLURM job: `launch slurm --nodes 2 [options] -- CMD…`.

    Outside a job it is submitted: --slurm-KEY VALUE becomes `#SBATCH --KEY=VALUE`, for example --slurm-partition gpu
    --slurm-time 4:00:00. Inside one (salloc, or a script of your own) it runs on the nodes of that job. Before the time
    limit all ranks save, and the job is queued again and continues. docs/howto/slurm.md tells more.
    """

    example: ClassVar[str] = "--nodes 2"
    nodes: int | None = None
    """Nodes that work; not given, 1, or inside a job all of its nodes."""
    procs_per_host: int = 1
    """Processes to start on each node."""
    spare_hosts: int = 0
    """Spare nodes, which replace one that fails (--no-kill)."""
    grow_jobs: int = 0
    """Number of further jobs of one node each (--exclusive). Each joins the job when SLURM starts it, and leaves it
    before its own time limit: the ranks save, and continue with more or fewer hosts. They end with the job."""
    grow_options: str | None = None
    """Options of sbatch for these jobs, as 'partition=spare time=60'. Default: those of --slurm-KEY."""
    max_requeues: int = 10
    """How often in a row, without a new step, SLURM is asked to queue the job again, after a time limit, a preemption
    or a lost node. 0: never."""
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

    @classmethod
    def split_words(cls, words: list[str]) -> tuple[dict[str, str | None], list[str]]:
        """`--slurm-KEY VALUE` (`--slurm-KEY=VALUE`, or `--slurm-KEY` alone) is for sbatch.

        Raises ValueError for a key that SLURM cannot have, or that is not for it, and for one given twice.
        """
        passed: dict[str, str | None] = {}
        others: list[str] = []
        for name, value, own in split_flags(words):
            key = name.removeprefix("slurm_").replace("_", "-")
            if not name.startswith("slurm_"):
                others += own
                continue
            if not re.fullmatch(r"[a-z][a-z-]*", key):
                raise UserError(f"{own[0]}: write --slurm-KEY VALUE, with the name of an option of sbatch for KEY")
            if key in REFUSED:
                raise UserError(f"--slurm-{key}: {REFUSED[key]}")
            if key in passed:
                raise UserError(f"--slurm-{key} is given twice: give it once")
            if "\n" in (value or ""):
                raise UserError(f"--slurm-{key}: its value holds a line end, which a #SBATCH line cannot: take it out")
            passed[key] = value
        return passed, others

    def launch(self, request: base.LaunchRequest) -> int:
        """Submit a job, or start ranks on the nodes of the one this is in."""
        with request.usage_errors():
            for flag, value, least in (
                ("--nodes", self.nodes, 1),
                ("--max-requeues", self.max_requeues, 0),
                ("--grow-jobs", self.grow_jobs, 0),
            ):
                if value is not None and value < least:
                    raise UserError(f"{flag} {value}: must be at least {least}")
            if self.grow_options is not None:
                options_of(self.grow_options)
            if self.grow_options is not None and not self.grow_jobs:
                raise UserError("--grow-options is for the jobs of --grow-jobs N: give it too")
            if self.grow_jobs and not self.max_restarts:
                raise UserError(f"--grow-jobs {self.grow_jobs}: hosts join by a restart; leave --max-restarts 0 out")
            check_container(self.container, self.runtime, self.mount)
            if self.detach:
                raise UserError("--detach: a submitted job does not need it, and one in an allocation ends with it")
        allocation = current_allocation(os.environ)
        if self.print or allocation is None:
            return _submit(self, request)
        return _run(self, request, allocation)


def hide_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """`--env K=V` as `--env K` where the name K is that of a secret, and these variables: sbatch hands them on.

    So that no secret is in a script, which SLURM keeps and shows (`scontrol write batch_script`).
    """
    shown: list[str] = []
    secrets: dict[str, str] = {}
    for name, value, own in split_flags(words):
        variable, equals, secret = (value or "").partition("=")
        shown += own
        if name == "env" and equals and is_secret(variable):
            secrets[variable] = secret
            shown[-1] = shown[-1].removesuffix(f"={secret}")
    return shown, secrets


def script(
    options: Options, passed: Mapping[str, str | None], output: str, command: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """The sbatch script that runs `command`.

    Args:
        passed: more `#SBATCH` lines, which win over ours; None: an option without a value.
        output: the file for the launcher's lines; SLURM fills in %j, the number of the job.
        notes: comments at its head.
    """
    ours: dict[str, str | None] = {
        "job-name": "roxxel-dist",
        "nodes": str((options.nodes or 1) + options.spare_hosts),
        "ntasks-per-node": str(options.procs_per_host),
        "chdir": options.directory or os.getcwd(),
        "output": output,
        "open-mode": "append",
        # The launcher is the batch shell's process (exec), so B: is the launcher.
        "signal": f"B:TERM@{int(options.grace) + SLACK_S}",
        "requeue" if options.max_requeues else "no-requeue": None,
    }
    if options.gpus_per_host is not None and not any(key.startswith(("gpu", "gres")) for key in passed):
        ours["gres"] = f"gpu:{options.gpus_per_host}"
    if options.spare_hosts or options.min_hosts is not None:
        ours["no-kill"] = None
    line = " ".join(word if word == JOB_RUN_ID else shlex.quote(word) for word in command)
    directives = [_directive(key, value) for key, value in {**ours, **passed}.items()]
    return "\n".join(["#!/bin/bash", *directives, *(f"# {note}" for note in notes), "", "set -eu", f"exec {line}", ""])


def _directive(key: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{key}"
    quoted = value if re.fullmatch(r"[^\s\"'\\#]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{key}={quoted}"


def _submit(options: Options, request: base.LaunchRequest) -> int:
    """Hand the job to sbatch, or print what it would be handed."""
    with request.usage_errors():
        if options.dry_run:
            raise UserError(
                "--dry-run: use --print for the script; inside a job --dry-run prints the command of each rank"
            )
        count = (options.nodes or 1) + options.spare_hosts
        nprocs = ranks_on(count, options.procs_per_host, options.spare_hosts, options.min_hosts)
        job = job_of(options, request, nprocs, SlurmBackend("", [f"node {number}" for number in range(count)]))
        if masked_words(request.command) != list(request.command):
            raise UserError(
                "the command holds a secret, which would stand in the script that SLURM keeps and shows: let it read "
                "a variable (--env NAME=VALUE, which is not in the script)"
            )
        for name in ("notify", "preflight"):
            if (text := getattr(options, name)) is not None and masked_words([text]) != [text]:
                raise UserError(
                    f"--{name} holds a secret, which would stand in the script that SLURM keeps and shows: let the "
                    "command read it from a file"
                )
        log = Path(options.directory or os.getcwd()) / job.log_dir / "launcher.log"
        if "\\" in str(log) and not options.print:
            raise UserError(
                f"{str(log)!r}: SLURM cannot write to a path with a backslash; choose another run directory"
            )
    if not options.print and shutil.which("sbatch") is None:
        info(
            "not submitted: there is no `sbatch` on this machine: run this on a login node, or take the script of "
            "--print there"
        )
        return EXIT_PREFLIGHT
    shown, secrets = hide_secrets([word for word in request.words if word != "--print"])
    python = options.python if options.python and not options.container else sys.executable
    # A printed script may be submitted again and again, so its runs are named by their jobs.
    named = [] if options.run_id else ["--run-id", JOB_RUN_ID if options.print else job.run_id]
    if options.grow_jobs and options.grow_options is None and (more := options_from(request.passed)):
        shown += ["--grow-options", more]
    launch = [python, "-u", "-m", "roxxel_dist", "launch", "slurm", *named, *shown, "--", *request.command]
    notes = [f"export {name} before `sbatch`: it is a secret, and not in this script" for name in secrets]
    output = "slurm-%j.out" if options.print else str(log).replace("%", "%%")
    text = script(options, request.passed, output, launch, notes)
    if options.print:
        print(text, end="")
        return 0
    log.parent.mkdir(parents=True, exist_ok=True)  # SLURM does not make it, and reports no error
    environment = {name: value for name, value in {**os.environ, **secrets}.items() if name not in OURS}
    sbatch = subprocess.run(
        ["sbatch", "--parsable"], input=text, env=environment, capture_output=True, text=True, check=False
    )
    message, (job_id, _, cluster) = sbatch.stderr.strip(), sbatch.stdout.strip().partition(";")
    if sbatch.returncode != 0:
        info(f"not submitted: {message or f'sbatch ended with {sbatch.returncode} and said nothing'}")
        return EXIT_FAILED
    if message:
        print(printable(message), file=sys.stderr)
    print(job_id, flush=True)
    backend = SlurmBackend("", [f"node {number}" for number in range(count)])
    spec = dataclasses.replace(job, log_dir=log.parent)
    recorder = JobRecorder(spec, backend, detached=True, slurm_job=job_id, slurm_cluster=cluster)
    recorder.queue()
    of_slurm = recorder.entry.of_slurm
    info(f"run {job.run_id} is SLURM job {job_id} (`squeue -j {of_slurm}`, `scancel {of_slurm}`)")
    info(f"when it runs: `roxxel-dist attach {job.run_id}`; its lines are in {request.passed.get('output') or log}")
    return 0


def _run(options: Options, request: base.LaunchRequest, allocation: Allocation) -> int:
    """Run on the nodes that this job has."""
    job_id = allocation.job_id
    with request.usage_errors():
        if request.passed:
            raise UserError(
                f"--slurm-{next(iter(request.passed))} is for a job that is still to be submitted, and this is job "
                f"{job_id}; leave it out, or unset SLURM_JOB_ID to submit another"
            )
        if int(os.environ.get("SLURM_HET_SIZE") or 0) > 1:
            raise UserError(
                f"job {job_id} is a heterogeneous job, and the ranks of a launch need nodes that are alike: submit a "
                "job of one component (no `#SBATCH hetjob` line, no `:` between the options)"
            )
        if shutil.which("srun") is None:
            raise UserError(f"this is SLURM job {job_id}, and there is no `srun`: add SLURM's commands to PATH")
        names = nodes(allocation.nodelist)
        count = len(names) if options.nodes is None else options.nodes + options.spare_hosts
        if count > len(names):
            raise UserError(
                f"--nodes {options.nodes}, --spare-hosts {options.spare_hosts}: job {job_id} has {len(names)} nodes "
                f"({', '.join(names)})"
            )
        backend = SlurmBackend(
            job_id,
            names[:count],
            python=options.python or "",
            directory=options.directory or "",
            container=options.container,
            runtime=options.runtime,
            mounts=options.mount,
            gpus=options.gpus_per_host is not None,
            binds=binds_cpus(),
            grow=_grow_jobs(options, job_id, names) if options.grow_jobs else None,
        )
        if allocation.batch and options.run_id is None:  # the same when it is queued again
            options = dataclasses.replace(options, run_id=f"slurm-{job_id}")
        nprocs = ranks_on(count, options.procs_per_host, options.spare_hosts, options.min_hosts)
        job = dataclasses.replace(job_of(options, request, nprocs, backend), first_attempt=allocation.restarts)
    if options.dry_run:
        return request.start(options, job, backend)
    return run_in_allocation(job, backend, allocation, options.max_requeues)


def _grow_jobs(options: Options, job_id: str, names: Sequence[str]) -> GrowJobs:
    """The jobs that may join this one, which has these nodes; they are still to be submitted."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or (name not in OURS and not name.startswith(("SLURM_", "SRUN_")))
    }
    return GrowJobs(
        job_id,
        options.grow_jobs,
        options=options_of(options.grow_options),
        procs_per_host=options.procs_per_host,
        gpus_per_host=options.gpus_per_host,
        exclude=names,
        leave_s=options.grace + LEAVE_S,
        environ=kept,
    )
