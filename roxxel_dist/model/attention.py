"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023)."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.position import rotate

INIT_STD = 0.02


class Attention(nnx.Module):
    """Each position reads itself and the ones before it, within its document where segments tell documents apart.

    `n_heads` queries share `kv_heads` keys and values; all three are one matrix product. Output weights start smaller
    by the depth, so that the residual stream's variance does not grow with it (GPT-2).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.n_heads, self.kv_heads, self.head_size = config.heads()
        width = (self.n_heads + 2 * self.kv_heads) * self.head_size
        init = nnx.initializers.normal(INIT_STD)
        init_out = nnx.initializers.normal(INIT_STD / (2 * config.num_blocks) ** 0.5)
        self.qkv = nnx.Linear(config.dim, width, use_bias=False, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(config.dim, config.dim, use_bias=False, kernel_init=init_out, rngs=rngs)

    def __call__(
        self, x_BxLxD: jax.Array, segments_BxL: jax.Array | None = None, positions_BxL: jax.Array | None = None
    ) -> jax.Array:
        """[B, L, dim] to [B, L, dim]; see `Transformer` for segments and positions."""
        batch, length, dim = x_BxLxD.shape
        heads = self.qkv(x_BxLxD).reshape(batch, length, -1, self.head_size)
        q, k, v = jnp.split(heads, [self.n_heads, self.n_heads + self.kv_heads], axis=2)
        position = jnp.arange(length) if positions_BxL is None else positions_BxL
        same_Bx1xLxL = None
        if segments_BxL is not None:
            same_Bx1xLxL = segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :]
        mixed = jax.nn.dot_product_attention(
            rotate(q, position), rotate(k, position), v, mask=same_Bx1xLxL, is_causal=True
        )
        return self.out(mixed.reshape(batch, length, dim))
