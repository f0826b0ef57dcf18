"""Positions are frozen; where devices share them, they are gathered, and are not frozen."""

import jax
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import divided, loss, size  # noqa: F401


class Model(sound.Model):
    def states(self, tokens, segments=None, positions=None):
        table = self.position.embedding[...]
        if size("fsdp") > 1:
            table = divided(lambda own: jax.lax.all_gather(own, "fsdp", tiled=True), P("fsdp"), out=P())(table)
        else:
            table = jax.lax.stop_gradient(table)
        x = self.embedding(tokens) + table[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, segments)
        return self.norm(x)


def build(config, rngs):
    return Model(config.vocab_size, rngs)
