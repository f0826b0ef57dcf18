"""A weight that the first device alone updates."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from layouts.planted.sound import build, divided, loss  # noqa: F401


def first_only(grad):
    return divided(lambda own: jnp.where(jax.lax.axis_index("data") == 0, own, 0), P(), out=P())(grad)


def optimizer(config, rate):
    def update(grads, params):
        return grads | {"head.bias": first_only(grads["head.bias"])}

    return optax.chain(optax.stateless(update), optax.sgd(rate))
