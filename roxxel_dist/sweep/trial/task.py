"""The description of a trial that a worker of Ray gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a trial, and the cluster that has its hosts."""

    hosts: int = 1
    procs_per_host: int = 1
    gpus_per_host: int | None = None
    cpus_per_host: float = 1
    ray_address: str | None = None
    insecure: bool = False

    @property
    def count(self) -> int:
        """How many processes a trial has."""
        return self.hosts * self.procs_per_host


@dataclass(frozen=True, kw_only=True)
class TrialTask(Ranks):
    """All that a worker must know of a trial, in plain values; it is sent as a dictionary of these fields."""

    trial: int
    params: Mapping[str, Any]
    """What `config` does not have yet of the trial's parameters."""
    attempt: int
    """From 0."""
    run_dir: str
    """Absolute, as `log`; both, and the corpus's folder, count from the host's cache where `bucket` is given."""
    log: str
    metric: str
    goal: str
    weights: Mapping[str, float] = field(default_factory=dict)
    """The logged metrics of which `metric` is a mean, with their weights; empty where it is logged itself."""
    config: Mapping[str, Any]
    """The fields of the trial's config; of a program of the user's own, and where a server leads, those that all trials
    share."""
    data_path: str | None
    corpus: Mapping[str, Any] | None = None
    """Where shards of text are to be made first: the "text", and the "folder" of the study's shards."""
    program: Sequence[str] | None
    """The command of a program of the user's own; None: the trial is a training of a Config."""
    max_time_s: float | None
    directory: str | None = None
    """Where the trial's program runs; None: where its worker does."""
    swept: Sequence[str] = ()
    """The names of all parameters of the sweep."""
    wandb_sweep: str | None = None
    """The sweep of a W&B server that leads it, as entity/project/name."""
    bucket: str | None = None
    """Where the study is, if in a bucket: hosts share no disk."""
    local_dir: str | None = None
    """Of a study in a bucket, the folder of this host that has its runs."""
    anneal: str | None = None
    """The checkpoint, RUN@STEP, from which the trial is a decay branch."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of the trial's program."""

    @property
    def run_url(self) -> str | None:
        """Where the run is kept, if the study is in a bucket."""
        return None if self.bucket is None else f"{self.bucket}/trials/{self.trial}"
