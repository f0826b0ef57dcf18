"""Attention with all scores of a row at once, by XLA: for short rows, and for a cache."""

import math

import jax
import jax.numpy as jnp

from roxxel_dist.model.attention.mask import HIDDEN, Mask
from roxxel_dist.model.layers import soft_cap


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """[B, L, H, V] from queries [B, L, H, K], keys [B, S, G, K] and values [B, S, G, V]; of each pair, in memory."""
    window, pairs = mask.window if mask.by_place else None, mask.dense()
    if mask.cap is not None:
        return _capped(q, k, v, mask.scaled(k.shape[-1]), mask.cap, window, pairs)
    size, values, scale = k.shape[-1], v.shape[-1], mask.scale or None
    if size != values:  # jax needs values as wide as keys; zeros add nothing to a score
        scale, widest = scale or 1 / math.sqrt(size), max(size, values)
        q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, widest - x.shape[-1])]) for x in (q, k, v))
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=pairs,
        scale=scale,
        is_causal=mask.by_place,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
    )
    return mixed[..., :values]


def _capped(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, cap: float, window: int | None, pairs: jax.Array | None
) -> jax.Array:
    """The same with a soft cap, which jax's function has not, in float32 at least."""
    (batch, length, heads, size), (_, keys, groups, _) = q.shape, k.shape
    q_BxLxGxRxK = q.reshape(batch, length, groups, heads // groups, size)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("blgrk,bsgk->bgrls", q_BxLxGxRxK, k, preferred_element_type=wide)
    score_BxGxRxLxS = soft_cap(products * mask.scale, cap)
    back = jnp.arange(length)[:, None] - jnp.arange(keys)
    seen = back >= 0 if mask.by_place else jnp.ones((length, keys), bool)
    if window is not None:
        seen &= back < window
    seen = seen if pairs is None else (seen & pairs)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, score_BxGxRxLxS, HIDDEN), axis=-1).astype(v.dtype)
    return jnp.einsum("bgrls,bsgv->blgrv", weights, v).reshape(batch, length, heads, -1)
