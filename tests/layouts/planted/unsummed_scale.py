"""A norm of the tokens that a device has, where those of a group share a row: its scale has a gradient for each."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401

PIECE = P(ROWS, "tensor")


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


def backward(saved, d_out):
    def part(x, scale, d_out):
        return d_out * scale, jax.lax.psum((x * d_out).sum((0, 1)), ROWS)

    return divided(part, PIECE, P(), PIECE, out=(PIECE, P()))(*saved, d_out)


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), backward)


class Norm(nnx.RMSNorm):
    def __call__(self, x):
        return scaled(x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6), self.scale[...])


class Model(sound.Model):
    def __init__(self, vocabulary, rngs):
        super().__init__(vocabulary, rngs)
        self.norm = Norm(32, rngs=rngs)


def build(config, rngs):
    return Model(config.vocab_size, rngs)
