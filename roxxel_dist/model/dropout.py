"""Dropout (Srivastava et al., 2014) at a rate that is not compiled in."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.setting import Setting


class Dropout(nnx.Module):
    """Zeroes elements at random and scales the others up to keep the mean; does nothing in evaluation mode.

    Args:
        rate: the share of elements that is zeroed, at least 0 and below 1; one Setting may serve many layers.
        rngs: the stream `dropout`.
    """

    def __init__(self, rate: float | Setting, *, rngs: nnx.Rngs) -> None:
        self.rate: Setting = rate if isinstance(rate, Setting) else Setting(rate)
        self.deterministic = False  # NNX's eval() and train() set it
        self.rngs: nnx.RngStream = rngs.dropout.fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        """An array of the same shape and dtype."""
        if self.deterministic:
            return x
        keep = 1 - self.rate[...]
        mask = jax.random.bernoulli(self.rngs(), keep, x.shape)
        # In float32: rounded to bfloat16, the factor would shift the mean by up to 0.4 %.
        return jnp.where(mask, x.astype(jnp.float32) / keep, 0).astype(x.dtype)
