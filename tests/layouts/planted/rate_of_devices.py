"""A learning rate that grows with the devices, which the batch does not."""

import jax
import optax
from layouts.planted.sound import build, loss  # noqa: F401


def optimizer(config, rate):
    return optax.chain(optax.sgd(rate), optax.scale(len(jax.devices())))
