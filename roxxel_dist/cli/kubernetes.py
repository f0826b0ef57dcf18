"""The command that prints a manifest for Kubernetes."""

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
