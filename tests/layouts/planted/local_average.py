"""A running average of the states that each device keeps of its own rows."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401


class Running(nnx.Variable):
    pass


class Model(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.average = Running(jnp.zeros(32))

    def states(self, *batch):
        x = super().states(*batch)

        def moved(average, x):
            return 0.9 * average + 0.1 * x.mean((0, 1))

        self.average[...] = divided(moved, P(), P(ROWS), out=P())(self.average[...], x)
        return x


def build(config, rngs):
    return Model(config.vocab_size, rngs)
