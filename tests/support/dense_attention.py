"""Attention of all scores at once in float64: what every kernel is held against."""

from functools import partial

import numpy as np


def dense_attention(q, k, v, d_out, *, window=None, segments=None, positions=None, scale=None):
    """(the output, gradients of q, k and v for the gradient `d_out` of the output), in float64.

    Shapes as of `roxxel_dist.attention`.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    (rows, length, _, size), shared = q.shape, q.shape[2] // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    keys, values = np.repeat(k, shared, 2), np.repeat(v, shared, 2)
    place = np.broadcast_to(np.arange(length) if positions is None else positions, (rows, length))
    back = place[:, None, :, None] - place[:, None, None]
    seen = (back >= 0) & (back < (window or np.inf))
    if segments is not None:
        seen &= segments[:, None, :, None] == segments[:, None, None]
    product = partial(np.einsum, optimize=True)  # by BLAS
    scores = np.where(seen, product("blhk,bshk->bhls", q, keys) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = product("blhv,bshv->bhls", d_out, values)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    d_keys, d_values = product("bhls,blhk->bshk", d_scores, q), product("bhls,blhv->bshv", weights, d_out)
    of_groups = (x.reshape(*k.shape[:3], shared, -1).sum(3) for x in (d_keys, d_values))
    return product("bhls,bshv->blhv", weights, values), product("bhls,bshk->blhk", d_scores, keys), *of_groups
