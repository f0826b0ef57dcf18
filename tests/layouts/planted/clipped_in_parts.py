"""The gradient of the last layer is clipped by its norm in the backward pass: that of a micro-batch."""

import jax
import jax.numpy as jnp
from layouts.planted import sound
from layouts.planted.sound import loss  # noqa: F401


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grad: (grad * jnp.minimum(1, 1e-2 / jnp.linalg.norm(grad)),))


class Model(sound.Model):
    def states(self, *batch):
        return clipped(super().states(*batch))


def build(config, rngs):
    return Model(config.vocab_size, rngs)
