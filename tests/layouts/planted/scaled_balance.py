"""A loss that keeps experts equally busy, of means that are added up over the devices."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, build, divided  # noqa: F401


def loss(model, batch):
    inputs, _, _ = sound.taken_apart(batch)

    def balance(scores):
        return jax.lax.psum(jnp.square(jax.nn.softmax(scores, -1).mean((0, 1))).sum(), ROWS)

    return sound.loss(model, batch) | {"balance_loss": 0.1 * divided(balance, P(ROWS), out=P())(model(*inputs))}
