"""Kubernetes: `launch k8s` prints a manifest, and `launch member` is what each of its pods runs."""

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from roxxel_dist.cli.arguments import Switch, parse_train
from roxxel_dist.cli.launch import launch_words
from roxxel_dist.config import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.kubernetes.jobset import Pods

import os
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.launch import JobArgs, job_of, start
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.kubernetes.node import Member
    from roxxel_dist.launcher.spec import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class K8sArgs:
    """Print a JobSet for Kubernetes: `launch k8s --hosts N --image IMAGE [options] -- CMD… | kubectl apply -f -`.

    Nothing is applied. The cluster needs JobSet (jobset.sigs.k8s.io) and, for GPUs, NVIDIA's device plugin. The image
    needs roxxel-dist on its path.
    """

    hosts: int
    """Pods."""
    image: str
    """What they run; docker/ makes one."""
    procs_per_host: int = 1
    """Processes in each pod."""
    gpus_per_host: int | None = None
    """GPUs of each pod, dealt to its processes; one pod a node then."""
    devices_per_proc: int | None = None
    """Simulated CPU devices of each process."""
    name: str | None = None
    """Of the JobSet, and of the run; not given, the time."""
    namespace: str | None = None
    """Where it shall be; not given, kubectl decides."""
    volume: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """CLAIM:/path: a PersistentVolumeClaim that all pods mount (ReadWriteMany). Repeatable."""
    secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A Secret, all of whose keys become variables. Repeatable."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """K=V: a variable for every rank. K alone takes key K of the first --secret. Repeatable."""
    env_from: str | None = None
    """A file with a K=V a line, for every rank; --env wins over it."""
    cpu: str | None = None
    """CPUs that each pod asks for, as Kubernetes writes them."""
    memory: str | None = None
    """Memory that each pod asks for and may use, for instance 64Gi."""
    tpu: str | None = None
    """The accelerator of a TPU slice as GKE calls it, for instance tpu-v5-lite-podslice. Untested on hardware."""
    topology: str | None = None
    """The shape of that slice, for instance 4x4."""
    one_per_node: Switch = False
    """One pod a node, without GPUs too."""
    port: int = 29500
    """The coordinator's, in pod 0."""
    max_restarts: int = 3
    """Restarts of all pods after infrastructure failures; preemptions are free. 0: none."""
    step_timeout: float | None = None
    """Seconds to the next step, after which a rank is stuck; not given, 10 usual steps, at least 60."""
    grace: float = 30.0
    """Seconds that the processes have to save and leave when a pod is deleted."""
    exit_timeout: float = 60.0
    """Seconds that the others have after the first process ended well."""
    all_ranks: Switch = False
    """Show the lines of every rank of a pod in its log, not of its first alone."""


def launch_k8s(words: list[str]) -> int:
    """Print a JobSet for Kubernetes."""
    args, command = launch_words(K8sArgs, words, "k8s", "--hosts 2 --image IMAGE")
    with usage_errors():
        import yaml

        from roxxel_dist.launcher.backends.kubernetes.jobset import manifest

        text = yaml.safe_dump(manifest(_pods(args, command)), sort_keys=False, allow_unicode=True, width=120)
    sys.stdout.write(text)
    return 0


def _pods(args: K8sArgs, command: list[str]) -> "Pods":
    from roxxel_dist.launcher.backends.kubernetes.jobset import Pods, first_host

    name = time.strftime("roxxel-%Y%m%d-%H%M%S") if args.name is None else args.name
    env, of_secret = _variables(args)
    _check(args, name, command, env)
    cpus = _cpus(args)
    if cpus and "PJRT_NPROC" not in env:  # nodes that differ would split their sums in different ways
        env["PJRT_NPROC"] = str(cpus)
    return Pods(
        name=name,
        image=args.image,
        hosts=args.hosts,
        command=(*_member(args, name, first_host(name)), "--", *command),
        user_command=tuple(command),
        namespace=args.namespace,
        volumes=args.volume,
        secrets=args.secret,
        env=env,
        env_of_secret=of_secret,
        gpus=args.gpus_per_host,
        cpu=args.cpu,
        memory=args.memory,
        tpu=args.tpu,
        topology=args.topology,
        one_per_node=args.one_per_node,
        max_restarts=args.max_restarts,
        grace=args.grace,
    )


def _variables(args: K8sArgs) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables with values, those that a Secret has). Nothing comes from the environment of this process."""
    from roxxel_dist.launcher.environment import assignments, read_env_file

    alone = tuple(dict.fromkeys(word for word in args.env if "=" not in word))
    given = assignments([word for word in args.env if "=" in word], {})
    env = {**(read_env_file(args.env_from) if args.env_from else {}), **given}
    return {name: value for name, value in env.items() if name not in alone}, alone


def _check(args: K8sArgs, name: str, command: list[str], env: dict[str, str]) -> None:
    """What a launch here would check too. Raises ValueError."""
    from roxxel_dist.launcher.spec import JobSpec, flag, log_dir_for, placements

    if args.procs_per_host < 1:
        raise ValueError(f"--procs-per-host {args.procs_per_host}: must be at least 1")
    if args.tpu is not None and args.procs_per_host != 1:
        raise ValueError(f"--procs-per-host {args.procs_per_host}: a host of a TPU slice has one process; leave it out")
    config = flag(command, "config")
    if command[:1] == ["train"] and (config is None or Path(config).exists()):  # it may be in the image alone
        parse_train(command[1:])
    job = JobSpec(
        command=tuple(command),
        nprocs=args.procs_per_host,
        run_id=name,
        log_dir=log_dir_for(tuple(command), name),
        devices_per_proc=args.devices_per_proc,
        gpus_per_host=args.gpus_per_host,
        port=args.port,
        max_restarts=args.max_restarts,
        step_timeout=args.step_timeout,
        exit_timeout=args.exit_timeout,
        grace=args.grace,
        env=env,
    )
    placements(job, ["host"], "", {})


def _cpus(args: K8sArgs) -> int | None:
    """Threads for each rank's sums on CPU, the same on all nodes; None where GPUs or TPUs do the work."""
    if args.cpu is None or args.gpus_per_host is not None or args.tpu is not None:
        return None
    if args.cpu.endswith("m"):
        cpus = float(args.cpu.removesuffix("m")) / 1000
    elif args.cpu.replace(".", "", 1).isdecimal():
        cpus = float(args.cpu)
    else:
        return None
    return max(math.ceil(cpus), args.hosts * args.procs_per_host * (args.devices_per_proc or 1))


def _member(args: K8sArgs, name: str, first: str) -> list[str]:
    """The command of a pod up to its `--`; what is as usual is left out."""
    words = ["roxxel-dist", "launch", "member", "--hosts", str(args.hosts), "--first", first, "--run-id", name]
    usual = {field.name: field.default for field in dataclasses.fields(K8sArgs)}
    for option in (
        "procs_per_host",
        "gpus_per_host",
        "devices_per_proc",
        "port",
        "step_timeout",
        "grace",
        "exit_timeout",
    ):
        value = getattr(args, option)
        if value != usual[option]:
            words += [f"--{option.replace('_', '-')}", f"{value:g}"]
    return [*words, *(["--all-ranks"] if args.all_ranks else [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceArgs:
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
class MemberArgs(JobArgs, PlaceArgs):
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
        from roxxel_dist.launcher.backends.local import MemberBackend

        args, member = _complete(args)
        job = _job(args, member, command, MemberBackend(member.first, leads=member.leads))
    if args.dry_run:
        return start(args, job, MemberBackend(member.first, leads=member.leads))
    address = _find(member, job.host_timeout)
    if isinstance(address, int):
        return address
    return start(args, job, MemberBackend(address, leads=member.leads))


def _complete(args: MemberArgs) -> tuple[MemberArgs, "Member"]:
    """The arguments with what the environment says. Raises ValueError."""
    from roxxel_dist.launcher.backends.kubernetes.node import PORT, VARIABLES, Member, told

    if args.detach:
        raise ValueError("--detach: a container ends with its first process, so a member stays; leave it out")
    found: dict[str, Any] = told({name: getattr(args, name) for name in VARIABLES}, os.environ)
    hosts = 1 if found["hosts"] is None else found["hosts"]
    if hosts > 1:
        for flag, name in (("--index", "index"), ("--first", "first"), ("--run-id", "run_id")):
            if found[name] is None:
                raise ValueError(f"{flag} is not given, nor {' or '.join(VARIABLES[name])}: {hosts} hosts need it")
    member = Member(
        hosts=hosts,
        index=found["index"] or 0,
        first="localhost" if found["first"] is None else found["first"],
        procs=1 if found["procs_per_host"] is None else found["procs_per_host"],
    )
    port = PORT if found["port"] is None else found["port"]
    attempt = found["attempt"] or 0
    if attempt < 0:
        raise ValueError(f"--attempt {attempt}: must be 0, or how often the job was started before")
    return dataclasses.replace(args, run_id=found["run_id"], port=port, attempt=attempt), member


def _job(args: MemberArgs, member: "Member", command: list[str], backend: Any) -> "JobSpec":
    job = job_of(args, member.procs, command, backend)
    return dataclasses.replace(
        job,
        first_rank=member.index * member.procs,
        world=member.hosts * member.procs,
        first_attempt=args.attempt or 0,
    )


def _find(member: "Member", limit_s: float) -> str | int:
    """Where rank 0 is; or the exit code, where that was not found out."""
    from roxxel_dist.launcher.backends.kubernetes.node import NoFirstHostError, find_first
    from roxxel_dist.launcher.control.signals import SignalPipe

    asked: list[int] = []
    with SignalPipe(_say) as signals:  # the first process of a container would not even end without a handler

        def pause(seconds: float) -> bool:
            asked.extend(signals.wait(seconds))
            return bool(asked)

        try:
            address = find_first(member, limit_s, _say, pause)
        except NoFirstHostError as problem:
            _say(str(problem))
            return EXIT_PREFLIGHT
    return 128 + asked[0] if address is None else address


def _say(text: str) -> None:
    print(f"roxxel-dist: {text}", file=sys.stderr, flush=True)
