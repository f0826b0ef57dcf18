"""The feed-forward layer: SwiGLU (Shazeer, "GLU variants improve Transformer", 2020)."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.attention import INIT_STD
from roxxel_dist.model.config import ModelConfig


class FeedForward(nnx.Module):
    """silu(x G) * (x U), projected back.

    Three matrices of 2/3 the width have the parameters of a plain layer's two; the width is rounded up to a multiple
    of 8.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden = -(-2 * config.expansion * config.dim // (3 * 8)) * 8
        init = nnx.initializers.normal(INIT_STD)
        init_out = nnx.initializers.normal(INIT_STD / (2 * config.num_blocks) ** 0.5)
        self.gate_up = nnx.Linear(config.dim, 2 * hidden, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden, config.dim, use_bias=False, kernel_init=init_out, rngs=rngs)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, dim] to [B, L, dim]."""
        gate, up = jnp.split(self.gate_up(x_BxLxD), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
