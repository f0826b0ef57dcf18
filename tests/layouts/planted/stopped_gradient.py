"""Where devices share a layer, its gradient is cut off."""

import jax
from layouts.planted import sound
from layouts.planted.sound import loss, size  # noqa: F401


class Block(sound.Block):
    def hidden(self, x):
        units = jax.nn.relu(self.up(x))
        return self.down(jax.lax.stop_gradient(units) if size("tensor") > 1 else units)


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
