"""A job as a JobSet of Kubernetes: pure functions from the request to plain dictionaries. Nothing is applied.

The pods wait, and the first one has the launcher; or each has a launcher of its own (`forms.py`). The
checks here cover mistakes that the API server accepts and that would lose a run, not those that it refuses itself
(`kubectl apply --dry-run=server`).
"""

import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from roxxel_dist.launcher.backends.kubernetes import forms
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import assignments, is_secret, masked_words, placements, ranks_on, read_env_file
from roxxel_dist.launcher.job.spec import HostOptions, JobOptions, JobSpec, log_dir_for, program_of
from roxxel_dist.process.exit_codes import UserError

Plain = dict[str, Any]

API = "jobset.x-k8s.io/v1alpha2"
ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
SHM = "/dev/shm"
LEAVE_S = 15
"""Seconds beyond the grace until Kubernetes kills a pod: the launcher's own end."""
AMOUNT = re.compile(r"\d{1,15}(?:\.\d{1,9})?(?:[eE]\d{1,2}|m|k|[MGTPE]|[KMGTPE]i)?")
"""The amount of a resource: a number, and a power of ten or of two."""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""What Kubernetes takes as names of jobs, and as those of claims and secrets."""
MOST_LETTERS = 63 - len("-controller-0-0-abcde")
"""Letters of a name, so that those of its pods are names of hosts too."""
TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")


@dataclass(frozen=True, kw_only=True)
class Options(HostOptions, JobOptions, base.Command):
    """Print a JobSet for Kubernetes: `launch k8s --hosts N --image IMAGE [options] -- CMD… | kubectl apply -f -`.

    Nothing is applied. The pods wait, and the first one runs `launch exec` over `kubectl exec`. The cluster needs
    JobSet (jobset.sigs.k8s.io) and, for GPUs, NVIDIA's device plugin. The image must have the commands `roxxel-dist`
    and `kubectl` on its path.
    """

    example: ClassVar[str] = "--hosts 2 --image IMAGE"
    hosts: int
    """Pods."""
    image: str
    """What they run; docker/ makes one."""
    procs_per_host: int = 1
    """Processes in each pod."""
    name: str | None = None
    """Of the JobSet, and of the run; not given, the time."""
    namespace: str | None = None
    """The namespace. Default: that of kubectl."""
    volume: tuple[str, ...] = ()
    """CLAIM:/path: a PersistentVolumeClaim that all pods mount (ReadWriteMany). Repeatable."""
    secret: tuple[str, ...] = ()
    """A Secret; all its keys become environment variables. Repeatable."""
    env: tuple[str, ...] = ()
    """K=V: a variable for every rank. K alone takes key K of the first --secret. Repeatable."""
    env_from: str | None = None
    """A file with one K=V in each line, for every rank. --env overrides it."""
    cpu: str | None = None
    """CPUs that each pod asks for, as Kubernetes writes them."""
    memory: str | None = None
    """Memory that each pod asks for and may use, for example 64Gi."""
    tpu: str | None = None
    """The accelerator of a TPU slice by its name in GKE, for example tpu-v5-lite-podslice. Untested on hardware."""
    topology: str | None = None
    """The shape of that slice, for example 4x4."""
    one_per_node: bool = False
    """One pod a node; with --gpus-per-host it is so in any case."""
    member: bool = False
    """A launcher in each pod (`launch member`), and none that sees all of them: the cluster restarts all pods after a
    failure. It needs no rights and no kubectl. With --tpu it is so in any case."""
    host_timeout: float = 600.0
    """Seconds to wait for an unreachable host after a failure, when Kubernetes makes a new pod, and at the start for
    pods that are still starting. Then the job continues, or ends, without it."""

    @property
    def has_controller(self) -> bool:
        """Whether one launcher sees all pods."""
        return not self.member and self.tpu is None

    def launch(self, request: base.LaunchRequest) -> int:
        """Print the manifest."""
        import yaml

        with request.usage_errors():
            text = yaml.safe_dump_all(
                manifests(spec_of(self, request.command)), sort_keys=False, allow_unicode=True, width=120
            )
        sys.stdout.write(text)
        return 0


@dataclass(frozen=True, kw_only=True)
class JobSetSpec:
    """The request. Raises ValueError, which names the flag, for values that would lose a run or reveal a secret."""

    name: str
    command: tuple[str, ...]
    """What the user wrote behind `--`."""
    options: Options
    env: Mapping[str, str] = field(default_factory=dict)
    env_of_secret: tuple[str, ...] = ()
    """Variables whose value is the key of that name in the first secret."""

    def __post_init__(self) -> None:
        for option, count in (("--hosts", self.options.hosts), ("--procs-per-host", self.options.procs_per_host)):
            if count < 1:
                raise UserError(f"{option} {count}: must be at least 1")
        self._check_names()
        self._check_hosts()
        self._check_secrecy()
        self._check_run_dir()
        self._check_tpu()
        self._check_amounts()

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """(claim, path) of each volume."""
        pairs = [volume.partition(":") for volume in self.options.volume]
        return [(claim, path) for claim, _, path in pairs]

    def _check_names(self) -> None:
        """An API server takes no others; the pods' own names, with an end for each, have 63 letters at most."""
        options = self.options
        for option, name, most in (("--name", self.name, MOST_LETTERS), ("--namespace", options.namespace, 63)):
            if name is not None and (not LABEL.fullmatch(name) or len(name) > most):
                raise UserError(
                    f"{option} {name!r}: use at most {most} small letters, digits and -, a letter first and no - at "
                    "the end, as Kubernetes does"
                )
        for option, names in (("--secret", options.secret), ("--volume", [claim for claim, _ in self.mounts])):
            for name in names:
                if not SUBDOMAIN.fullmatch(name) or len(name) > 253:
                    raise UserError(f"{option} {name!r}: use small letters, digits, - and . as Kubernetes does")
        if not options.image.strip() or options.image.split() != [options.image]:
            raise UserError(f"--image {options.image!r}: name an image, such as registry/trainer:1")

    def _check_hosts(self) -> None:
        """Options of a launcher that sees all hosts need one."""
        if self.options.has_controller:
            options = self.options
            ranks_on(options.hosts, options.procs_per_host, options.spare_hosts, options.min_hosts)
            return
        why = "--member" if self.options.member else "--tpu"
        for name, default in _defaults(HostOptions).items():
            if name != "host_timeout" and getattr(self.options, name) != default:
                raise UserError(f"--{name.replace('_', '-')} needs a launcher that sees all pods: leave {why} out")

    def _check_secrecy(self) -> None:
        if secret := next((name for name in self.env if is_secret(name)), None):
            raise UserError(
                f"--env {secret}: its value would stand in the manifest; put it into a Secret, name that with "
                f"--secret, and write --env {secret} alone"
            )
        if self.env_of_secret and not self.options.secret:
            raise UserError(
                f"--env {self.env_of_secret[0]} has no value: write NAME=VALUE, or name its Secret by --secret"
            )
        if masked_words(self.command) != list(self.command):
            raise UserError("the command holds a secret, which would stand in the manifest: let it read a variable")
        for name in ("notify", "preflight"):
            if (text := getattr(self.options, name)) is not None and masked_words([text]) != [text]:
                raise UserError(
                    f"--{name} holds a secret, which would stand in the manifest: let the command read a key of a "
                    "--secret"
                )

    def _check_run_dir(self) -> None:
        """What `train` writes must outlive the pods."""
        for volume, (_, path) in zip(self.options.volume, self.mounts, strict=True):
            if not path.startswith("/"):
                raise UserError(
                    f"--volume {volume!r}: write CLAIM:/path, a PersistentVolumeClaim and its path in the pods"
                )
        program = program_of(self.command)
        if not program.needs_folder:
            return
        if program.folder is None:
            raise UserError(
                "train without --run_dir: name a folder of a volume that all pods share (--volume CLAIM:/path), or an "
                "address in a bucket"
            )
        folder = os.path.normpath(program.folder)
        if not any(f"{folder}/".startswith(f"{os.path.normpath(path)}/") for _, path in self.mounts):
            raise UserError(
                f"--run_dir {program.folder} is in no --volume: it would end with its pod; use --volume CLAIM:/path"
            )

    def _check_amounts(self) -> None:
        for name in ("cpu", "memory"):
            amount = getattr(self.options, name)
            if amount is not None and (not AMOUNT.fullmatch(amount) or not re.search("[1-9]", amount)):
                raise UserError(f"--{name} {amount}: write an amount as Kubernetes has it, such as 8, 500m or 64Gi")

    def _check_tpu(self) -> None:
        tpu, topology, hosts = self.options.tpu, self.options.topology, self.options.hosts
        if (tpu is None) != (topology is None):
            raise UserError(
                "--tpu and --topology belong together, for example --tpu tpu-v5-lite-podslice --topology 4x4"
            )
        if topology is None:
            return
        if not TOPOLOGY.fullmatch(topology):
            raise UserError(f"--topology {topology!r}: write for example 4x4 or 2x2x4")
        if chips_of(topology) % hosts:
            raise UserError(
                f"--topology {topology} has {chips_of(topology)} chips, which is not a multiple of --hosts {hosts}: "
                "give the hosts of that slice"
            )
        if self.options.procs_per_host != 1:
            raise UserError(
                f"--procs-per-host {self.options.procs_per_host}: a host of a TPU slice has one process; leave it out"
            )


def chips_of(topology: str) -> int:
    """Chips of a slice of this shape."""
    return math.prod(map(int, topology.split("x")))


def threads(options: Options) -> int | None:
    """Threads for each rank's sums on CPU, the same on all nodes; None where GPUs or TPUs do the work."""
    cpu = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", options.cpu or "")
    if cpu is None or options.gpus_per_host is not None or options.tpu is not None:
        return None
    cpus = float(cpu[1]) / (1000 if cpu[2] else 1)
    return max(math.ceil(cpus), options.hosts * options.procs_per_host * (options.devices_per_proc or 1))


def _defaults(kind: type) -> Plain:
    return {field.name: field.default for field in fields(kind)}


def _given_options(options: Options, usual: Plain) -> list[str]:
    """The words of the options that differ from these values."""
    words: list[str] = []
    for name, default in usual.items():
        value = getattr(options, name)
        if value != default:
            text = value if isinstance(value, str) else f"{value:g}"
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    return words


def spec_of(options: Options, command: tuple[str, ...]) -> JobSetSpec:
    """The request as plain values; nothing comes from the environment of this process. Raises ValueError for a slip."""
    name = time.strftime("roxxel-%Y%m%d-%H%M%S") if options.name is None else options.name
    env_of_secret = tuple(dict.fromkeys(word for word in options.env if "=" not in word))
    env = {
        **({} if options.env_from is None else read_env_file(options.env_from)),
        **assignments([word for word in options.env if "=" in word], {}),
    }
    env = {name: value for name, value in env.items() if name not in env_of_secret}
    spec = JobSetSpec(name=name, command=command, options=options, env=env, env_of_secret=env_of_secret)
    shared = {name: getattr(options, name) for name in (*_defaults(JobOptions), *_defaults(HostOptions))}
    nprocs, logs = options.procs_per_host, log_dir_for(command, name)
    job = JobSpec(command=command, nprocs=nprocs, run_id=name, log_dir=logs, env=env, **shared)
    placements(job, ["host"], "", {})  # the GPUs of a host must divide
    if (count := threads(options)) and "PJRT_NPROC" not in env:  # nodes that differ would split their sums otherwise
        return replace(spec, env={**env, "PJRT_NPROC": str(count)})
    return spec


def manifests(spec: JobSetSpec) -> list[Plain]:
    """The JobSet, and before it what its launcher may do."""
    options, network = spec.options, {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    usual = {"procs_per_host": 1, **_defaults(JobOptions)}
    if options.has_controller:
        words = _given_options(options, {**usual, **_defaults(HostOptions)})
        first = _pod(spec, forms.command(spec.name, options.hosts, words, spec.command))
        all_first = options.min_hosts is None and not options.spare_hosts
        jobs = forms.jobs(spec.name, options.hosts, first, _pod(spec, forms.WAIT), all_first=all_first)
        before = forms.rights(spec.name, options.namespace, options.hosts)
        policies = forms.policies(options.max_restarts)
    else:
        del usual["max_restarts"], usual["restart_on"]  # the JobSet starts again
        words = _given_options(options, usual)
        pod = _pod(spec, forms.member_command(spec.name, options.hosts, words, spec.command))
        jobs, before = forms.member_jobs(options.hosts, pod, options.restart_on), []
        policies = forms.member_policies(options.max_restarts)
    of_all = {"network": {**network, "subdomain": spec.name}, **policies, "replicatedJobs": jobs}
    job_set = {"apiVersion": API, "kind": "JobSet", "metadata": _metadata(spec), "spec": of_all}
    return [*before, job_set]


def _metadata(spec: JobSetSpec) -> Plain:
    metadata: Plain = {"name": spec.name}
    if spec.options.namespace is not None:
        metadata["namespace"] = spec.options.namespace
    if spec.options.tpu is not None:  # one slice for the job, where several of this shape are there
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return metadata


def _pod(spec: JobSetSpec, command: Sequence[str]) -> Plain:
    options = spec.options
    pod: Plain = {"restartPolicy": "Never", "terminationGracePeriodSeconds": math.ceil(options.grace) + LEAVE_S}
    if options.tpu is not None:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": options.tpu,
            "cloud.google.com/gke-tpu-topology": options.topology,
        }
    if options.gpus_per_host is not None or options.one_per_node:
        alike = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": spec.name}}
        term = {"labelSelector": alike, "topologyKey": "kubernetes.io/hostname"}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    claims = dict.fromkeys(claim for claim, _ in spec.mounts)
    volumes = {claim: f"volume-{number}" for number, claim in enumerate(claims)}
    pod["containers"] = [_container(spec, command, volumes)]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # NCCL's; the usual 64 MiB are too small for it
    pod["volumes"] = [
        shm, *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in volumes.items())
    ]  # fmt: skip
    return pod


def _container(spec: JobSetSpec, command: Sequence[str], volumes: Mapping[str, str]) -> Plain:
    options = spec.options
    env: list[Plain] = [{"name": "ROXXEL_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}}]
    env += [{"name": name, "value": literal(value)} for name, value in spec.env.items()]
    for name in spec.env_of_secret:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": options.secret[0], "key": name}}})
    container: Plain = {
        "name": forms.CONTAINER,
        "image": options.image,
        "command": [literal(word) for word in command],
        "env": env,
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.secret]
    requests = {"cpu": options.cpu, "memory": options.memory}
    chips = None if options.topology is None else chips_of(options.topology) // options.hosts
    limits = {"memory": options.memory, "nvidia.com/gpu": options.gpus_per_host, "google.com/tpu": chips}
    resources = {"requests": _without_none(requests), "limits": _without_none(limits)}
    if any(resources.values()):
        container["resources"] = {name: amounts for name, amounts in resources.items() if amounts}
    mounts = [{"name": volumes[claim], "mountPath": path} for claim, path in spec.mounts]
    container["volumeMounts"] = [{"name": "shm", "mountPath": SHM}, *mounts]
    return container


def _without_none(amounts: Plain) -> Plain:
    return {name: amount for name, amount in amounts.items() if amount is not None}


def literal(word: str) -> str:
    """A word so that Kubernetes, which puts in variables for `$(NAME)` and `$` for `$$`, leaves it as it is."""
    return word.replace("$", "$$") if "$(" in word or "$$" in word else word
