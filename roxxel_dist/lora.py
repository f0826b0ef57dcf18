"""Low-rank adapters, for models of one's own and to merge what was trained."""

from roxxel_dist.model.lora import LoRALinear, LoRAParam, merge_adapters

__all__ = ["LoRALinear", "LoRAParam", "merge_adapters"]
