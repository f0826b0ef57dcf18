"""A device has room for as many of its tokens as an expert gets where the load is even, and drops the others."""

from layouts.planted import mixture
from layouts.planted.mixture import EXPERTS, loss  # noqa: F401
from layouts.planted.sound import size


class Block(mixture.Block):
    def chosen(self, scores):
        chosen = super().chosen(scores)
        rank = chosen.reshape(-1, EXPERTS).cumsum(0).reshape(chosen.shape)
        return chosen * (rank <= chosen.size // EXPERTS // size("expert") ** 2)


class Model(mixture.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
