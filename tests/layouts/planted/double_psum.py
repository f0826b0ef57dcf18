"""The mean of all devices is added up once more."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted.sound import ROWS, build, divided, entropies  # noqa: F401


def loss(model, batch):
    losses, counted = entropies(model, batch)

    def mean(losses, counted):
        summed, count = jax.lax.psum((jnp.where(counted, losses, 0).sum(), counted.sum()), ROWS)
        return jax.lax.psum(summed / count, ROWS)

    return divided(mean, P(ROWS), P(ROWS), out=P())(losses, counted)
