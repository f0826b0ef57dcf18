"""Attention by the kernels of vendors: splash attention, jax's kernel for TPUs, of whole rows; and cuDNN on NVIDIA
GPUs, of a row at once, or of a block of queries and a block of keys at a time.

cuDNN knows causality, and a window of a whole row. Documents within a row, and a window of blocks, are a bias instead:
an array that is added to scores, 0 where a query sees a key. It would be as large as the row squared, so rows of more
than `LONGEST_BIAS` tokens are computed in pairs of blocks, and pairs whose queries see no key are left out. What the
pairs of a block of queries give is merged by its log-sums, as in ring attention (Liu et al., 2023). Decision 11.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from roxxel_dist.cluster import jax_private
from roxxel_dist.model.attention.blocked import (
    BLOCK,
    Blocks,
    Form,
    attend_in_blocks,
    join_rows,
    loop_over_keys,
    split_rows,
)
from roxxel_dist.model.attention.mask import LANES, RESIDUALS, Mask, map_own_rows, pad_tokens

LONGEST_BIAS = 2048
"""Tokens of a row of documents, up to which cuDNN has one bias of it: an array that is added to its scores."""
LARGEST_BLOCK = 1024
"""Tokens of a block of a longer one, at most."""
UNSEEN = -(2.0**41)
"""The bias of a pair that is masked: cuDNN is wrong in the difference of two numbers that are much further below 0."""


def cudnn_attention(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxV: jax.Array, mask: Mask) -> jax.Array:
    """Causal attention, [B, L, H, V], each device on its own rows and heads. `mask`: without a cap.

    Arguments are bfloat16, of any length: tokens that are put behind the last are seen by none of the others.
    """
    assert mask.cap is None, "the rules of `KERNELS` leave it to XLA"
    assert mask.by_place, "likewise"
    length, values = q_BxLxHxK.shape[1], v_BxLxGxV.shape[-1]
    count, size = blocks_of(length, packed=mask.segments is not None)
    q, k, v = (pad_tokens(x, count * size) for x in pad_widths(q_BxLxHxK, k_BxLxGxK, v_BxLxGxV))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Any:
        return _whole(q, k, v, mask) if count == 1 else attend_in_blocks(PAIRS, q, k, v, mask, size)

    return map_own_rows(local, q, k, v, mask.with_scale(q_BxLxHxK.shape[-1]).pad(count * size))[:, :length, :, :values]


def blocks_of(length: int, packed: bool) -> tuple[int, int]:
    """(blocks of a row, their tokens), with as little padding as they need: an even number without documents.

    With a bias they are a multiple of `LANES`: for other lengths the backward pass of cuDNN 9 gives NaN on Hopper where
    scores are far below 0.
    """
    if not packed:
        return 1, length + length % 2
    count = 1 if length <= LONGEST_BIAS else -(-length // LARGEST_BLOCK)
    return count, -(-length // (count * LANES)) * LANES


def pad_widths(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values with as many channels each: zeros add nothing to a score."""
    widest = max(k.shape[-1], v.shape[-1])
    return tuple(jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])]) for x in (q, k, v))


@jax.custom_vjp
def _whole(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """Attention of whole rows, [B, L, H, K]."""
    return _whole_forward(q, k, v, mask)[0]


def _whole_mask(mask: Mask) -> tuple[jax.Array | None, int | None]:
    """(the bias, the window of the kernel): with documents the bias has the window too."""
    segments, window = mask.segments, mask.window
    if segments is None:
        return None, window
    seen = segments[:, :, None] == segments[:, None]
    if window is not None:
        place = jnp.arange(segments.shape[1])
        seen &= place[:, None] - place < window
    return _bias(seen), None


def _bias(seen: jax.Array) -> jax.Array:
    """bool[B, L, S] to what is added to scores, bfloat16[B, 1, L, S]."""
    return jnp.where(seen, 0, UNSEEN).astype(jnp.bfloat16)[:, None]


def _whole_forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> tuple[jax.Array, Any]:
    bias, window = _whole_mask(mask)
    found = jax_private.cudnn_attention(q, k, v, bias, scale=mask.scale, causal=True, window=window)
    out, log_sums = checkpoint_name(found, RESIDUALS)
    return out, (q, k, v, mask, out, log_sums)


def _whole_backward(kept: Any, d_out: jax.Array) -> Any:
    q, k, v, mask, out, log_sums = kept
    bias, window = _whole_mask(mask)
    options = {"scale": mask.scale, "causal": True, "window": window}
    return *jax_private.cudnn_attention_gradients(q, k, v, bias, out, log_sums, d_out, **options), None


_whole.defvjp(_whole_forward, _whole_backward)


# Below, shapes are of N blocks of C queries, [N, B, C, H, K], and of M blocks of C keys, [M, B, C, G, K].


def _pair_bias(at: Blocks, i: Any, j: Any, size: int) -> jax.Array | None:
    """The bias of queries of block i and keys of block j; None if the queries see all of them, or causality is all."""
    seen, window, of_q, of_k = None, at.of_q.window, at.of_q.segments, at.of_k.segments
    if of_q is not None and of_k is not None:
        seen = of_q[i][:, :, None] == of_k[j][:, None]
    if window is not None:
        place = jnp.arange(size)
        near = ((at.number[i] - j) * size + place[:, None] - place < window)[None]
        seen = near if seen is None else seen & near
    return None if seen is None else _bias(seen)


def pairs_forward(q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks, of_row: int) -> tuple[jax.Array, jax.Array]:
    """`blocked_forward` by cuDNN: the output [N, B, C, H, K], and the log-sums, float32[N, B, H, C].

    Each query sees a key of its own block, so a block of which it sees none weighs nothing beside that.
    """
    size = q.shape[2]

    def pair(i: Any, j: Any, *, causal: bool) -> tuple[jax.Array, jax.Array]:
        bias = _pair_bias(at, i, j, size)
        return jax_private.cudnn_attention(q[i], k[j], v[j], bias, scale=at.of_q.scale, causal=causal, window=None)

    def queries(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        def keys(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            mixed, log_sums = carry
            more, its_sums = pair(i, j, causal=False)
            both = jnp.logaddexp(log_sums, its_sums)
            old, new = (jnp.exp(x - both).swapaxes(1, 2)[..., None] for x in (log_sums, its_sums))
            return mixed * old + more * new, both

        mixed, log_sums = pair(i, at.number[i], causal=True)
        start = mixed.astype(jnp.float32), log_sums
        mixed, log_sums = loop_over_keys(i, at, size, of_row, keys, start, but_own=True)
        return None, (mixed.astype(v.dtype), log_sums)

    return jax.lax.scan(queries, None, jnp.arange(q.shape[0]))[1]


def pairs_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Blocks,
    out: jax.Array,
    log_sums: jax.Array,
    d_out: jax.Array,
    of_row: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`blocked_backward` by cuDNN: of a pair with the log-sums of all keys, a kernel gives the pair's gradients."""
    size = q.shape[2]

    def queries(d_keys: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        def pair(j: Any, carry: Any, *, causal: bool = False) -> Any:
            bias = _pair_bias(at, i, j, size)
            options = {"scale": at.of_q.scale, "causal": causal, "window": None}
            more = jax_private.cudnn_attention_gradients(
                q[i], k[j], v[j], bias, out[i], log_sums[i], d_out[i], **options
            )
            d_q, d_k, d_v = carry
            return d_q + more[0], d_k.at[j].add(more[1]), d_v.at[j].add(more[2])

        start = pair(at.number[i], (jnp.zeros(q.shape[1:]), *d_keys), causal=True)
        d_q, *d_keys = loop_over_keys(i, at, size, of_row, pair, start, but_own=True)
        return tuple(d_keys), d_q.astype(q.dtype)

    (d_k, d_v), d_q = jax.lax.scan(queries, (jnp.zeros(k.shape), jnp.zeros(v.shape)), jnp.arange(q.shape[0]))
    return d_q, d_k, d_v


PAIRS = Form(split_rows, join_rows, pairs_forward, pairs_backward)
"""Attention by cuDNN: queries [B, tokens, H, K], as many channels as values."""


def splash_block(length: int) -> int:
    """The largest block of splash attention, at most `BLOCK`, for a multiple of `LANES` tokens."""
    return next(size for size in (BLOCK, BLOCK // 2, LANES) if length % size == 0)


def splash_kernel(
    near: Any, heads: int, size: int, cap: float | None, devices: int = 1, *, interpret: bool = False
) -> Any:
    """The kernel for so many heads, in blocks of `size` tokens, with a table of the blocks that each device needs.

    `near` says which keys a query attends to: one of splash attention's own masks.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([near] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=devices,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )


def splash_attention(
    q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxV: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    """`blocked_attention` by splash attention: jax's kernel for TPUs, each device on its own rows and heads.

    `interpret` runs the kernel's program on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q_BxLxHxK.shape[1]
    short = -length % LANES
    size = splash_block(length + short)
    whole = (length + short, length + short)
    window = mask.window
    near = splash.CausalMask(whole) if window is None else splash.LocalMask(whole, (window - 1, 0), 0)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        """Attention for this device's rows and heads. Padding comes after the real tokens, so causality masks it."""
        kernel = splash_kernel(near, q.shape[2], size, mask.cap, interpret=interpret)

        def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
            q, k, v = (jnp.pad(x, [(0, short), (0, 0), (0, 0)]).swapaxes(0, 1) for x in (q * mask.scale, k, v))
            ids = None if segments is None else jnp.pad(segments, (0, short))
            mixed: Any = kernel(q, k, v, None if ids is None else splash.SegmentIds(ids, ids))
            return mixed.swapaxes(0, 1)[:length]

        in_axes = 0, 0, 0, None if mask.segments is None else 0
        return jax.vmap(row, in_axes=in_axes)(q, k, v, mask.segments)

    return map_own_rows(local, q_BxLxHxK, k_BxLxGxK, v_BxLxGxV, mask.with_scale(q_BxLxHxK.shape[-1]))
