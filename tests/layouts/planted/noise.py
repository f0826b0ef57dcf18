"""Models with dropout written by hand: the sound kinds draw the same noise in every layout, the others do not."""

import random

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted.sound import ROWS, divided, loss, size  # noqa: F401

RATE = 0.8
KIND = {}


def sound(function):
    """Name a function (x of float32[B, L, D], key) -> float32[B, L, D] that draws."""
    KIND[function.__name__] = function
    return function


planted = sound


class Model(nnx.Module):
    """A table, noise, and a head."""

    def __init__(self, vocabulary, rngs, drop, width=16):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)
        self.noise, self.drop = nnx.Rngs(noise=7), drop

    def __call__(self, tokens, segments=None, positions=None):
        return self.head(self.drop(self.embedding(tokens), self.noise.noise()))


def build(config, rngs):
    return Model(config.vocab_size, rngs, KIND[config.model_args["kind"]])


class Two(Model):
    """Noise of two layers with a stream each."""

    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs, whole_array)
        self.second = nnx.Rngs(noise=8).noise.fork()

    def __call__(self, tokens, segments=None, positions=None):
        x = self.drop(self.embedding(tokens), self.noise.noise())
        return self.head(index_of_the_device(x, self.second()))


def build_two(config, rngs):
    return Two(config.vocab_size, rngs)


def kept(x, key, shape=None):
    return jnp.where(jax.random.bernoulli(key, RATE, shape or x.shape), x / RATE, 0)


def on_rows(function, x, key):
    """Each device on its rows, where they can be divided."""
    parts = size("data") * size("fsdp")
    rows = ROWS if x.shape[0] % parts == 0 else None
    return divided(function, P(rows), P(), out=P(rows))(x, key)


def first_row(x):
    """The index of the first row of a device."""
    return jax.lax.axis_index(ROWS) * x.shape[0]


@sound
def whole_array(x, key):
    return kept(x, key)


@sound
def a_key_for_each_row(x, key):
    return jax.vmap(kept)(x, jax.random.split(key, x.shape[0]))


@sound
def keys_of_rows_on_devices(x, key):
    total = x.shape[0]

    def part(x, key):
        rows = jnp.arange(x.shape[0]) + (first_row(x) if x.shape[0] < total else 0)
        return jax.vmap(kept)(x, jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    return on_rows(part, x, key)


@sound
def a_slice_of_the_whole(x, key):
    total = x.shape[0]

    def part(x, key):
        mask = jax.random.bernoulli(key, RATE, (total, *x.shape[1:]))
        own = jax.lax.dynamic_slice_in_dim(mask, first_row(x), x.shape[0]) if x.shape[0] < total else mask
        return jnp.where(own, x / RATE, 0)

    return on_rows(part, x, key)


@sound
def by_a_scan(x, key):
    def body(carry, key):
        return kept(carry, key), None

    return jax.checkpoint(lambda x: jax.lax.scan(body, x, jax.random.split(key, 3))[0])(x)


@sound
def drawn_and_not_used(x, key):
    def part(x, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return x + 0 * jax.random.normal(own, x.shape)

    return kept(on_rows(part, x, key), jax.random.fold_in(key, 1))


@sound
def a_rule_of_its_own(x, key):
    """Its text has the address of a function, which is another in each trace."""

    @jax.custom_vjp
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (2 * x, None), lambda _, d_out: (2 * d_out,))
    return kept(scaled(x), key)


@planted
def index_of_the_device(x, key):
    def part(x, key):
        return kept(x, jax.random.fold_in(key, jax.lax.axis_index(ROWS)))

    return on_rows(part, x, key)


@planted
def number_of_devices(x, key):
    return kept(x, jax.random.fold_in(key, jax.device_count()))


@planted
def size_of_the_mesh(x, key):
    return kept(x, jax.random.split(key, size("data"))[-1])


@planted
def split_by_the_rows_of_a_device(x, key):
    def part(x, key):
        return jax.vmap(kept)(x, jax.random.split(key, x.shape[0]))

    return on_rows(part, x, key)


@planted
def one_mask_for_all_devices(x, key):
    return on_rows(kept, x, key)


@planted
def rows_in_another_order(x, key):
    """The same draws as on one device, each for another row."""

    def part(x, key):
        parts = jax.lax.axis_size(ROWS)
        rows = jax.lax.axis_index(ROWS) + parts * jnp.arange(x.shape[0])
        return jax.vmap(kept)(x, jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    return on_rows(part, x, key)


@planted
def index_of_the_process(x, key):
    return kept(x, jax.random.fold_in(key, jax.process_index()))


@planted
def number_of_processes(x, key):
    return kept(x, jax.random.fold_in(key, jax.process_count()))


@planted
def of_numpy(x, key):
    return kept(x, jax.random.fold_in(key, np.random.randint(1 << 20)))


@planted
def of_python(x, key):
    return kept(x, jax.random.fold_in(key, random.randrange(1 << 20)))
