"""Devices that share rows drop different places of what all of them have."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401

EACH = (*ROWS, "tensor")


class Model(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.noise = nnx.Rngs(noise=7)

    def states(self, *batch):
        x, key = super().states(*batch), self.noise.noise()

        def dropped(x, key):
            own = jax.random.fold_in(key, jax.lax.axis_index(EACH))
            return jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x / 0.9, 0)

        return divided(dropped, P(ROWS), P(), out=P(ROWS))(x, key)


def build(config, rngs):
    return Model(config.vocab_size, rngs)
