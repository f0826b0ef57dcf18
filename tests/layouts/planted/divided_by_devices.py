"""The mean over a whole batch is divided by the number of devices."""

import jax
from layouts.planted.sound import build, entropies  # noqa: F401


def loss(model, batch):
    return entropies(model, batch)[0].mean() / jax.device_count()
