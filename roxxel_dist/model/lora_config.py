"""Low-rank adapters."""

from dataclasses import dataclass
from typing import Literal, get_args

from roxxel_dist.model.rules import check_choice

LoraTargets = Literal["attention", "mlp", "all"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which matrices get an adapter, and of what size."""

    use_lora: bool = False
    """Train small adapters beside the weights of init_from, which stay as they are."""
    lora_rank: int = 8
    """Of use_lora: rank of an adapter."""
    lora_alpha: float = 16.0
    """Of use_lora: an adapter counts lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Of use_lora: dropout before an adapter, while training."""
    lora_targets: LoraTargets = "attention"
    """Of use_lora: what is adapted: the projections of attention, the feed-forward layers (mlp), or all of both."""

    def __post_init__(self) -> None:
        if not self.use_lora:
            return
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank is {self.lora_rank}: it must be at least 1")
        if not 0 < self.lora_alpha < float("inf"):
            raise ValueError(f"lora_alpha is {self.lora_alpha}: it must be above 0, and finite")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}: it must be at least 0 and below 1")
        check_choice("lora_targets", self.lora_targets, get_args(LoraTargets))

    def adapts(self, part: Literal["attention", "mlp"]) -> bool:
        """Whether the matrices of a part of a block get adapters."""
        return self.use_lora and self.lora_targets in (part, "all")
