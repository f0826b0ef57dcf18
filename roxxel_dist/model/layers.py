"""Layers: positions (rotary, absolute, learned), norms, dropout (Srivastava et al., 2014), embeddings.

Position encoding "none" (Kazemnejad et al., "The impact of positional encoding", 2023) needs no code: with a causal
mask a layer can count the tokens before each one. Scalars such as the dropout rate are inputs of the step, so that a
run may change them without compiling again.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import token_shards
from roxxel_dist.cluster.parameter_sharding import constrain_tokens
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.process.exit_codes import UserError

FULL_PRECISION = "full_precision"
"""A flag in the metadata of an `nnx.Param`: `bf16_compute` does not cast it to bfloat16."""
COLUMN_AXES = "column_axes"
"""A number in the metadata of an `nnx.Param`: how many of its last axes are together the columns of a matrix. Default:
1."""


STACKED = "stacked"
"""A number in the metadata of an `nnx.Param`: how many of its first axes number matrices, such as layers or experts.
Default: 0."""


class DynamicScalar(nnx.Variable[jax.Array]):
    """A float32[] scalar that is an input of the training step.

    It is not trained and not saved in checkpoints: a resumed run takes it from its config. Layers that share the object
    share the input.
    """

    def __init__(self, value: float | jax.Array, **metadata: Any) -> None:
        if jnp.shape(value) != ():
            raise UserError(f"a DynamicScalar is one number, and this has the shape {jnp.shape(value)}")
        super().__init__(jnp.asarray(value, jnp.float32), **metadata)


Norm = nnx.RMSNorm | nnx.LayerNorm


class UnitOffsetNorm(nnx.RMSNorm):
    """x / sqrt(mean(x^2) + epsilon) * (1 + scale), computed in float32; scale starts as 0."""

    def __call__(self, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
        """An array of the same shape and dtype."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        scale: Any = self.scale
        return (wide * (1 + scale[...].astype(wide.dtype))).astype(x.dtype)


def make_norm(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Norm:
    """A layer over the last axis, of `size` numbers, computed in float32.

    rmsnorm: x / sqrt(mean(x^2) + norm_eps) * scale (Zhang and Sennrich, 2019); with norm_unit_offset * (1 + scale).
    layernorm: (x - mean(x)) / sqrt(var(x) + norm_eps) * scale + bias (Ba et al., 2016).
    """
    if config.norm_unit_offset:
        return UnitOffsetNorm(size, epsilon=config.norm_eps, scale_init=nnx.initializers.zeros, rngs=rngs)
    kind = nnx.RMSNorm if config.norm_type == "rmsnorm" else nnx.LayerNorm
    return kind(size, epsilon=config.norm_eps, rngs=rngs)


class Dropout(nnx.Module):
    """Zeroes random elements and scales the others up to keep the mean; does nothing in evaluation mode.

    Args:
        rate: the share of elements that is zeroed, at least 0 and below 1; layers may share one DynamicScalar.
        rngs: the stream `dropout`.
    """

    def __init__(self, rate: float | DynamicScalar, *, rngs: nnx.Rngs) -> None:
        self.rate: DynamicScalar = rate if isinstance(rate, DynamicScalar) else DynamicScalar(rate)
        self.deterministic = False  # NNX's eval() and train() set it
        self.rngs: nnx.RngStream = rngs.dropout.fork()

    def __call__(self, x: jax.Array, length: int | None = None) -> jax.Array:
        """An array of the same shape and dtype.

        With a `length`, x[:, length:] is padding: the elements before it are zeroed as they are without it.
        """
        if self.deterministic:
            return x
        keep = 1 - self.rate[...]
        drawn = x.shape if length is None else (x.shape[0], length, *x.shape[2:])
        mask = jax.random.bernoulli(self.rngs(), keep, drawn)
        mask = jnp.pad(mask, [(0, all_of - some) for all_of, some in zip(x.shape, drawn, strict=True)])
        # In float32: rounded to bfloat16, the factor would shift the mean by up to 0.4 %.
        return jnp.where(mask, x.astype(jnp.float32) / keep, 0).astype(x.dtype)


class Embedding(nnx.Embed):
    """`nnx.Embed` that returns the current dtype of its table.

    The parent returns the initial dtype: for a table that was cast to bfloat16 it returns float32, and all later layers
    would compute in float32.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """int[...] to [..., features] in the type of the table."""
        # Where devices have unequal parts of a row, XLA adds the gradient of its own padding to row 0 of a table that
        # "tensor" cuts (jax 0.10.2). So the tokens are padded here, and the gradient of that is 0.
        length = inputs.shape[-1] if inputs.ndim else 0
        if short := -length % token_shards(jax.sharding.get_abstract_mesh()):
            even = jnp.pad(inputs, [*[(0, 0)] * (inputs.ndim - 1), (0, short)])
            inputs = constrain_tokens(even)[0] if inputs.ndim > 1 else even
        # Look up in float32, then cast: the gradient of a row is a sum over all its tokens.
        found = super().__call__(inputs, out_sharding).astype(self.embedding[...].dtype)
        return found[..., :length, :] if short else found

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., features] to [..., rows of the table]: the product with each of them, see `unrounded_product`."""
        query, table = self.promote_dtype((query, self.embedding[...]))
        return unrounded_product(query, table.T, out_sharding)


def logits_of(output: nnx.LinearGeneral | Embedding, x: jax.Array, cap: float | None = None) -> jax.Array:
    """[..., features] to float32[..., vocabulary] logits, by the embedding or an output matrix; `cap`: see
    `soft_cap`."""
    if isinstance(output, Embedding):
        return soft_cap(output.attend(x), cap)
    return soft_cap(unrounded_product(*output.promote_dtype((x, output.kernel[...]))), cap)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), which is within the cap and near x where that is small; x for None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def unrounded_product(x: jax.Array, kernel: jax.Array, out_sharding: Any = None) -> jax.Array:
    """x @ kernel in float32, without rounding the sums to bfloat16, which would change the softmax of logits.

    Its gradient is computed in the dtype of x, as in any other layer: float32 would cost several times as much on
    accelerators.
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
"""Constants of LLaMA 3.1: a frequency with fewer turns than the first in the trained context is divided by the scale,
one with more than the second is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The speed of rotation of queries and keys."""

    theta: float = THETA
    """The first pair turns by 1 radian a position, the last by about 1 / theta."""
    scale: float = 1.0
    """Positions are divided by it (Chen et al., "Extending context window", 2023)."""
    trained: int | None = None
    """The context of earlier training: only frequencies with few turns in it are divided by the scale (LLaMA 3.1; Peng
    et al., "YaRN", 2023, section 3.2)."""
    turned: int | None = None
    """The channels of a head that turn, the first ones, an even number; None for all."""


def rotary_of(config: ModelConfig) -> Rotary | None:
    """The rotary settings of a config; None if it has no rotary positions."""
    if config.pos_encoding != "rotary":
        return None
    part = None if config.partial_rotary_factor == 1 or config.mla else config.rotary_channels(config.heads()[2])
    return Rotary(
        theta=config.rope_theta, scale=config.rope_scale_factor, trained=config.rope_trained_context, turned=part
    )


def rotate(x_BxLxHxK: jax.Array, position_L: jax.Array, rotary: Rotary) -> jax.Array:
    """Queries or keys, of the same shape and dtype, with each pair (i, i + K/2) of a head's K numbers, an even count,
    or of its first ones, turned by an angle that grows with the position, int32 [L], or [B, L] for each row (Su et al.,
    "RoFormer", 2021).

    Computed in float32. The product of a rotated query and key depends only on their distance.
    """
    if rotary.turned is not None:
        turned, rest = jnp.split(x_BxLxHxK, [rotary.turned], axis=-1)
        whole = dataclasses.replace(rotary, turned=None)
        return jnp.concatenate([rotate(turned, position_L, whole), rest], axis=-1)
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
    """float32 [L, D] or [B, L, D] vectors of positions, int32 [L] or [B, L]: sines at even places, cosines at odd ones,
    of wave lengths from 2 pi to 10,000 x 2 pi (Vaswani et al., "Attention is all you need", 2017, section 3.5)."""
    frequency = THETA ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle_LxF = position_L.astype(jnp.float32)[..., None] * frequency
    pairs_LxFx2 = jnp.stack([jnp.sin(angle_LxF), jnp.cos(angle_LxF)], axis=-1)
    return pairs_LxFx2.reshape(*position_L.shape, -1)[..., :dim]
