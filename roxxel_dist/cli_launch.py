"""The commands that start a program as many processes."""

import dataclasses
from typing import TYPE_CHECKING

import tyro

from roxxel_dist.config import UsageError, usage_errors
from roxxel_dist.flags import Switch, parse, parse_train

if TYPE_CHECKING:
    from roxxel_dist.launcher.link import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobArgs:
    """What every way to launch understands."""

    gpus_per_host: int | None = None
    """GPUs of a host, dealt to its processes by CUDA_VISIBLE_DEVICES; not given, each process sees all of them."""
    devices_per_proc: int | None = None
    """Simulated CPU devices of each process; what jax finds where not given."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """K=V: a variable for every rank, for instance NCCL_DEBUG=INFO; may be given several times."""
    env_from: str | None = None
    """A file with a K=V a line, for every rank; --env wins over it."""
    port: int | None = None
    """Port on which the processes find each other; a free one where not given, and after a restart."""
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
    dry_run: Switch = False
    """Print what each rank would run, with secrets masked, and start nothing."""
    json: Switch = False
    """With --dry-run: print it as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankArgs:
    """How many; a class of its own so that `--help` begins with it."""

    nprocs: int = 1
    """Processes to start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalArgs(JobArgs, RankArgs):
    """Start a program as many processes on this machine: `launch local [options] -- CMD…`.

    CMD is `train …` (which stands for `roxxel-dist train …`), a Python script, or any program. docs/launching.md tells
    what is started again, and how a stuck rank is found.
    """


def launch_local(words: list[str]) -> int:
    """Start ranks on this machine."""
    if "--" not in words and not {"-h", "--help"} & set(words):
        raise UsageError("no command: write it after `--`, as in `launch local --nprocs 2 -- train --data_path DIR`")
    cut = words.index("--") if "--" in words else len(words)
    args, command = parse(LocalArgs, words[:cut], "launch local", underscores=False), words[cut + 1 :]
    with usage_errors():
        from roxxel_dist.launcher.backends.local import LocalBackend

        return _launch(args, args.nprocs, command, LocalBackend())


def _launch(args: JobArgs, nprocs: int, command: list[str], backend: "Backend") -> int:
    """Start a job of `nprocs` ranks, or tell what would be started."""
    if args.json and not args.dry_run:
        raise ValueError("--json tells what would run: give it with --dry-run")
    if command[:1] == ["train"]:
        parse_train(command[1:])  # a slip is told at once, before any process starts
    from roxxel_dist.launcher.job import JobSpec, log_dir_for, new_run_id
    from roxxel_dist.launcher.variables import assignments, read_env_file

    fields = dataclasses.asdict(args)
    for name in ("env", "env_from", "dry_run", "json", "nprocs"):
        fields.pop(name, None)
    run_id = new_run_id()
    job = JobSpec(
        command=tuple(command),
        nprocs=nprocs,
        run_id=run_id,
        log_dir=log_dir_for(tuple(command), run_id),
        env={**(read_env_file(args.env_from) if args.env_from else {}), **assignments(args.env)},
        **fields,
    )
    if args.dry_run:
        from roxxel_dist.launcher.dry_run import as_json, as_text

        print(as_json(job, backend) if args.json else as_text(job, backend))
        return 0
    from roxxel_dist.launcher.supervisor import run

    return run(job, backend)
