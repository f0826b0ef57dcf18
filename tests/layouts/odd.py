"""Models and losses that cannot be checked, or not in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from layouts.planted import sound

RNG = np.random.default_rng()


def plain_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


def random_by_callback(model, batch):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return plain_loss(model, batch) * jax.pure_callback(lambda: np.float32(RNG.uniform()), shape)


def random_by_numpy(model, batch):
    return plain_loss(model, batch) * RNG.uniform()


def without_return(model, batch):
    plain_loss(model, batch)


class Counting(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def states(self, *batch):
        self.calls[...] += 1
        return super().states(*batch)


def build_counting(config, rngs):
    return Counting(config.vocab_size, rngs)


class WithIntegers(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.table = nnx.Param(jnp.arange(8))


def build_with_integers(config, rngs):
    return WithIntegers(config.vocab_size, rngs)


def build_huge(config, rngs):
    return sound.Model(config.vocab_size, rngs, width=1 << 18)


def build_of_ten_tokens(config, rngs):
    return sound.Model(10, rngs)
