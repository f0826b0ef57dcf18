"""A mixture whose experts devices share, as a user writes it: rows are gathered, and outputs are summed. Sound."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import divided, loss  # noqa: F401

EXPERTS, ROWS = 4, ("data", "fsdp", "expert")


class Block(sound.Block):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.router = nnx.Linear(width, EXPERTS, rngs=rngs)
        make = nnx.initializers.lecun_normal()
        self.experts = nnx.Param(make(rngs.params(), (EXPERTS, width, width)), mesh_axes=("expert", None, None))
        self.shared = nnx.Param(make(rngs.params(), (width, width)))

    def chosen(self, scores):
        """[..., E]: which expert each token of a device has."""
        return jax.nn.one_hot(scores.argmax(-1), EXPERTS)

    def of_shared(self, x, shared):
        return x @ shared

    def hidden(self, x):
        def of_device(x, scores, experts, shared):
            weights = jax.nn.softmax(scores) * self.chosen(scores)
            every, weights = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, weights))
            first = jax.lax.axis_index("expert") * len(experts)
            weights = jax.lax.dynamic_slice_in_dim(weights, first, len(experts), axis=-1)
            y = jnp.einsum("ble,bled->bld", weights, jnp.einsum("bld,edf->blef", every, experts))
            return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) + self.of_shared(x, shared)

        rows = P(ROWS)
        layer = divided(of_device, rows, rows, P("expert"), P(), out=rows)
        return super().hidden(x) + layer(x, self.router(x), self.experts[...], self.shared[...])


class Model(sound.Model):
    block = Block


def build(config, rngs):
    return Model(config.vocab_size, rngs)
