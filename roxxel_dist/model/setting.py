"""Numbers of a model that a run may change without another compilation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

FULL_PRECISION = "full_precision"
"""Marks, in the metadata of an `nnx.Param`, one that `bf16_compute` does not cast to bfloat16."""


class Setting(nnx.Variable[jax.Array]):
    """A float32[] scalar that goes into the training step as an input.

    It is not trained and not kept in checkpoints: a resumed run takes it from its config. Used by several layers, one
    object is one input.
    """

    def __init__(self, value: float | jax.Array, **metadata: Any) -> None:
        if jnp.shape(value) != ():
            raise ValueError(f"a Setting is one number, and this has the shape {jnp.shape(value)}")
        super().__init__(jnp.asarray(value, jnp.float32), **metadata)
