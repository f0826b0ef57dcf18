"""The sum of all devices is divided by the count of one."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted.sound import ROWS, build, divided, entropies  # noqa: F401


def loss(model, batch):
    losses, counted = entropies(model, batch)

    def mean(losses, counted):
        return jax.lax.psum(jnp.where(counted, losses, 0).sum(), ROWS) / losses.size

    return divided(mean, P(ROWS), P(ROWS), out=P())(losses, counted)
