"""Splash attention: jax's kernel for TPUs, of whole rows."""

from typing import Any

import jax
import jax.numpy as jnp

from roxxel_dist.model.attention.blocked import BLOCK
from roxxel_dist.model.attention.mask import LANES, RESIDUALS, Mask, on_own_rows


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

    return on_own_rows(local, q_BxLxHxK, k_BxLxGxK, v_BxLxGxV, mask.scaled(q_BxLxHxK.shape[-1]))
