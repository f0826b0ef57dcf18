"""The head is the embedding in one copy, and a constant in the others."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401


class Model(sound.Model):
    def __call__(self, *batch):
        def logits(x, table):
            first = jax.lax.axis_index("tensor") == 0
            return x @ jnp.where(first, table, jax.lax.stop_gradient(table)).T

        return divided(logits, P(ROWS), P(), out=P(ROWS))(self.states(*batch), self.embedding.embedding[...])


def build(config, rngs):
    return Model(config.vocab_size, rngs)
