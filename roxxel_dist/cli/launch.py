"""`launch NAME`: starts a program as many processes. `launcher/backends/` defines the names."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.words.parser import HELP, nearest, parse
from roxxel_dist.launcher.backends import BACKENDS
from roxxel_dist.launcher.job.environment import is_secret
from roxxel_dist.launcher.output.console import info, printable
from roxxel_dist.process.device_counts import DeviceNeeds
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import why_no_devices
from roxxel_dist.settings.usage_errors import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.job.backend import Backend, Command, Options
    from roxxel_dist.launcher.job.spec import JobSpec

DOLLAR = re.compile(r"\$(\w+|\{\w+\})")
MOST = 1_000_000
"""Hosts, restarts or ports of a job, at most."""
MOST_OF_HOST = {"nprocs": 4096, "procs_per_host": 4096, "gpus_per_host": 1024, "devices_per_proc": 1024}
"""What one machine may be asked for, at most."""
ONE_LAUNCHER = ("exec", "ray", "slurm", "ssh")
"""Backends whose launcher starts the ranks of all hosts, so that there is one launcher a job."""


def command_of(name: str) -> Callable[[list[str]], int]:
    """The command `launch NAME` of a backend."""
    kind: type[Command] = import_module(BACKENDS[name]).Options

    def command(words: list[str]) -> int:
        from roxxel_dist.launcher.job.backend import LaunchRequest

        end = words.index("--") if "--" in words else len(words)
        with usage_errors():
            if "--" not in words and not HELP.intersection(words):
                example = f"`launch {name} {kind.example} -- train --data_path DIR`"
                raise UserError(f"no command: write it after `--`, as in {example}")
            passed, given = kind.split_words([_with_our_name(word, kind) for word in words[:end]])
            if name in ONE_LAUNCHER and "SLURM_STEP_ID" in os.environ:
                from roxxel_dist.launcher.backends.slurm.allocation import refuse_copies

                refuse_copies(os.environ)
        program = without_program_name(words[end + 1 :])
        options = parse(kind, given, f"launch {name}")
        with usage_errors():
            _check_counts(options)
        request = LaunchRequest(
            command=tuple(program),
            words=given,
            passed=passed,
            job=lambda options, nprocs, backend: job_of(options, nprocs, program, backend),
            start=start,
            check_command=lambda: device_counts(program),
            usage_errors=usage_errors,
        )
        return options.launch(request)

    command.__doc__ = (kind.__doc__ or "").partition(":")[0]  # without how it is called
    return command


def without_program_name(command: list[str]) -> list[str]:
    """A command without `roxxel-dist`, or `python -m roxxel_dist`, before a sub-command.

    `train` alone is checked before the start, and a host may not have this program in its PATH.
    """
    from roxxel_dist.launcher.host.worker import PYTHON, SUBCOMMANDS

    skip = 1 if os.path.basename(command[0] if command else "") == "roxxel-dist" else 0
    if not skip and command[:1] and command[0] in PYTHON and command[1:3] == ["-m", "roxxel_dist"]:
        skip = 3
    return command[skip:] if command[skip : skip + 1] and command[skip] in SUBCOMMANDS else command


def _with_our_name(word: str, kind: Any) -> str:
    """The flag of torchrun for the processes of a host as the launcher calls it."""
    name, equals, value = word.partition("=")
    if name.replace("-", "_") != "__nproc_per_node":
        return word
    fields = {field.name for field in dataclasses.fields(kind)}
    return f"--{'nprocs' if 'nprocs' in fields else 'procs-per-host'}{equals}{value}"


def start(options: "Options", job: "JobSpec", backend: "Backend") -> int:
    """Start a job, detach it, or print what would be started; the exit code."""
    if backend.is_local and job.total == job.nprocs:  # other hosts may have the data, and this one not
        with usage_errors():
            check_command(job.command)
    if options.dry_run:
        from roxxel_dist.launcher.control.dry_run import as_text, describe

        with usage_errors():  # the port may be in use
            print(json.dumps(describe(job, backend), indent=2) if options.json else printable(as_text(job, backend)))
        return 0
    if not options.detach:
        from roxxel_dist.launcher.control.supervisor import run

        return run(job, backend)
    from roxxel_dist.launcher.jobs.detach import NotStartedError, detach

    try:
        with usage_errors():
            pid = detach(job, backend)
    except NotStartedError as problem:
        return problem.code
    print(job.run_id, flush=True)  # alone on stdout, for scripts
    info(f"run {job.run_id} started, its launcher is pid {pid}; see it with `roxxel-dist attach {job.run_id}`")
    return 0


def _check_counts(options: Any) -> None:
    """Raises UserError for a number of hosts, processes or the like that no cluster has: a list of them has no end."""
    from roxxel_dist.launcher.job.spec import JobSpec

    of_job = {field.name for field in dataclasses.fields(JobSpec)}  # whose limits of time have rules of their own
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        is_count = isinstance(value, int) or (isinstance(value, float) and field.name not in of_job)
        most = MOST_OF_HOST.get(field.name, MOST)
        if is_count and not abs(value) <= most:  # so neither nan nor inf
            raise UserError(f"--{field.name.replace('_', '-')} {value}: must be at most {most:,}")


def _check_program(word: str, path: str | None) -> None:
    """Raises UserError for a program that is not on this machine, before anything is made for the job."""
    from roxxel_dist.launcher.host.worker import PYTHON, SUBCOMMANDS

    if "/" in word or word in {*PYTHON, *SUBCOMMANDS} or word.endswith(".py") or shutil.which(word, path=path):
        return
    near = nearest(word, [*SUBCOMMANDS])
    hint = f"did you mean {near!r}?" if near else "check the first word after `--`, or give its full path"
    raise UserError(f"program not found: {word!r}; {hint}")


def device_counts(command: Sequence[str]) -> dict[str, DeviceNeeds]:
    """What a `train` command asks of the number of devices, by the fields of `JobSpec`; nothing for another program.

    Asked once, at the launch: the file of the config may be another one an hour later. Raises ValueError for words, or
    a config that they name, that cannot be used.
    """
    if list(command[:1]) != ["train"]:
        return {}
    from roxxel_dist.cli.words.arguments import parse_train

    return {"device_needs": parse_train(list(command[1:]))[1].device_needs}


def _warn_of_dollars(variables: Mapping[str, str], path: str) -> None:
    """A file for a shell is no --env-from: nothing in it is expanded."""
    if found := [name for name, value in variables.items() if DOLLAR.search(value) and not is_secret(name)]:
        info(
            f"warning: --env-from {path}: {found[0]}={variables[found[0]]} stays as it stands, for no shell reads the "
            f"file; write the value itself, or use --env {found[0]} for that of this shell"
        )


def check_command(command: Sequence[str]) -> None:
    """Raises ValueError where a `train` command would refuse its data sets, blends or phases; looks at no other."""
    if list(command[:1]) == ["train"]:
        from roxxel_dist.cli.words.arguments import check_training, parse_train

        check_training(*parse_train(list(command[1:])))


def job_of(options: "Options", nprocs: int, command: list[str], backend: "Backend") -> "JobSpec":
    """The job that the words ask for. Raises ValueError, before any process starts, for a slip in them."""
    from roxxel_dist.launcher.control import index
    from roxxel_dist.launcher.job.environment import assignments, read_env_file
    from roxxel_dist.launcher.job.limits import SCALE_ENV, Limits
    from roxxel_dist.launcher.job.placement import placements, working_hosts
    from roxxel_dist.launcher.job.program import log_dir_for
    from roxxel_dist.launcher.job.spec import JobSpec, new_run_id

    if options.json and not options.dry_run:
        raise UserError("--json prints what would run: give it with --dry-run")
    if options.env_from:
        _warn_of_dollars(read_env_file(options.env_from), options.env_from)
    counts = device_counts(command)
    limits = Limits().scaled(float(os.environ.get(SCALE_ENV, "1")))
    shared = {field.name for field in dataclasses.fields(JobSpec)} - {"env", "nprocs", "run_id"}
    run_id = options.run_id or new_run_id(index.knows)
    job = JobSpec(
        command=tuple(command),
        nprocs=nprocs,
        run_id=run_id,
        log_dir=log_dir_for(tuple(command), run_id),
        env={**(read_env_file(options.env_from) if options.env_from else {}), **assignments(options.env, os.environ)},
        limits=limits,
        **counts,
        **{name: value for name, value in dataclasses.asdict(options).items() if name in shared},
    )
    placements(job, working_hosts(job, backend.hosts), "", backend.environment)  # the GPUs of a host must divide
    if backend.is_local and job.log_dir.parent.is_file():
        raise UserError(f"run_dir is {job.log_dir.parent}, a file: name a folder")
    if backend.is_local and not options.dry_run:
        _check_program(command[0], {**os.environ, **job.env}.get("PATH"))
    if backend.is_local and job.program.reports_steps and (why := why_no_devices(job.jax_environment(os.environ))):
        raise UserError(why)
    return job
