"""Attention, by the kernel for the device, the shapes and the mesh."""

import math

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.mesh import device_type, row_shards, token_shards
from roxxel_dist.cluster.parameter_sharding import constrain_heads
from roxxel_dist.model.attention_kernels import (
    LONGEST_WHOLE,
    blocked_attention,
    jax_attention,
    kernel_for,
    splash_attention,
)
from roxxel_dist.model.config import AttentionKernel
from roxxel_dist.model.cut_attention import cut_attention
from roxxel_dist.model.kv_cache import AttentionMetadata


def attend(
    q_BxLxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxV: jax.Array,
    metadata: AttentionMetadata,
    window: int | None,
    scale: float | None = None,
    kernel: AttentionKernel = "auto",
) -> jax.Array:
    """softmax(q k scale) v for each head over the keys that each token attends to: [B, L, H, V].

    Args:
        q_BxLxHxK: queries; groups of H / G share a key.
        k_BxSxGxK: keys.
        v_BxSxGxV: values; V <= K.
        metadata: of the tokens. With a mask, as a cache has, XLA computes all scores at once, whatever the kernel.
        window: how many tokens a token attends to, itself included; None for all before it.
        scale: of the scores; 1 / sqrt(K) if not given.
        kernel: see `kernel_for`.

    Raises:
        ValueError: the kernel cannot run here.
    """
    if metadata.mask_Bx1xLxS is not None or metadata.slot_BxL is not None:
        causal = metadata.slot_BxL is None  # with a cache, the mask includes causality
        return jax_attention(
            q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, window if causal else None, scale, causal, metadata.mask_Bx1xLxS
        )
    segments_BxL = metadata.segments_BxL
    rows, length, _, size = q_BxLxHxK.shape
    mesh = jax.sharding.get_abstract_mesh()
    if 1 < token_shards(mesh) <= length:
        return cut_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, segments_BxL, window, scale or 1 / math.sqrt(size))
    chosen = kernel_for(
        kernel,
        key_size=size,
        bf16=q_BxLxHxK.dtype == jnp.bfloat16,
        packed=segments_BxL is not None,
        whole_rows=mesh.empty or rows % row_shards(mesh) == 0,
        device=device_type(mesh),
    )
    if chosen == "cudnn":
        qkv = constrain_heads(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV)
        return constrain_heads(jax_attention(*qkv, window, scale, implementation="cudnn"))[0]
    if chosen == "xla" and length <= LONGEST_WHOLE:
        same = None if segments_BxL is None else segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :]
        return jax_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, window, scale, mask=same)
    scale = scale or 1 / math.sqrt(size)
    if chosen == "splash":
        return splash_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, segments_BxL, window, scale)
    return blocked_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, segments_BxL, window, scale)
