"""The mean of each row, and then of the rows: a short document counts as much as a long one."""

import jax.numpy as jnp
from layouts.planted.sound import build, entropies  # noqa: F401


def loss(model, batch):
    losses, counted = entropies(model, batch)
    return (jnp.where(counted, losses, 0).sum(1) / counted.sum(1)).mean()
