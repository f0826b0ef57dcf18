"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023)."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.config import ModelConfig
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
        mixed_BxLxD = attend(q, k, v, reading, self.window).reshape(x_BxLxD.shape)
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


def attend(
    q_BxLxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxV: jax.Array,
    reading: Reading,
    window: int | None,
    scale: float | None = None,
) -> jax.Array:
    """softmax(q k scale) v for each head over what each token may see: [B, L, H, V]; the scale is 1 / sqrt(K) if not
    given. Groups of H / G queries share a key; V <= K."""
    causal = reading.slot_BxL is None  # with a cache, the mask says it all
    back = (window - 1, 0) if causal and window is not None else None
    size = v_BxSxGxV.shape[-1]
    missing = k_BxSxGxK.shape[-1] - size  # jax's function wants values as wide as keys
    v_BxSxGxK = jnp.pad(v_BxSxGxV, [(0, 0), (0, 0), (0, 0), (0, missing)]) if missing else v_BxSxGxV
    mixed = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxSxGxK, v_BxSxGxK,
        mask=reading.mask_Bx1xLxS, scale=scale, is_causal=causal, local_window_size=back,
    )  # fmt: skip
    return mixed[..., :size] if missing else mixed
