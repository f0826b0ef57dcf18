"""The mean of the tokens so far, of sums over pieces: those behind are added, and not those before."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss, size  # noqa: F401


class Block(sound.Block):
    def mixed(self, x, segments):
        if size("tokens") == 1:
            return super().mixed(x, segments)

        def part(own):
            here, pieces, length = jax.lax.axis_index("tokens"), jax.lax.axis_size("tokens"), own.shape[1]
            sums = jax.lax.all_gather(own.sum(1), "tokens")
            others = (sums * (jnp.arange(pieces) > here)[:, None, None]).sum(0)
            count = here * length + jnp.arange(1, length + 1)
            return (others[:, None] + own.cumsum(1)) / count[:, None]

        piece = P(ROWS, "tokens")
        return divided(part, piece, out=piece)(x)


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
