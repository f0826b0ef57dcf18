"""Each device draws its part of a weight with a key of its own."""

import jax
import jax.numpy as jnp
from layouts.planted import sound
from layouts.planted.sound import loss  # noqa: F401


class Block(sound.Block):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        keys = jax.random.split(rngs.params(), jax.device_count())
        draw = jax.vmap(lambda key: jax.random.normal(key, (width // len(keys), 2 * width), jnp.float32))
        self.up.kernel[...] = draw(keys).reshape(width, -1) / width**0.5


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
