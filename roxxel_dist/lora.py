"""Low-rank adapters, for user-defined models, and to merge trained adapters."""

from roxxel_dist.model.lora import LoRALinear, LoRAParam, merge_adapters

__all__ = ["LoRALinear", "LoRAParam", "merge_adapters"]
