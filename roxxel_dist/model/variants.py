"""What the built-in Transformer will be able to be: known by name, so that a file which names it can be read."""

from dataclasses import dataclass

from roxxel_dist.model.rules import check_built


@dataclass(frozen=True, kw_only=True)
class VariantConfig:
    """Low-rank adapters, which are not built yet."""

    use_lora: bool = False
    """Train small adapters and leave the weights alone (not built yet)."""
    lora_rank: int = 8
    """Of use_lora: rank of an adapter."""
    lora_alpha: float = 16.0
    """Of use_lora: an adapter counts lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Of use_lora: dropout before an adapter."""
    lora_targets: str = "attention"
    """Of use_lora: what is adapted: attention, mlp or all."""

    def __post_init__(self) -> None:
        check_built("use_lora", self.use_lora, False)
