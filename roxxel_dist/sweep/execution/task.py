"""What a worker of Ray is told of a trial."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """All that a worker must know of a trial, in plain values; it is sent as a dictionary of these fields."""

    trial: int
    params: Mapping[str, Any]
    attempt: int
    """From 0."""
    run_dir: str
    """Absolute, as `log`."""
    log: str
    metric: str
    goal: str
    config: Mapping[str, Any]
    """What every trial begins from, by field."""
    data_path: str | None
    corpus: Mapping[str, Any] | None
    """Where shards of text are to be made first: the "text", and the "folder" of the study's shards."""
    program: list[str] | None
    """The command of a program of the user's own; None: the trial is a training of a Config."""
    hosts: int
    procs_per_host: int
    gpus_per_host: int | None
    cpus_per_host: float
    max_time_s: float | None
    ray_address: str | None
    insecure: bool
    directory: str
    """Where the trial's program runs."""
    sweep: Mapping[str, Any]
    """The "names" of all parameters, the "name" of the study, and "wandb": the W&B sweep that leads it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of the trial's program."""
