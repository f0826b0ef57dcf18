"""How tokens know their places: rotary, absolute and learned positions.

"none" (Kazemnejad et al., "The impact of positional encoding", 2023) needs no code: a causal mask alone lets a layer
count the tokens before one.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from roxxel_dist.model.position_config import PositionConfig

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
