"""Clipping by the norm of the part of a gradient that a device has."""

import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from layouts.planted.sound import build, divided, loss, size  # noqa: F401


def clipped(grad):
    """By its norm: not by that of all parameters, as a user may want it."""
    if grad.shape[0] % size("fsdp"):
        return grad

    def part(own):
        return own * jnp.minimum(1, 1e-3 / jnp.sqrt(jnp.square(own).sum()))

    return divided(part, P("fsdp"), out=P("fsdp"))(grad)


def optimizer(config, rate):
    clip = optax.stateless(lambda grads, params: {name: clipped(grad) for name, grad in grads.items()})
    return optax.chain(clip, optax.sgd(rate))
