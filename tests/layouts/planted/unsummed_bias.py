"""A layer with a backward pass of its own, that adds up over the devices the gradient of the kernel, and not
that of the bias."""

import jax
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, divided, loss  # noqa: F401


@jax.custom_vjp
def layer(x, kernel, bias):
    return x @ kernel + bias


def forward(x, kernel, bias):
    return layer(x, kernel, bias), (x, kernel)


def backward(saved, d_out):
    def part(x, kernel, d_out):
        d_kernel = jax.lax.psum(jax.numpy.einsum("btd,bte->de", x, d_out), ROWS)
        return d_out @ kernel.T, d_kernel, d_out.sum((0, 1))

    return divided(part, P(ROWS), P(), P(ROWS), out=(P(ROWS), P(), P()))(*saved, d_out)


layer.defvjp(forward, backward)


class Block(sound.Block):
    def __call__(self, x, segments=None):
        y = self.norm(x)
        return x + layer(self.mixed(y, segments), self.mix.kernel[...], self.mix.bias[...]) + self.hidden(y)


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
