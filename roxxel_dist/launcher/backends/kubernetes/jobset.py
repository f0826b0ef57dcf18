"""A job as a JobSet of Kubernetes: pure functions from what was asked for to plain dictionaries. Nothing is applied.

Each host is a pod of one Indexed Job, and runs `launch member`. What the exit codes mean is told to both: the Job's
podFailurePolicy tells apart what ended a pod, the JobSet's failurePolicy says what follows.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_HANG, EXIT_PREFLIGHT
from roxxel_dist.launcher.control.restart import EXIT_GIVEN_UP, INFRASTRUCTURE, PREEMPTED
from roxxel_dist.launcher.environment import NAME, is_secret, masked_words
from roxxel_dist.launcher.spec import flag

Plain = dict[str, Any]

JOB = "hosts"
ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
SHM = "/dev/shm"
LEAVE_S = 15
"""Seconds beyond the grace until Kubernetes kills a pod: the launcher's own end."""
AGAIN = sorted({*INFRASTRUCTURE, EXIT_HANG, EXIT_PREFLIGHT, EXIT_GIVEN_UP})
"""Exit codes after which the job is started again, and that is counted."""
FREE = sorted(PREEMPTED)
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?")
TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What was asked for. Raises ValueError, which names the flag, for what Kubernetes would refuse or misread."""

    name: str
    image: str
    hosts: int
    command: tuple[str, ...]
    """What a pod runs, exactly."""
    user_command: tuple[str, ...] = ()
    """The part of it that the user wrote."""
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    """CLAIM:/path each."""
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    env_of_secret: tuple[str, ...] = ()
    """Variables whose value is the key of that name in the first secret."""
    gpus: int | None = None
    cpu: str | None = None
    memory: str | None = None
    tpu: str | None = None
    topology: str | None = None
    one_per_node: bool = False
    max_restarts: int = 3
    grace: float = 30.0

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ValueError(f"--hosts {self.hosts}: must be at least 1")
        _check_name(self.name, self.hosts)
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(f"--image {self.image!r}: give the name of an image, for instance registry/name:tag")
        if self.namespace is not None and (not LABEL.fullmatch(self.namespace) or len(self.namespace) > 63):
            raise ValueError(f"--namespace {self.namespace!r}: use at most 63 of a-z, 0-9 and -")
        for name in self.secrets:
            if not SUBDOMAIN.fullmatch(name):
                raise ValueError(f"--secret {name!r} cannot be the name of a Secret: use a-z, 0-9, - and .")
        for name, value in (("--cpu", self.cpu), ("--memory", self.memory)):
            if value is not None and not QUANTITY.fullmatch(value):
                raise ValueError(f"{name} {value!r} is no quantity: write for instance 8, 500m or 64Gi")
        _check_secrecy(self)
        _check_volumes(self.volumes)
        _check_run_dir(self.user_command, self.volumes)
        _check_tpu(self)


def _check_name(name: str, hosts: int) -> None:
    longest = f"{name}-{JOB}-0-{hosts - 1}-abcde"
    if not LABEL.fullmatch(name):
        raise ValueError(f"--name {name!r}: begin with a letter, go on with a-z, 0-9 and -, and do not end with -")
    if len(longest) > 63:
        most = 63 - (len(longest) - len(name))
        raise ValueError(f"--name {name!r}: use at most {most} characters, or the names of its pods become too long")


def _check_secrecy(pods: Pods) -> None:
    if told := [name for name in pods.env if is_secret(name)]:
        raise ValueError(
            f"--env {told[0]}: its value would stand in the manifest; put it into a Secret, name that with --secret, "
            f"and write --env {told[0]} alone"
        )
    if pods.env_of_secret and not pods.secrets:
        raise ValueError(
            f"--env {pods.env_of_secret[0]} has no value: write NAME=VALUE, or name its Secret by --secret"
        )
    if bad := [name for name in pods.env_of_secret if not NAME.fullmatch(name)]:
        raise ValueError(f"--env {bad[0]!r} is no variable: write NAME=VALUE, for instance NCCL_DEBUG=INFO")
    if masked_words(pods.user_command) != list(pods.user_command):
        raise ValueError("the command holds a secret, which would stand in the manifest: let it read a variable")


def _mounts(volumes: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [volume.partition(":") for volume in volumes]
    return [(claim, path) for claim, _, path in pairs]


def _check_volumes(volumes: Sequence[str]) -> None:
    for volume, (claim, path) in zip(volumes, _mounts(volumes), strict=True):
        if not SUBDOMAIN.fullmatch(claim) or not path.startswith("/") or ":" in path or path.rstrip("/") in ("", SHM):
            raise ValueError(f"--volume {volume!r}: write CLAIM:/path, a PersistentVolumeClaim and where it shall be")
    paths = [path for _, path in _mounts(volumes)]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"--volume: {twice[0]} is given twice; mount each volume at a path of its own")


def _check_run_dir(command: Sequence[str], volumes: Sequence[str]) -> None:
    """What `train` writes must outlive the pods."""
    if command[:1] != ("train",):
        return
    run_dir = flag(command, "run_dir")
    if run_dir is None:
        raise ValueError(
            "train without --run_dir: name a folder of a volume that all pods share (--volume CLAIM:/path)"
        )
    inside = [path for _, path in _mounts(volumes) if f"{run_dir}/".startswith(f"{path.rstrip('/')}/")]
    if not inside:
        raise ValueError(f"--run_dir {run_dir} is in no --volume: it would end with its pod; use --volume CLAIM:/path")


def _check_tpu(pods: Pods) -> None:
    if (pods.tpu is None) != (pods.topology is None):
        raise ValueError("--tpu and --topology belong together, for instance --tpu tpu-v5-lite-podslice --topology 4x4")
    if pods.tpu is None or pods.topology is None:
        return
    if pods.gpus is not None:
        raise ValueError("--tpu and --gpus-per-host: use one of the two")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", pods.tpu):
        raise ValueError(f"--tpu {pods.tpu!r}: give the name of the accelerator, for instance tpu-v5-lite-podslice")
    if not TOPOLOGY.fullmatch(pods.topology):
        raise ValueError(f"--topology {pods.topology!r}: write for instance 4x4 or 2x2x4")
    if chips_of(pods.topology) % pods.hosts:
        raise ValueError(
            f"--topology {pods.topology} has {chips_of(pods.topology)} chips, which do not divide by --hosts "
            f"{pods.hosts}: give the hosts of that slice"
        )


def chips_of(topology: str) -> int:
    """Chips of a slice of this shape."""
    return math.prod(map(int, topology.split("x")))


def first_host(name: str) -> str:
    """By what name the pods find host 0."""
    return f"{name}-{JOB}-0-0.{name}"


def manifest(pods: Pods) -> Plain:
    """The JobSet."""
    metadata: Plain = {"name": pods.name}
    if pods.namespace is not None:
        metadata["namespace"] = pods.namespace
    if pods.tpu is not None:  # one slice for the job, where several of this shape are there
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": pods.name},
            "successPolicy": {"operator": "All"},
            "failurePolicy": _failure_policy(pods.max_restarts),
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": _job(pods)}}],
        },
    }


def _failure_policy(max_restarts: int) -> Plain:
    """What follows when the Job has failed; the rules are tried in order, and behind them it is started again."""
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        # The Job tells which of its rules it was in its message alone.
        "onJobFailureMessagePatterns": ["matching FailJob rule at index [01]$"],
    }
    error = {"name": "program_error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": max_restarts, "rules": [preempted, error] if max_restarts else [error]}


def _pod_failure_policy() -> Plain:
    return {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FREE)}},
            {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": list(AGAIN)}},
        ]
    }


def _job(pods: Pods) -> Plain:
    return {
        "completionMode": "Indexed",
        "completions": pods.hosts,
        "parallelism": pods.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": _pod_failure_policy(),
        "template": {"spec": _pod(pods)},
    }


def _pod(pods: Pods) -> Plain:
    spec: Plain = {"restartPolicy": "Never", "terminationGracePeriodSeconds": math.ceil(pods.grace) + LEAVE_S}
    if pods.tpu is not None:
        spec["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": pods.tpu,
            "cloud.google.com/gke-tpu-topology": pods.topology,
        }
    if pods.gpus is not None or pods.one_per_node:
        alike = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": pods.name}}
        term = {"labelSelector": alike, "topologyKey": "kubernetes.io/hostname"}
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    names = {
        claim: f"volume-{number}" for number, claim in enumerate(dict.fromkeys(c for c, _ in _mounts(pods.volumes)))
    }
    spec["containers"] = [_container(pods, names)]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # NCCL's; the usual 64 MiB are too small for it
    spec["volumes"] = [shm, *({"name": names[one], "persistentVolumeClaim": {"claimName": one}} for one in names)]
    return spec


def _container(pods: Pods, names: Mapping[str, str]) -> Plain:
    env: list[Plain] = [{"name": "ROXXEL_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}}]
    env += [{"name": name, "value": literal(value)} for name, value in pods.env.items()]
    for name in pods.env_of_secret:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": pods.secrets[0], "key": name}}})
    container: Plain = {
        "name": "host",
        "image": pods.image,
        "command": [literal(word) for word in pods.command],
        "env": env,
    }
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.secrets]
    if resources := _resources(pods):
        container["resources"] = resources
    mounts = [{"name": names[claim], "mountPath": path} for claim, path in _mounts(pods.volumes)]
    container["volumeMounts"] = [{"name": "shm", "mountPath": SHM}, *mounts]
    return container


def _resources(pods: Pods) -> Plain:
    asked = {name: value for name, value in (("cpu", pods.cpu), ("memory", pods.memory)) if value is not None}
    limits: Plain = {} if pods.memory is None else {"memory": pods.memory}
    if pods.gpus is not None:
        limits["nvidia.com/gpu"] = pods.gpus
    if pods.topology is not None:
        limits["google.com/tpu"] = chips_of(pods.topology) // pods.hosts
    return {name: value for name, value in (("requests", asked), ("limits", limits)) if value}


def literal(word: str) -> str:
    """A word so that Kubernetes, which puts in variables for `$(NAME)` and `$` for `$$`, leaves it as it is."""
    return word.replace("$", "$$") if "$(" in word or "$$" in word else word
