"""How tokens know their places: rotary, absolute and learned positions.

"none" (Kazemnejad et al., "The impact of positional encoding", 2023) needs no code: a causal mask alone lets a layer
count the tokens before one.

Numbers of a model that a run may change without another compilation.

What brings the residual stream to one scale before each part reads it.

Dropout (Srivastava et al., 2014) at a rate that is not compiled in.

A table of vectors: one for each token, or one for each place.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.config import ModelConfig, PositionConfig

FULL_PRECISION = "full_precision"
"""Marks, in the metadata of an `nnx.Param`, one that `bf16_compute` does not cast to bfloat16."""
COLUMN_AXES = "column_axes"
"""In the metadata of an `nnx.Param`: how many of its last axes are together the columns of a matrix; 1 if not there."""


class DynamicScalar(nnx.Variable[jax.Array]):
    """A float32[] scalar that goes into the training step as an input.

    It is not trained and not kept in checkpoints: a resumed run takes it from its config. Used by several layers, one
    object is one input.
    """

    def __init__(self, value: float | jax.Array, **metadata: Any) -> None:
        if jnp.shape(value) != ():
            raise ValueError(f"a DynamicScalar is one number, and this has the shape {jnp.shape(value)}")
        super().__init__(jnp.asarray(value, jnp.float32), **metadata)


Norm = nnx.RMSNorm | nnx.LayerNorm


def make_norm(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Norm:
    """A layer over the last axis, of `size` numbers, computed in float32.

    rmsnorm: x / sqrt(mean(x^2) + norm_eps) * scale (Zhang and Sennrich, 2019).
    layernorm: (x - mean(x)) / sqrt(var(x) + norm_eps) * scale + bias (Ba et al., 2016).
    """
    kind = nnx.RMSNorm if config.norm_type == "rmsnorm" else nnx.LayerNorm
    return kind(size, epsilon=config.norm_eps, rngs=rngs)


class Dropout(nnx.Module):
    """Zeroes elements at random and scales the others up to keep the mean; does nothing in evaluation mode.

    Args:
        rate: the share of elements that is zeroed, at least 0 and below 1; one DynamicScalar may serve many layers.
        rngs: the stream `dropout`.
    """

    def __init__(self, rate: float | DynamicScalar, *, rngs: nnx.Rngs) -> None:
        self.rate: DynamicScalar = rate if isinstance(rate, DynamicScalar) else DynamicScalar(rate)
        self.deterministic = False  # NNX's eval() and train() set it
        self.rngs: nnx.RngStream = rngs.dropout.fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        """An array of the same shape and dtype."""
        if self.deterministic:
            return x
        keep = 1 - self.rate[...]
        mask = jax.random.bernoulli(self.rngs(), keep, x.shape)
        # In float32: rounded to bfloat16, the factor would shift the mean by up to 0.4 %.
        return jnp.where(mask, x.astype(jnp.float32) / keep, 0).astype(x.dtype)


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


def logits_of(output: nnx.LinearGeneral | Embedding, x: jax.Array) -> jax.Array:
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


THETA = 10_000.0
FEW_WAVES, MANY_WAVES = 1.0, 4.0
"""Of LLaMA 3.1: a frequency that made fewer turns than the one in the trained context is divided by the scale, one that
made more than the other is left alone."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How fast queries and keys are turned."""

    theta: float = THETA
    """The first pair turns by 1 radian a position, the last by about 1 / theta."""
    scale: float = 1.0
    """Positions are divided by it (Chen et al., "Extending context window", 2023)."""
    trained: int | None = None
    """The context that was learned before: frequencies are divided by the scale, and only those that made few turns in
    it (LLaMA 3.1; Peng et al., "YaRN", 2023, section 3.2)."""


def rotary_of(config: PositionConfig) -> Rotary | None:
    """None where a model has no rotary positions."""
    if config.pos_encoding != "rotary":
        return None
    return Rotary(theta=config.rope_theta, scale=config.rope_scale_factor, trained=config.rope_trained_context)


def rotate(x_BxLxHxK: jax.Array, position_L: jax.Array, rotary: Rotary) -> jax.Array:
    """Turn each pair (i, i + K/2) of a head's numbers by an angle that grows with the position (Su et al., "RoFormer",
    2021).

    Args:
        x_BxLxHxK: queries or keys; K even.
        position_L: int32 [L] positions, or [B, L] where rows have their own.
        rotary: how fast.

    Returns:
        An array of the same shape and dtype, computed in float32. The product of a query and a key so turned depends on
        their distance alone.
    """
    half = x_BxLxHxK.shape[-1] // 2
    frequency_F = rotary.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scale = rotary.scale
    if rotary.trained is not None:
        frequency_F, scale = _stretched(frequency_F, rotary.trained, scale), 1.0
    angle_Lx1xF = (position_L.astype(jnp.float32) / scale)[..., None, None] * frequency_F
    cos, sin = jnp.cos(angle_Lx1xF), jnp.sin(angle_Lx1xF)
    first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)


def _stretched(frequency_F: jax.Array, trained: int, scale: float) -> jax.Array:
    """Frequencies, those that made few turns in the trained context divided by the scale, with a slope between."""
    turns_F = trained * frequency_F / (2 * math.pi)
    kept_F = jnp.clip((turns_F - FEW_WAVES) / (MANY_WAVES - FEW_WAVES), 0, 1)
    return kept_F * frequency_F + (1 - kept_F) * frequency_F / scale


def sinusoids(position_L: jax.Array, dim: int) -> jax.Array:
    """A vector for each position: sines and cosines of wave lengths from 2 pi to 10,000 x 2 pi (Vaswani et al.,
    "Attention is all you need", 2017, section 3.5).

    Args:
        position_L: int32 [L], or [B, L].
        dim: D, how many numbers each.

    Returns:
        float32 [L, D] or [B, L, D]: sines at even places, cosines at odd ones.
    """
    frequency = THETA ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle_LxF = position_L.astype(jnp.float32)[..., None] * frequency
    pairs_LxFx2 = jnp.stack([jnp.sin(angle_LxF), jnp.cos(angle_LxF)], axis=-1)
    return pairs_LxFx2.reshape(*position_L.shape, -1)[..., :dim]
