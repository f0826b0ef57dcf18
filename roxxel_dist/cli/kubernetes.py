"""Kubernetes: `launch k8s` prints a manifest, and `launch member` is what each of its pods runs."""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.cli.launch import JobArgs, job_of, launch_words, start
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.kubernetes.jobset import JobSetSpec, K8sOptions
    from roxxel_dist.launcher.backends.kubernetes.node import Node


def launch_k8s(words: list[str]) -> int:
    """Print a JobSet for Kubernetes."""
    from roxxel_dist.launcher.backends.kubernetes.jobset import K8sOptions, manifest

    options, command = launch_words(K8sOptions, words, "k8s", "--hosts 2 --image IMAGE")
    with usage_errors():
        import yaml

        plain = manifest(_spec(options, tuple(command)))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    sys.stdout.write(text)
    return 0


def _spec(options: "K8sOptions", command: tuple[str, ...]) -> "JobSetSpec":
    """What was asked for; nothing comes from the environment of this process. Raises ValueError for a slip."""
    from roxxel_dist.launcher.backends.kubernetes.jobset import JobSetSpec, threads
    from roxxel_dist.launcher.environment import assignments, read_env_file
    from roxxel_dist.launcher.spec import JobOptions, JobSpec, flag, log_dir_for, placements

    name = time.strftime("roxxel-%Y%m%d-%H%M%S") if options.name is None else options.name
    env_of_secret = tuple(dict.fromkeys(word for word in options.env if "=" not in word))
    env = {
        **({} if options.env_from is None else read_env_file(options.env_from)),
        **assignments([word for word in options.env if "=" in word], {}),
    }
    env = {name: value for name, value in env.items() if name not in env_of_secret}
    spec = JobSetSpec(name=name, command=command, options=options, env=env, env_of_secret=env_of_secret)
    config = flag(command, "config")
    if command[:1] == ("train",) and (config is None or Path(config).exists()):  # it may be in the image alone
        parse_train(list(command[1:]))
    shared = {field.name: getattr(options, field.name) for field in dataclasses.fields(JobOptions)}
    nprocs, logs = options.procs_per_host, log_dir_for(command, name)
    job = JobSpec(command=command, nprocs=nprocs, run_id=name, log_dir=logs, env=env, **shared)
    placements(job, ["host"], "", {})  # the GPUs of a host must divide
    if (count := threads(options)) and "PJRT_NPROC" not in env:  # nodes that differ would split their sums otherwise
        return dataclasses.replace(spec, env={**env, "PJRT_NPROC": str(count)})
    return spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeArgs:
    """Which host this is; a class of its own so that `--help` begins with it."""

    hosts: int | None = None
    """Hosts of the job. Not given: ROXXEL_HOSTS, or 1."""
    index: int | None = None
    """The number of this host, from 0. Not given: ROXXEL_INDEX, or JOB_COMPLETION_INDEX, which Kubernetes sets."""
    first: str | None = None
    """The name or address by which hosts find host 0. Not given: ROXXEL_FIRST_HOST."""
    procs_per_host: int | None = None
    """Processes on each host. Not given: ROXXEL_PROCS_PER_HOST, or 1."""
    attempt: int | None = None
    """How often the whole job was started before; ranks resume where it is not 0. Not given: ROXXEL_RESTARTS, or 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberArgs(JobArgs, NodeArgs):
    """Start one host's ranks of a job, on that host: `launch member [options] -- CMD…`.

    What starts a job this way (JobSet, compose) starts this command on every host, ends all of them when one ends, and
    starts them again together.
    """

    run_id: str | None = None
    """The same on all hosts: names the run, and its folder runs/run_ID. Not given: ROXXEL_RUN_NAME."""
    port: int | None = None
    """The coordinator's port on host 0. Not given: ROXXEL_PORT, or 29500."""
    max_restarts: int = 0
    """Restarts of this host's ranks alone: usually the whole job is started again."""
    host_timeout: float = 600.0
    """Seconds to wait until the name of host 0 is known."""


def launch_member(words: list[str]) -> int:
    """Start this host's ranks of a job that pods or containers make up."""
    args, command = launch_words(MemberArgs, words, "member", "--hosts 2 --index 0 --first NAME")
    with usage_errors():
        from roxxel_dist.launcher.backends.kubernetes.node import Node
        from roxxel_dist.launcher.backends.local import MemberBackend

        if args.detach:
            raise ValueError("--detach: a container ends with its first process, so a member stays; leave it out")
        flags = _flags(args)
        node = Node(
            hosts=flags["hosts"], index=flags["index"], first=flags["first"], procs=flags["procs_per_host"]
        )  # fmt: skip
        args = dataclasses.replace(args, run_id=flags["run_id"], port=flags["port"])
        job = dataclasses.replace(
            job_of(args, node.procs, command, MemberBackend(node.first, leads=node.is_coordinator)),
            first_rank=node.index * node.procs,
            world=node.hosts * node.procs,
            first_attempt=flags["attempt"],
        )
    address = node.first if args.dry_run else _find_first(node, job.host_timeout)
    if isinstance(address, int):
        return address
    return start(args, job, MemberBackend(address, leads=node.is_coordinator))


def _flags(args: MemberArgs) -> dict[str, Any]:
    """The flags that the environment may give, with what it gives, and with what they are otherwise."""
    from roxxel_dist.launcher.backends.kubernetes.node import DEFAULTS, VARIABLES, flags_from_environment

    given = flags_from_environment({name: getattr(args, name) for name in VARIABLES}, os.environ)
    flags: dict[str, Any] = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    for name in ("index", "first", "run_id"):
        if given[name] is None and flags["hosts"] > 1:
            option, variables = f"--{name.replace('_', '-')}", " or ".join(VARIABLES[name])
            raise ValueError(f"{option} is not given, nor {variables}: {flags['hosts']} hosts need it")
    if flags["attempt"] < 0:
        raise ValueError(f"--attempt {flags['attempt']}: must be 0, or how often the job was started before")
    return flags


def _find_first(node: "Node", limit_s: float) -> str | int:
    """Where rank 0 is; or the exit code, where that was not found out."""
    from roxxel_dist.launcher.backends.kubernetes.node import NoFirstHostError, find_first
    from roxxel_dist.launcher.control.signals import SignalPipe

    numbers: list[int] = []
    with SignalPipe(_say) as signals:  # the first process of a container would not even end without a handler

        def pause(seconds: float) -> bool:
            numbers.extend(signals.wait(seconds))
            return bool(numbers)

        try:
            address = find_first(node, limit_s, _say, pause)
        except NoFirstHostError as problem:
            _say(str(problem))
            return EXIT_PREFLIGHT
    return 128 + numbers[0] if address is None else address


def _say(text: str) -> None:
    print(f"roxxel-dist: {text}", file=sys.stderr, flush=True)
