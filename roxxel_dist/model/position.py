"""How tokens know their places: rotary, absolute and learned positions.

"none" (Kazemnejad et al., "The impact of positional encoding", 2023) needs no code: a causal mask alone lets a layer
count the tokens before one.
"""

import jax
import jax.numpy as jnp

THETA = 10_000.0


def rotate(x_BxLxHxK: jax.Array, position_L: jax.Array, scale: float = 1.0) -> jax.Array:
    """Turn each pair (i, i + K/2) of a head's numbers by an angle that grows with the position (Su et al., "RoFormer",
    2021).

    Args:
        x_BxLxHxK: queries or keys; K even.
        position_L: int32 [L] positions, or [B, L] where rows have their own.
        scale: positions are divided by it (Chen et al., "Extending context window", 2023).

    Returns:
        An array of the same shape and dtype, computed in float32. The product of a query and a key so turned depends on
        their distance alone.
    """
    half = x_BxLxHxK.shape[-1] // 2
    frequency = THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_Lx1xF = (position_L.astype(jnp.float32) / scale)[..., None, None] * frequency
    cos, sin = jnp.cos(angle_Lx1xF), jnp.sin(angle_Lx1xF)
    first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)


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
