"""What a person asked of a sweep, checked.

How a sweep is run, and how it ended.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roxxel_dist.launcher.backends.ray.cluster import check_address


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a sweep is run.

    Args:
        count: trials in all, those of earlier starts included; None: until the engine has no more.
        workers: trials at once.
        max_failures: so many failed trials in a row end the sweep.
        max_retries: how often a trial is run again whose worker or node was lost.
        resources: of each trial, as Ray counts them (CPU, GPU, memory in bytes, custom ones); before the sweep's own.
        ray_address: of a Ray cluster (`auto` or HOST:PORT); None: a Ray of its own on this machine.
        insecure: use the cluster also without a token.
        method: of the engine, for the journal.
        seed: of the engine, for the journal.
    """

    count: int | None = None
    workers: int = 1
    max_failures: int = 5
    max_retries: int = 3
    resources: Mapping[str, float] = field(default_factory=dict)
    ray_address: str | None = None
    insecure: bool = False
    method: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"count": 1, "workers": 1, "max_failures": 1, "max_retries": 0}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"--{name} {given}: must be {value} or more")
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"resources.{name}: {amount} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a sweep ended."""

    code: int
    """Of the process: 0, 1 (it cannot go on as it is), 42 (asked to end: start it again to go on)."""
    reason: str


FLAGS = {"hosts": "hosts_per_trial"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a person asked for."""

    study: Path
    count: int | None
    workers: int
    wandb_sweep: str | None
    """Of a W&B server that shall lead: its id there, "" for a new one. None: the search is made here."""
    wandb_project: str | None
    """Of the server; that of the file where None."""
    method: str | None
    seed: int
    ray_address: str | None
    insecure: bool
    hosts: int
    procs_per_host: int
    cpus_per_host: float | None
    """None: what the sweep's second file says, or else one a process."""
    gpus_per_host: int | None
    max_time_s: float | None
    max_failures: int

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("workers", 1), ("hosts", 1), ("procs_per_host", 1), ("max_failures", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{FLAGS.get(name, name)} {value}: must be at least {least}")
        if self.ray_address is not None:
            try:
                check_address(self.ray_address)
            except ValueError as error:
                raise ValueError(str(error).replace("--address", "--ray_address")) from None
        if self.cpus_per_host is not None and self.cpus_per_host <= 0:
            raise ValueError(f"--cpus_per_trial {self.cpus_per_host:g}: must be more than 0")
        if self.hosts > 1 and self.ray_address is None:
            raise ValueError(
                f"--hosts_per_trial {self.hosts}: this machine is one host: name a cluster with --ray_address"
            )
        if self.gpus_per_host is not None and self.gpus_per_host % self.procs_per_host:
            raise ValueError(
                f"--gpus_per_trial gives {self.gpus_per_host} a host, which does not divide by --procs_per_host "
                f"{self.procs_per_host}: use a multiple"
            )

    def share(self, rules: Mapping[str, float]) -> "Share":
        """What a trial takes.

        Args:
            rules: `resources` of the sweep's second file: CPU on each host, GPU over all of them, and custom ones. The
                flags win over them.

        Raises:
            ValueError: so much cannot be dealt to hosts and processes.
        """
        # A CPU a process; on this machine not more than there are: they are shared, as with `launch local`.
        each = self.procs_per_host if self.ray_address else min(self.procs_per_host, os.cpu_count() or 1)
        cpus = rules.get("CPU", each) if self.cpus_per_host is None else self.cpus_per_host
        gpus = self._gpus(rules.get("GPU", 0)) if self.gpus_per_host is None else self.gpus_per_host
        if self.hosts == 1:
            return Share(cpus=cpus, gpus=gpus, task={"CPU": cpus} | ({"GPU": gpus} if gpus else {}))
        if custom := sorted(rules.keys() - {"CPU", "GPU"}):
            raise ValueError(
                f"resources: {', '.join(custom)}: a trial of --hosts_per_trial {self.hosts} can ask for CPU and GPU "
                "alone: leave the others out"
            )
        # The launcher takes its own on each of the hosts; the task that waits for it takes nothing.
        return Share(cpus=cpus or each, gpus=gpus, task=dict.fromkeys({"CPU", *rules}, 0.0))

    def _gpus(self, amount: float) -> int | None:
        """The GPUs of each host, where they are to be dealt."""
        parts = self.hosts * self.procs_per_host
        if not amount or parts == 1:  # one process has what Ray gives it, a part of a GPU too
            return None
        if amount % parts:
            raise ValueError(
                f"resources.GPU: {amount:g} does not divide by the {parts} processes of a trial (--hosts_per_trial x "
                "--procs_per_host): use a multiple"
            )
        return int(amount) // self.hosts


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a trial takes of the machines."""

    cpus: float
    """Of each host."""
    gpus: int | None
    """Of each host, dealt to its processes; None: what is there, or what Ray gives the task."""
    task: Mapping[str, float]
    """What Ray keeps for the trial's task; before the `resources` of the sweep's second file."""
