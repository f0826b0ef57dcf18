"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023)."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.attention_kernels import attend
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.kv_cache import Held, Reading, keep
from roxxel_dist.model.layers import Rotary, rotary_of, rotate
from roxxel_dist.model.lora import linear

INIT_STD = 0.02


class Attention(nnx.Module):
    """Each position reads itself and the ones before it: within its window, and within its document where segments tell
    documents apart.

    `n_heads` queries share `kv_heads` keys and values; all three are one matrix product. Output weights start smaller
    by the depth, so that the residual stream's variance does not grow with it (GPT-2).
    """

    n_heads: int
    kv_heads: int
    head_size: int

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.n_heads, self.kv_heads, self.head_size = config.heads()
        self.window: int | None = config.window
        self.kernel: AttentionKernel = config.attention
        self.rotary: Rotary | None = rotary_of(config)
        width = (self.n_heads + 2 * self.kv_heads) * self.head_size
        init = nnx.initializers.normal(INIT_STD)
        init_out = nnx.initializers.normal(INIT_STD / (2 * config.num_blocks) ** 0.5)
        self.qkv: nnx.Linear = linear(config, "attention", config.dim, width, init, rngs)
        self.out: nnx.Linear = linear(config, "attention", config.dim, config.dim, init_out, rngs)
        self.gate: Gate | None = Gate(config, rngs) if config.no_sink else None

    def __call__(self, x_BxLxD: jax.Array, reading: Reading, held: Held | None = None) -> tuple[jax.Array, Held | None]:
        """[B, L, dim] to [B, L, dim], and what a cache holds afterwards: keys and values [B, slots, kv_heads, K]."""
        heads = self.qkv(x_BxLxD).reshape(*x_BxLxD.shape[:2], -1, self.head_size)
        q, k, v = jnp.split(heads, [self.n_heads, self.n_heads + self.kv_heads], axis=2)
        if self.rotary is not None:
            q, k = (rotate(x, reading.position_L, self.rotary) for x in (q, k))
        if held is not None and reading.slot_BxL is not None:
            (k, v), held = keep(held, (k, v), reading.slot_BxL, self.window)
        mixed_BxLxD = attend(q, k, v, reading, self.window, kernel=self.kernel).reshape(x_BxLxD.shape)
        if self.gate is not None:
            mixed_BxLxD = self.gate(mixed_BxLxD, x_BxLxD)
        return self.out(mixed_BxLxD), held

    @property
    def kept(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what a cache keeps of a token."""
        return ((self.kv_heads, self.head_size),) * 2

    @property
    def pair_products(self) -> int:
        """Multiplications for a query and a key: of their score, and to mix in the value."""
        return 2 * self.n_heads * self.head_size


class Gate(nnx.Module):
    """Scales each channel of attention's output by a sigmoid of the layer's input.

    A softmax must spend its weight somewhere and heads with nothing to say spend it on the first tokens; a gate closes
    them instead. Behind the softmax and one number a channel is the best form of Qiu et al., "Gated attention for large
    language models", 2025.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(INIT_STD)
        self.score: nnx.Linear = nnx.Linear(config.dim, config.dim, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, mixed_BxLxD: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
        """The heads' outputs side by side, and the layer's input: an array of the same shape."""
        return mixed_BxLxD * jax.nn.sigmoid(self.score(x_BxLxD))
