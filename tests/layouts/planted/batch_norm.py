"""Batch normalization: with gradient accumulation each micro-batch has a mean of its own."""

from flax import nnx
from layouts.planted import sound
from layouts.planted.sound import loss  # noqa: F401


class Model(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.batch_norm = nnx.BatchNorm(32, rngs=rngs)

    def states(self, *batch):
        return self.batch_norm(super().states(*batch))


def build(config, rngs):
    return Model(config.vocab_size, rngs)
