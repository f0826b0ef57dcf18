"""Rotary positions (Su et al., "RoFormer", 2021)."""

import jax
import jax.numpy as jnp

THETA = 10_000.0


def rotate(x_BxLxHxK: jax.Array, position_L: jax.Array) -> jax.Array:
    """Turn each pair (i, i + K/2) of a head's numbers by an angle that grows with the position.

    Args:
        x_BxLxHxK: queries or keys; K even.
        position_L: int32 [L] positions, or [B, L] where rows have their own.

    Returns:
        An array of the same shape and dtype, computed in float32. The product of a query and a key so turned depends on
        their distance alone.
    """
    half = x_BxLxHxK.shape[-1] // 2
    frequency = THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_Lx1xF = position_L.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle_Lx1xF), jnp.sin(angle_Lx1xF)
    first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)
