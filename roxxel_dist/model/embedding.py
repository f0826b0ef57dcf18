"""A table of vectors: one for each token, or one for each place."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Embedding(nnx.Embed):
    """`nnx.Embed`, in the type that its table has now.

    The parent keeps the type that the table was made in. Of a table that was cast to bfloat16 it gives float32, and all
    that follows is computed in float32.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """int[...] to [..., features] in the type of the table."""
        # Looked up in float32 and cast then: the gradient of a row is a sum over all tokens that took it.
        return super().__call__(inputs, out_sharding).astype(self.embedding[...].dtype)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., features] to [..., rows of the table]: the product with each of them."""
        query, table = self.promote_dtype((query, self.embedding[...]))
        return jnp.dot(query, table.T, out_sharding=out_sharding)
