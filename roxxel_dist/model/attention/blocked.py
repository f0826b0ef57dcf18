"""Attention by XLA in blocks of queries and keys, as FlashAttention does (Dao et al., 2022).

The score matrix of a row of L tokens has L x L numbers for each head. Here one block of it is computed at a time, and
again in the backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from roxxel_dist.devices.traced_flops import MEAN_TRIPS
from roxxel_dist.model.attention.mask import HIDDEN, LANES, RESIDUALS, Mask, pad_tokens
from roxxel_dist.model.layers import soft_cap

BLOCK = 512
"""Tokens of a block of queries, and of keys; fewer if a window is shorter."""


def block_of(window: int | None, largest: int = BLOCK) -> int:
    """Tokens of a block: the most, or fewer for a shorter window."""
    return largest if window is None else min(largest, max(LANES, 1 << (window - 1).bit_length()))


def blocked_attention(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxV: jax.Array, mask: Mask) -> jax.Array:
    """Causal attention by XLA, [B, L, H, V], a block of queries and a block of keys at a time; groups of H / G queries
    share a key.

    For each block of queries it computes only the blocks of keys that are not masked: none after it, and none before
    its window. No array has more than a block's scores, in the backward pass too.
    """
    batch, length, heads, width = q_BxLxHxK.shape
    groups, size = k_BxLxGxK.shape[2], block_of(mask.window)
    padded = -(-length // size) * size  # what is added is masked as later tokens
    grouped = q_BxLxHxK.reshape(batch, length, groups, heads // groups, -1)
    q, k, v = (pad_tokens(x, padded) for x in (grouped, k_BxLxGxK, v_BxLxGxV))
    out = attend_in_blocks(BLOCKED, q, k, v, mask.with_scale(width).pad(padded), size)
    return out.reshape(batch, padded, heads, -1)[:, :length]


def split_heads(x: jax.Array, size: int) -> jax.Array:
    """[B, tokens, G, ...] to blocks [blocks, B, G, ..., size, last]."""
    return jnp.moveaxis(split_rows(x, size), 2, -2)


def join_heads(x: jax.Array) -> jax.Array:
    """The inverse of `split_heads`."""
    return join_rows(jnp.moveaxis(x, -2, 2))


def split_rows(x: jax.Array, size: int) -> jax.Array:
    """[B, tokens, ...] to blocks [blocks, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def join_rows(x: jax.Array) -> jax.Array:
    """The inverse of `split_rows`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


# Below, shapes are of N blocks of C queries, [N, B, G, R, C, K] (R of them share a key), and of M blocks of C keys,
# [M, B, G, C, K].


class Blocks(NamedTuple):
    """Which blocks of keys each block of queries attends to: those from `first` to `last`."""

    number: jax.Array
    """int32[N]: which block of keys has the tokens of a block of queries."""
    first: jax.Array
    """int32[N]."""
    last: jax.Array
    """int32[N]: `number`, but where positions say otherwise."""
    of_q: Mask
    """Its arrays int32[N, B, C]."""
    of_k: Mask
    """Its arrays int32[M, B, C]; else the same."""

    @classmethod
    def between(cls, number: jax.Array, size: int, of_q: Mask, of_k: Mask) -> "Blocks":
        """The blocks from the first to the last that may have a key that a block of queries attends to."""
        first, last, window = jnp.zeros(number.shape, jnp.int32), number, of_q.window
        may_meet: Any = True  # [N, M, B]
        if of_q.segments is not None and of_k.segments is not None:
            (least_q, most_q), (least_k, most_k) = _range(of_q.segments)[:, :, None], _range(of_k.segments)
            may_meet = (least_q <= most_k) & (least_k <= most_q)
        if of_q.positions is not None and of_k.positions is not None:
            (least_q, most_q), (least_k, most_k) = _range(of_q.positions)[:, :, None], _range(of_k.positions)
            may_meet &= least_k <= most_q
            if window is not None:
                may_meet &= least_q - most_k < window
            last = may_meet.shape[1] - 1 - may_meet.any(-1)[:, ::-1].argmax(-1)
        elif window is not None:
            first = jnp.maximum(0, (number * size - window + 1) // size)
        if may_meet is not True:
            first = jnp.maximum(first, may_meet.any(-1).argmax(-1))
        return cls(number, first, last, of_q, of_k)


def _range(labels: jax.Array) -> jax.Array:
    """[2, N, B]: the least and the largest of each block."""
    return jnp.stack([labels.min(-1), labels.max(-1)])


def loop_over_keys(
    i: jax.Array, at: Blocks, size: int, of_row: int, body: Any, start: Any, *, but_own: bool = False
) -> Any:
    """`jax.lax.fori_loop` over the blocks of keys that block `i` of queries attends to; `but_own`: without its own.

    Their number differs between blocks and devices, and the program has it as data. So a scope says how many they are
    on average over the `of_row` blocks of a row, for who counts FLOPs; where labels decide, it is the most.
    """
    number = np.arange(of_row)
    first: Any = 0
    if (window := at.of_q.window) is not None and at.of_q.positions is None:
        first = np.maximum(0, (number * size - window + 1) // size)
    with jax.named_scope(f"{MEAN_TRIPS}{(number - first + 1 - but_own).mean():g}"):
        return jax.lax.fori_loop(at.first[i], at.last[i] + 1 - but_own, body, start)


def blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks, of_row: int) -> tuple[jax.Array, jax.Array]:
    """The output [N, B, G, R, C, V], and the logarithms of the softmax sums, float32 [N, B, G, R, C].

    A row has `of_row` blocks, on all devices together.
    """

    def queries(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        def keys(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            """One step of the online softmax. What blocks that are masked for a query leave, the next one that is not
            wipes out: it shrinks by exp(HIDDEN - score) = 0. At the least its own block has a key for it."""
            top, total, mixed = carry
            score = _scores(q, k, at, i, j)
            higher = jnp.maximum(top, score.max(-1))
            weights, shrink = jnp.exp(score - higher[..., None]), jnp.exp(top - higher)
            new = jnp.einsum("bgrqs,bgsv->bgrqv", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
            return higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + new

        each = q.shape[1:-1]
        empty = jnp.full(each, HIDDEN), jnp.zeros(each), jnp.zeros((*each, v.shape[-1]))
        top, total, mixed = loop_over_keys(i, at, q.shape[-2], of_row, keys, empty)
        return None, ((mixed / total[..., None]).astype(v.dtype), top + jnp.log(total))

    return jax.lax.scan(queries, None, jnp.arange(q.shape[0]))[1]


def blocked_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Blocks,
    out: jax.Array,
    log_sums: jax.Array,
    d_out: jax.Array,
    of_row: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, in their type, and of keys and values, in the float32 that they are summed in."""

    def queries(d_keys: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        d_mixed = d_out[i]
        shared = (d_mixed.astype(jnp.float32) * out[i]).sum(-1, keepdims=True)

        def keys(j: jax.Array, carry: Any) -> Any:
            d_q, d_k, d_v = carry
            score = _scores(q, k, at, i, j)
            weights = jnp.exp(score - log_sums[i][..., None])
            d_weights = jnp.einsum("bgrqv,bgsv->bgrqs", d_mixed, v[j], preferred_element_type=jnp.float32)
            d_score = weights * (d_weights - shared) * at.of_q.scale
            if (cap := at.of_q.cap) is not None:  # of tanh; where a pair is masked its weight is 0
                d_score *= jnp.where(score > HIDDEN, 1 - jnp.square(score / cap), 0)
            d_scores = d_score.astype(q.dtype)
            d_q += jnp.einsum("bgrqs,bgsk->bgrqk", d_scores, k[j], preferred_element_type=jnp.float32)
            of_k = jnp.einsum("bgrqs,bgrqk->bgsk", d_scores, q[i], preferred_element_type=jnp.float32)
            of_v = jnp.einsum("bgrqs,bgrqv->bgsv", weights.astype(v.dtype), d_mixed, preferred_element_type=jnp.float32)
            return d_q, d_k.at[j].add(of_k), d_v.at[j].add(of_v)

        start = (jnp.zeros(q.shape[1:]), *d_keys)
        d_q, *d_keys = loop_over_keys(i, at, q.shape[-2], of_row, keys, start)
        return tuple(d_keys), d_q.astype(q.dtype)

    (d_k, d_v), d_q = jax.lax.scan(queries, (jnp.zeros(k.shape), jnp.zeros(v.shape)), jnp.arange(q.shape[0]))
    return d_q, d_k, d_v


class Form(NamedTuple):
    """How attention takes rows in blocks: the form of the blocks, and its two passes over them."""

    split: Callable[[jax.Array, int], jax.Array]
    """Rows [B, tokens, ...] to blocks of so many tokens, the first axis."""
    join: Callable[[jax.Array], jax.Array]
    """The inverse of `split`."""
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


BLOCKED = Form(split_heads, join_heads, blocked_forward, blocked_backward)
"""Attention by XLA: queries [B, tokens, G, H / G, K]."""


def attend_in_blocks(form: Form, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, size: int) -> jax.Array:
    """Attention of rows that lie whole on a device, [B, tokens, ...] of a multiple of `size` tokens, as `form` has
    queries, keys and values."""
    each = mask.map_labels(lambda x: split_rows(x, size))
    at = Blocks.between(jnp.arange(k.shape[1] // size), size, each, each)
    return form.join(_with_gradients(form)(*(form.split(x, size) for x in (q, k, v)), at))


@cache
def _with_gradients(form: Form) -> Any:
    """The function of (queries, keys, values, `Blocks`) that keeps what the backward pass of a form takes."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks) -> tuple[jax.Array, Any]:
        out, log_sums = checkpoint_name(form.forward(q, k, v, at, k.shape[0]), RESIDUALS)
        return out, (q, k, v, at, out, log_sums)

    def backward(kept: Any, d_out: jax.Array) -> Any:
        _, k, v, *_ = kept
        d_q, d_k, d_v = form.backward(*kept, d_out, k.shape[0])
        return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None

    attend = jax.custom_vjp(lambda *args: forward(*args)[0])
    attend.defvjp(forward, backward)
    return attend


def _scores(q: jax.Array, k: jax.Array, at: Blocks, i: Any, j: Any) -> jax.Array:
    """float32 [B, G, R, C, C]: of queries of block i and keys of block j, `HIDDEN` if masked."""
    size, of_q, of_k, window = q.shape[-2], at.of_q, at.of_k, at.of_q.window
    score = jnp.einsum("bgrqk,bgsk->bgrqs", q[i], k[j], preferred_element_type=jnp.float32) * of_q.scale
    score = soft_cap(score, of_q.cap)
    if of_q.positions is None or of_k.positions is None:
        back = (at.number[i] - j) * size + jnp.arange(size)[:, None] - jnp.arange(size)
    else:
        back = of_q.positions[i][:, None, None, :, None] - of_k.positions[j][:, None, None, None, :]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    if of_q.segments is not None and of_k.segments is not None:
        seen = seen & (of_q.segments[i][:, None, None, :, None] == of_k.segments[j][:, None, None, None, :])
    return jnp.where(seen, score, HIDDEN)
