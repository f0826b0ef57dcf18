"""What an estimate is asked, and what it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.devices.targets import parse_target
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate.target_steps import TargetPhase
from roxxel_dist.train.step.batch_layout import BatchLayout
from roxxel_dist.train.step.by_parameter import ParameterGroup
from roxxel_dist.train.step.compile import StepMemory
from roxxel_dist.train.validation.evaluator import ValidationRows


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """The inputs of an estimate, besides config and data."""

    run: Path | None = None
    """A run directory whose data, plan and speed are used."""
    devices: int | None = None
    """CPU devices to simulate; None: the real devices."""
    target: str | None = None
    """Devices that are not here, such as "v5e:4x4" or "h100:2x8": their own compiler compiles every step."""
    processes: int | None = None
    """Processes that share them; None: the real processes."""
    tokens_per_s: float | None = None
    """Over all devices."""
    device_memory_gb: float | None = None
    """Memory of a device in 10^9 bytes; None: as the device reports."""

    def __post_init__(self) -> None:
        for name in ("devices", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1, or left out")
        if self.target is not None:
            parse_target(self.target)
            if self.devices is not None:
                raise UserError(
                    f"target is {self.target}, and devices is {self.devices}: leave one out; a target has its own "
                    f"devices, and those of devices are simulated on CPU"
                )
        for name in ("tokens_per_s", "device_memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} is {value}: it must be above 0, and finite, or left out")


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """One phase, up to the last step of the run."""

    phase: int
    """From 1."""
    first_step: int
    """From 1."""
    steps: int
    batch_size: int
    seq_len: int
    weights: Mapping[str, float]
    """Shares by data set."""
    blend: str
    packing: str
    tokens: int
    """That its steps read."""
    predicted_tokens: int
    """That its steps compute: of each row all but one."""
    flops_per_token: float
    """Floating-point operations of a step for a computed token, forward and backward."""
    flops: float
    """Of all its steps."""
    layout: BatchLayout
    rows_a_process: int
    """Rows of a batch that a process reads, at most."""
    memory: StepMemory | None
    """Of each device; None if the compiler failed because it does not fit."""
    seconds: float | None
    """Of its steps only, without validations, saves and compilations; None if no speed is known."""
    attention: str
    """The attention kernel; for a user-defined model, the kernel in the config."""
    score_bytes: int | None
    """Bytes of each device for the attention scores of a layer; None for a user-defined model."""
    target: TargetPhase | None
    """What its steps cost on the target; None without one."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The estimate of a run. Bytes are of one device."""

    description: str
    """The table of phases, and the steps at which something changes."""
    phases: tuple[PhaseEstimate, ...]
    steps: int
    tokens: int
    """That its steps read."""
    predicted_tokens: int
    """That its steps compute: of each row all but one. Speeds are of these."""
    flops: float
    notes: tuple[str, ...]
    datasets: Mapping[str, Mapping[str, float]]
    """"tokens" to train on and "passes" over them, by name."""
    validation: Mapping[str, int]
    """Tokens by name; "" is the held-out part."""
    validation_rows: ValidationRows
    """Which of them a validation reads: at most `eval_iters` batches of each, of a shape for each length of rows."""
    validated_on: str
    """These batches by phase, in words."""
    vocab_size: int
    parameters: int
    trainable_parameters: int
    """The parameters without those that adapters freeze."""
    parts: Mapping[str, int]
    """Parameters by top-level part of the model."""
    updates: tuple[ParameterGroup, ...]
    """Which optimizer updates which of them."""
    state: Mapping[str, int]
    """Bytes of "parameters", "optimizer", "average" where the run keeps one, and "other"."""
    arrays: tuple[Mapping[str, Any], ...]
    """{"name", "shape", "dtype", "cut", "device_bytes"} of every parameter; cut: an axis of the mesh a dimension."""
    fsdp: bool
    grad_accum: int
    devices: int
    processes: int
    platform: str
    device_kind: str
    simulated: bool
    target: str | None
    memory_limit: int | None
    """Memory of a device in bytes, if known."""
    seconds: float | None
    tokens_per_s: float | None
    """Given, or measured: computed tokens."""
    speed: str
    """Where the time comes from."""
    problems: tuple[str, ...]
    """Reasons why it cannot run."""
