"""A table of vectors: one for each token, or one for each place."""

from functools import partial
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
        """[..., features] to [..., rows of the table]: the product with each of them, see `unrounded_product`."""
        query, table = self.promote_dtype((query, self.embedding[...]))
        return unrounded_product(query, table.T, out_sharding)


def logits_of(output: nnx.Linear | Embedding, x: jax.Array) -> jax.Array:
    """[..., features] to float32[..., vocabulary] logits, by the embedding or by a matrix of their own."""
    if isinstance(output, Embedding):
        return output.attend(x)
    return unrounded_product(*output.promote_dtype((x, output.kernel[...])))


def unrounded_product(x: jax.Array, kernel: jax.Array, out_sharding: Any = None) -> jax.Array:
    """x @ kernel as the float32 in which it is summed: rounded to bfloat16, logits lose what the softmax looks at.

    Its gradient is computed in the type of x, as that of any other layer: in float32 it would cost several times as
    much on accelerators.
    """
    if jnp.promote_types(x.dtype, jnp.float32) == x.dtype:
        return jnp.dot(x, kernel, out_sharding=out_sharding)
    return _wide_product(x, kernel, out_sharding)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _wide_product(x: jax.Array, kernel: jax.Array, out_sharding: Any) -> jax.Array:
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32, out_sharding=out_sharding)


def _forward(x: jax.Array, kernel: jax.Array, out_sharding: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide_product(x, kernel, out_sharding), (x, kernel)


def _backward(
    out_sharding: Any, inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(partial(jnp.dot, out_sharding=out_sharding), *inputs)
    return pull_back(gradient.astype(inputs[0].dtype))


_wide_product.defvjp(_forward, _backward)
