"""Models for tests, made without a program: initializers would compile one for each shape, a second a model."""

import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import DynamicScalar
from roxxel_dist.model.transformer import Transformer

M = TypeVar("M", bound=nnx.Module)


def transformer(**fields: Any) -> Transformer:
    """A Transformer of these fields of `ModelConfig`, of `with_numbers`."""
    config = ModelConfig(**fields)
    return _of_numbers(_transformer(config), 0, {"alpha_balance": config.alpha_balance, "rate": config.dropout_rate})


@cache
def _transformer(config: ModelConfig) -> Any:
    """Its parts, which are only read; a trace takes longer than all of its numbers."""
    return _parts(lambda: Transformer(config, nnx.Rngs(params=0, dropout=1)))


def with_numbers(make: Callable[[], M], seed: int = 0, **scalars: float) -> M:
    """The module that `make` makes, with random numbers of NumPy for parameters: the same for the same name and shape.

    Those of norms are about 1, those of matrices of the size that keeps what they are multiplied with. `scalars` are
    the values of its `DynamicScalar`s. All else that is no key of a random stream is 0.
    """
    return _of_numbers(_parts(make), seed, scalars)


def _parts(make: Callable[[], nnx.Module]) -> Any:
    return nnx.split(nnx.eval_shape(make), nnx.Param, DynamicScalar, ...)


def _of_numbers(parts: Any, seed: int, scalars: Mapping[str, float]) -> Any:
    graphdef, params, hparams, rest = parts

    def scalar(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return jax.device_put(np.full(leaf.shape, scalars[name.split(".")[-1]], leaf.dtype))

    def numbers(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(size=leaf.shape)
        size = max(leaf.shape, default=1) ** 0.5  # of a matrix about the fan-in, whichever of its axes are the columns
        return jax.device_put(((1 + drawn / 8) if name.endswith("scale") else drawn / size).astype(leaf.dtype))

    def other(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            drawn = np.random.default_rng(seed).integers(0, 2**32, (*leaf.shape, 2), np.uint32)
            return jax.random.wrap_key_data(drawn)
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype))

    known = jax.tree.map_with_path(numbers, params), jax.tree.map_with_path(scalar, hparams)
    return nnx.merge(graphdef, *known, jax.tree.map(other, rest))
