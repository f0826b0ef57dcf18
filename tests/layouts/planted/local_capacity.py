"""Experts take as many tokens as they have room for: of each device, and not of all.

The built-in capacity is that of a row, which no layout divides: see `model/experts/moe.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401

EXPERTS = 4


class Block(sound.Block):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.router = nnx.Linear(width, EXPERTS, rngs=rngs)

    def hidden(self, x):
        def routed(scores):
            """Which units of hidden ones, a quarter for each expert, a token has."""
            chosen = jax.nn.one_hot(scores.argmax(-1), EXPERTS).reshape(-1, EXPERTS)
            fits = chosen.cumsum(0) <= len(chosen) // EXPERTS
            return jax.nn.softmax(scores) * (chosen * fits).reshape(scores.shape)

        shares = divided(routed, P(ROWS), out=P(ROWS))(self.router(x))
        units = jax.nn.relu(self.up(x))
        return self.down(units * jnp.repeat(shares, units.shape[-1] // EXPERTS, -1))


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
