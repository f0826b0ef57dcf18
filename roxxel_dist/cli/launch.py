"""`launch NAME`: starts a program as many processes. `launcher/backends/` defines the names."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.parser import HELP, parse
from roxxel_dist.launcher.backends import BACKENDS
from roxxel_dist.launcher.output import info, printable
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import DeviceNeeds
from roxxel_dist.settings.usage_errors import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.job.backend import Backend, Command, Options
    from roxxel_dist.launcher.job.spec import JobSpec

DOLLAR = re.compile(r"\$(\w+|\{\w+\})")
MOST = 1_000_000
"""Hosts, restarts or ports of a job, at most."""
MOST_OF_HOST = {"nprocs": 4096, "procs_per_host": 4096, "gpus_per_host": 1024, "devices_per_proc": 1024}
"""The most that one machine may be asked for."""
ONE_LAUNCHER = ("exec", "ray", "slurm", "ssh")
"""Backends whose launcher starts the ranks of all hosts, so that there is one launcher a job."""


def command_of(name: str) -> Callable[[list[str]], int]:
    """The command `launch NAME` of a backend."""
    kind: type[Command] = import_module(BACKENDS[name]).Options

    def command(words: list[str]) -> int:
        from roxxel_dist.launcher.job.backend import LaunchRequest
        from roxxel_dist.launcher.job.spec import flag

        end = words.index("--") if "--" in words else len(words)
        with usage_errors():
            if "--" not in words and not HELP.intersection(words):
                example = f"`launch {name} {kind.example} -- train --data_path DIR`"
                raise UserError(f"no command: write it after `--`, as in {example}")
            passed, given = kind.split_words([_with_our_name(word, kind) for word in words[:end]])
            if name in ONE_LAUNCHER and "SLURM_STEP_ID" in os.environ:
                from roxxel_dist.launcher.backends.slurm.backend import refuse_copies

                refuse_copies(os.environ)
        program = without_program_name(words[end + 1 :])
        options = parse(kind, given, f"launch {name}")
        with usage_errors():
            _check_counts(options)
            config = flag(program, "config") if name == "k8s" else None  # which may be in the image, and no file here
            in_image = config is not None and not os.path.exists(config)
            needs = device_needs([] if in_image else program)
        request = LaunchRequest(
            command=tuple(program),
            words=given,
            passed=passed,
            device_needs=needs,
            start=start,
            usage_errors=usage_errors,
        )
        return options.launch(request)

    command.__doc__ = (kind.__doc__ or "").partition(":")[0]  # without how it is called
    return command


def without_program_name(command: list[str]) -> list[str]:
    """A command without `roxxel-dist`, or `python -m roxxel_dist`, before a sub-command. `train` alone is checked
    before the start, and a host may not have this program in its PATH."""
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
        from roxxel_dist.launcher.control.new_job import as_text, describe

        with usage_errors():  # the port may be in use
            print(json.dumps(describe(job, backend), indent=2) if options.json else printable(as_text(job, backend)))
        return 0
    if not options.detach:
        from roxxel_dist.launcher.control.supervisor import run

        return run(job, backend)
    from roxxel_dist.launcher.control.detach import NotStartedError, detach

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


def device_needs(command: Sequence[str]) -> DeviceNeeds:
    """The demands of a `train` command on the number of devices; nothing for another program. Asked once, at the
    launch: the file of the config may be another one an hour later. Raises ValueError for words, or a config that they
    name, that cannot be used."""
    if list(command[:1]) != ["train"]:
        return DeviceNeeds()
    from roxxel_dist.cli.arguments import parse_train

    return parse_train(list(command[1:]))[1].device_needs


def check_command(command: Sequence[str]) -> None:
    """Check a `train` command; no other. Raises ValueError where it would refuse its data sets, blends or phases."""
    if list(command[:1]) == ["train"]:
        from roxxel_dist.cli.arguments import check_training, parse_train

        check_training(*parse_train(list(command[1:])))
