"""What a person asked of a sweep, checked."""

import os
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.launcher.ray_cluster import check_address

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
    """None: what the sweep's second file says, or else as `cpus`."""
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

    @property
    def cpus(self) -> float:
        """A CPU a process; on this machine not more than there are: they are shared, as with `launch local`."""
        return self.procs_per_host if self.ray_address else min(self.procs_per_host, os.cpu_count() or 1)
