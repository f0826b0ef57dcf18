"""The shape of the built-in Transformer."""

from dataclasses import dataclass
from typing import Literal, get_args

from roxxel_dist.model.attention_config import AttentionConfig
from roxxel_dist.model.feedforward_config import FeedForwardConfig
from roxxel_dist.model.lora_config import LoraConfig
from roxxel_dist.model.position_config import PositionConfig
from roxxel_dist.model.rules import check_choice, check_sizes

USUAL_HEAD_SIZE = 64
LARGEST_DIM = 1 << 20

NormType = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LoraConfig, FeedForwardConfig, PositionConfig, AttentionConfig):  # fields: of the last first
    """A decoder-only Transformer, by default with rotary positions, SwiGLU, and RMSNorm before each part."""

    dim: int = 256
    """Width of the residual stream."""
    num_blocks: int = 4
    """Number of blocks, each attention and then a feed-forward layer."""
    vocab_size: int | None = None
    """Tokens the model knows; taken from the tokenizer where not given."""
    max_context: int = 256
    """The longest sequence the model reads, in tokens."""
    dropout_rate: float = 0.0
    """Dropout on the output of attention and feed-forward, while training."""
    weight_tying: bool = True
    """Use the embedding as the output matrix too."""
    norm_type: NormType = "rmsnorm"
    """What normalises before each part: rmsnorm scales, layernorm takes the mean away as well."""
    norm_eps: float = 1e-6
    """What a norm adds to the mean square, or the variance, before it divides by the root of it."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, about a third more work."""
    scan_layers: bool = False
    """Stack the arrays of all blocks and compile one block for all of them: the time to compile no longer grows with
    num_blocks. The same weights and numbers; checkpoints have the stacked arrays."""
    loss_chunk: int = 0
    """Compute logits and loss of so many tokens of a batch at a time, all devices together, and again in the backward
    pass: with a large vocabulary they are most of the memory. 0 for all at once."""

    def __post_init__(self) -> None:
        check_sizes({name: getattr(self, name) for name in ("dim", "num_blocks", "max_context", "vocab_size")})
        for group in (AttentionConfig, PositionConfig, FeedForwardConfig, LoraConfig):
            group.__post_init__(self)
        if self.dim > LARGEST_DIM:
            raise ValueError(f"dim is {self.dim}: it must be at most {LARGEST_DIM:,}, and no model is as wide")
        check_choice("norm_type", self.norm_type, get_args(NormType))
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be above 0 and below 1; 1e-6 is usual")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk is {self.loss_chunk}: it must be a number of tokens, or 0 for all at once")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate is {self.dropout_rate}: it must be at least 0 and below 1")
        if self.use_moe and self.adapts("mlp") and self.lora_dropout:
            raise ValueError(
                f"lora_dropout is {self.lora_dropout}: adapters of experts (use_moe, lora_targets {self.lora_targets}) "
                f"have none; set it to 0, or lora_targets to attention"
            )
        if self.mla and self.inference and self.lora_dropout and self.adapts("attention"):
            raise ValueError(
                f"lora_dropout is {self.lora_dropout} with mla and inference: attention among compressed vectors takes "
                f"adapters into its matrices, and no dropout comes before those; set inference to False to train"
            )
        _, _, head_size = self.heads()
        if self.pos_encoding == "rotary":
            self._check_rotary(head_size)

    def heads(self) -> tuple[int, int, int]:
        """(n_heads, kv_heads, head_size), the ones not given derived.

        Raises:
            ValueError: they do not fit together.
        """
        if self.n_heads is not None:
            n_heads = self.n_heads
        elif self.head_size is not None:
            n_heads = self.dim // self.head_size
        else:
            n_heads = self._usual_heads()
        head_size = self.head_size or self.dim // n_heads
        if n_heads * head_size != self.dim:
            raise ValueError(
                f"n_heads x head_size must be dim, and {n_heads} x {head_size} is not {self.dim}: "
                f"leave n_heads and head_size out to have them derived from dim"
            )
        kv_heads = self.kv_heads or n_heads
        if n_heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}: it must divide n_heads, which is {n_heads}")
        return n_heads, kv_heads, head_size

    def _check_rotary(self, head_size: int) -> None:
        if not self.mla and head_size % 2:
            raise ValueError(f"head_size is {head_size}: rotary positions turn pairs, so it must be even")
        if self.mla and (self.rope_dim < 2 or self.rope_dim % 2):
            raise ValueError(
                f"rope_dim is {self.rope_dim}: rotary positions turn pairs, so it must be even, at least 2"
            )
        if self.mla and self.rope_dim > head_size:
            raise ValueError(
                f"rope_dim is {self.rope_dim}: it must be at most head_size, which is {head_size}; make it smaller, or "
                f"head_size larger"
            )

    def _usual_heads(self) -> int:
        """The number of heads, a multiple of kv_heads, whose even size comes closest to 64."""
        group = self.kv_heads or 1
        fitting = [n for n in range(group, self.dim + 1, group) if self.dim % n == 0 and (self.dim // n) % 2 == 0]
        if not fitting:
            raise ValueError(
                f"dim is {self.dim}: no multiple of kv_heads ({group}) cuts it into heads of an even size; "
                f"use a multiple of {2 * group}"
            )
        return min(fitting, key=lambda n: abs(self.dim // n - USUAL_HEAD_SIZE))
