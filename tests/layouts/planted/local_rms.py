"""A norm over the features that a device has, where devices share them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401


class Norm(nnx.RMSNorm):
    def __call__(self, x):
        def normed(x, scale):
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

        features = P(ROWS, None, "tensor")
        return divided(normed, features, P("tensor"), out=features)(x, self.scale[...])


class Model(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.norm = Norm(32, rngs=rngs)


def build(config, rngs):
    return Model(config.vocab_size, rngs)
