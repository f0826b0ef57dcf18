"""The commands that start a program as many processes."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tyro

from roxxel_dist.cli.arguments import Switch, parse, parse_train
from roxxel_dist.config import UsageError, usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.base import Backend
    from roxxel_dist.launcher.spec import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobArgs:
    """What every way to launch understands."""

    gpus_per_host: int | None = None
    """GPUs of a host, dealt to its processes by CUDA_VISIBLE_DEVICES; not given, each process sees all of them."""
    devices_per_proc: int | None = None
    """Simulated CPU devices of each process; what jax finds where not given."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """K=V: a variable for every rank, for instance NCCL_DEBUG=INFO; K alone passes on the launcher's. Repeatable."""
    env_from: str | None = None
    """A file with a K=V a line, for every rank; --env wins over it."""
    run_id: str | None = None
    """Names the run, and its folder runs/run_ID; not given, the time."""
    port: int | None = None
    """Port on which the processes find each other, and one more at each restart; free ones where not given."""
    max_restarts: int = 3
    """Restarts after infrastructure failures (a rank killed, an agent lost, a hang); preemptions are free. 0: none."""
    step_timeout: float | None = None
    """Seconds to the next step, after which the rank that is stuck is named; not given, 10 usual steps, at least 60."""
    grace: float = 30.0
    """Seconds that the processes have to save and leave after Ctrl-C."""
    exit_timeout: float = 60.0
    """Seconds that the others have after the first process ended well."""
    all_ranks: Switch = False
    """Show the lines of every rank, not of rank 0 alone."""
    detach: Switch = False
    """Return when the job has started, and print its run id; see `ps`, `logs`, `attach` and `stop`."""
    dry_run: Switch = False
    """Print what each rank would run, with secrets masked, and start nothing."""
    json: Switch = False
    """With --dry-run: print it as JSON."""


A = TypeVar("A")


def command_of(name: str, options: type[Any]) -> Callable[[list[str]], int]:
    """The command `launch NAME` of a backend whose flags are those of all launchers and its own `Options`."""
    kind = dataclasses.make_dataclass(f"{name.title()}Args", [], bases=(JobArgs, options), frozen=True, kw_only=True)
    kind.__doc__ = options.__doc__

    def command(words: list[str]) -> int:
        args, program = launch_words(kind, words, name, options.example)
        with usage_errors():
            backend, nprocs = args.backend()
            job = job_of(args, nprocs, program, backend)
        return start(args, job, backend)

    command.__doc__ = (options.__doc__ or "").partition(":")[0]  # without how it is called
    return command


def launch_words(kind: type[A], words: list[str], name: str, example: str) -> tuple[A, list[str]]:
    """The launcher's own options, and the words after `--`."""
    if "--" not in words and not {"-h", "--help"} & set(words):
        raise UsageError(f"no command: write it after `--`, as in `launch {name} {example} -- train --data_path DIR`")
    cut = words.index("--") if "--" in words else len(words)
    return parse(kind, words[:cut], f"launch {name}", underscores=False), words[cut + 1 :]


def start(args: JobArgs, job: "JobSpec", backend: "Backend") -> int:
    """Start a job, or tell what would be started."""
    if args.dry_run:
        from roxxel_dist.launcher.dry_run import as_json, as_text

        with usage_errors():  # the port may be in use
            print(as_json(job, backend) if args.json else as_text(job, backend))
        return 0
    if args.detach:
        with usage_errors():
            return _detach(job, backend)
    from roxxel_dist.launcher.control.supervisor import run

    return run(job, backend)


def _detach(job: "JobSpec", backend: "Backend") -> int:
    """Leave the job to a controller of its own; the run id alone on stdout, for scripts."""
    from roxxel_dist.launcher.jobs.detach import StartError, detach

    try:
        entry = detach(job, backend)
    except StartError as problem:
        print(problem, file=sys.stderr, flush=True)
        return problem.code
    print(entry.run_id, flush=True)
    told = f"run {entry.run_id} started, its launcher is pid {entry.controller.pid} on {entry.controller.host}"
    print(f"roxxel-dist: {told}; see it with `{entry.line('attach')}`", file=sys.stderr, flush=True)
    return 0


def micro_batches(command: Sequence[str]) -> tuple[int, ...]:
    """Rows of each phase's micro-batch, by the words of a `train` command; none for another program.

    Asked once, at the launch: the file of the config may be another one an hour later.

    Raises:
        ValueError: the words, or the config that they name, cannot be used.
    """
    if command[:1] != ("train",):
        return ()
    from roxxel_dist.curriculum.phases import Phase

    _, config = parse_train(list(command[1:]))
    if not config.phases:
        return (config.batch_size,)
    return tuple(Phase.of(phase).batch_size // config.grad_accum for phase in config.phases)


def job_of(args: JobArgs, nprocs: int, command: list[str], backend: "Backend") -> "JobSpec":
    """The job that the words ask for. Raises ValueError, before any process starts, for a slip in them."""
    from roxxel_dist.launcher.environment import assignments, read_env_file
    from roxxel_dist.launcher.jobs import record
    from roxxel_dist.launcher.spec import JobSpec, log_dir_for, new_run_id, placements, working_hosts

    if args.json and not args.dry_run:
        raise ValueError("--json tells what would run: give it with --dry-run")
    batches = micro_batches(tuple(command))
    fields = {field.name for field in dataclasses.fields(JobSpec)} - {"env", "nprocs", "run_id"}
    run_id = args.run_id or new_run_id(record.knows)
    job = JobSpec(
        command=tuple(command),
        nprocs=nprocs,
        run_id=run_id,
        log_dir=log_dir_for(tuple(command), run_id),
        env={**(read_env_file(args.env_from) if args.env_from else {}), **assignments(args.env, os.environ)},
        micro_batches=batches,
        **{name: value for name, value in dataclasses.asdict(args).items() if name in fields},
    )
    placements(job, working_hosts(job, backend.hosts), "", backend.environment)  # the GPUs of a host must divide
    return job
