"""How a run trains: its optimizer, its length, and what it does at which step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay to a hundredth of the peak, over the whole curriculum."""

    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; a twentieth of the run where not given."""
    weight_decay: float = 0.01
    """Decay of matrices; norms and biases are left alone."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}: it must be above 0")
        for name in ("warmup_steps", "weight_decay", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}: it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What a run reads and when it speaks, evaluates and saves."""

    phases: list[dict[str, Any]] | None = None
    """The curriculum: a list of {steps or epochs, batch_size, seq_len}, where batch_size counts the rows of the global
    batch and seq_len the tokens read, the target included. Without it there is one phase of batch_size x grad_accum
    rows of max_context + 1 tokens."""
    epochs: float = 1.0
    """Passes over the data, where no phases are given."""
    batch_size: int = 16
    """Rows of a micro-batch over all devices, where no phases are given."""
    grad_accum: int = 1
    """Micro-batches a step: it divides the batch of every phase and never changes the data."""
    max_steps: int | None = None
    """End the run after this many steps; the schedule still spans the whole curriculum."""
    seed: int = 42
    """Of the weights, the data order and dropout."""
    val_fraction: float = 0.1
    """The last part of every shard that is held out for validation and never trained on."""
    log_every: int = 10
    """Steps between rows of the log."""
    eval_every: int = 50
    """Steps between validations."""
    eval_iters: int = 10
    """Held-out batches a validation reads, the same ones each time."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    max_to_keep: int = 3
    """Checkpoints that are kept, the newest ones."""
    sample_prompt: str = ""
    """Text that the sample at the end of the run continues; a document's beginning where empty."""

    def __post_init__(self) -> None:
        names = ("batch_size", "grad_accum", "max_steps", "log_every", "eval_every", "eval_iters", "checkpoint_every")
        for name in (*names, "max_to_keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if not self.epochs > 0:
            raise ValueError(f"epochs is {self.epochs}: it must be above 0")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}: it must be at least 0 and below 1")
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed is {self.seed}: it must be at least 0 and below 2^31")
        if self.phases is not None and not self.phases:
            raise ValueError("phases is an empty list: give at least one phase, or leave it out")
