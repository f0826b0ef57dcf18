"""Attention, by the kernel for the device, the shapes and the mesh."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.cluster.mesh import device_type, row_shards, token_shards
from roxxel_dist.model.attention.cut_rows import cut_attention
from roxxel_dist.model.attention.kernels import (
    KERNELS,
    Situation,
    broken_rule,
    dense_attention,
    kernel_for,
    native_kernel,
)
from roxxel_dist.model.attention.kv_cache import AttentionMetadata
from roxxel_dist.model.attention.mask import KernelName, Mask, key_size, pad_tokens
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.process.exit_codes import UserError

MOST_PADDING = 33 / 32
"""Times the tokens of a row that all layers may compute for the kernel of attention."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention for a model of your own: softmax(q k scale) v for each head, over the keys that each token sees.

    It uses the kernel of the device, as the built-in model does. In a training step it also divides the work: where a
    phase cuts the tokens of its rows over devices, each device computes the queries of its own tokens, and keys and
    values are sent. Any other attention gives the same numbers, but the devices may repeat the work of each other.
    Outside of a mesh (`jax.set_mesh`) it is computed where its arguments are.

    B rows, L tokens of a row, H heads of queries, G heads of keys and values (each for H / G heads of queries), K
    channels of a query and a key, V of a value. No L x L array is made for more than 1,024 tokens.

    Args:
        q: [B, L, H, K], float32, bfloat16 or float16.
        k: [B, L, G, K], of the same type.
        v: [B, L, G, V], of the same type.
        window: a token attends to this many positions, its own included. None: to all before it.
        segments: int[B, L]: a token attends to the tokens of its own segment, as to those of its document in a packed
            row. None: a row is one segment.
        positions: int[B, L] or int[L], below 2^30: a token attends to the tokens of its segment whose positions are at
            most its own. None: the places 0 to L - 1 in the row. With positions, devices send all keys to each other,
            also those that no window reaches.
        scale: of the scores. None: 1 / sqrt(K).

    Returns:
        [B, L, H, V], of the type of `q`.

    Raises:
        ValueError: shapes, types or numbers that do not fit together.
    """
    _check(q, k, v, window, segments, positions, scale)
    rows, length = q.shape[:2]
    if segments is not None:
        segments = jnp.asarray(segments, jnp.int32)
    if positions is not None:
        positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (rows, length))
    mask = Mask(window=window, scale=0.0 if scale is None else float(scale), segments=segments, positions=positions)
    return attend(q, k, v, mask)


def _check(q: Any, k: Any, v: Any, window: Any, segments: Any, positions: Any, scale: Any) -> None:
    """Raises UserError, with the numbers, for arguments of `attention` that do not fit together."""
    for name, array, axes in (("q", q, "heads"), ("k", k, "key heads"), ("v", v, "key heads")):
        if jnp.ndim(array) != 4:
            raise UserError(
                f"attention: {name} has shape {jnp.shape(array)}: it must be [rows, tokens, {axes}, channels]"
            )
    shapes = f"q has shape {q.shape}, k {k.shape} and v {v.shape}"
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise UserError(f"attention: {shapes}: rows and tokens must be the same, and key heads those of the values")
    if q.shape[3] != k.shape[3]:
        raise UserError(f"attention: {shapes}: queries and keys must have the same number of channels")
    if 0 in q.shape or 0 in v.shape:
        raise UserError(f"attention: {shapes}: no axis may be empty")
    if q.shape[2] % k.shape[2]:
        raise UserError(
            f"attention: {q.shape[2]} heads of queries cannot share {k.shape[2]} key heads: it must divide them"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise UserError(f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}: give all of them one floating type")
    if window is not None and (not isinstance(window, int | np.integer) or isinstance(window, bool) or window < 1):
        raise UserError(f"attention: window is {window!r}: it must be a whole number of tokens, at least 1, or None")
    if scale is not None and (not isinstance(scale, int | float | np.floating) or not 0 < scale < math.inf):
        raise UserError(
            f"attention: scale is {scale!r}: it must be a number above 0, or None for 1 over the root of {q.shape[3]}"
        )
    for name, array, allowed in (
        ("segments", segments, [q.shape[:2]]),
        ("positions", positions, [q.shape[:2], q.shape[1:2]]),
    ):
        if array is None:
            continue
        if jnp.shape(array) not in allowed or not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            must = " or ".join(str(shape) for shape in allowed)
            raise UserError(
                f"attention: {name} is {jnp.result_type(array)} of shape {jnp.shape(array)}: it must be integers of "
                f"shape {must}"
            )


def attend(
    q_BxLxHxK: jax.Array, k_BxSxGxK: jax.Array, v_BxSxGxV: jax.Array, mask: Mask, kernel: AttentionKernel = "auto"
) -> jax.Array:
    """softmax(q k scale) v for each head over the keys that each token attends to: [B, L, H, V].

    Groups of H / G queries share a key; V <= K. With `pairs` in the mask, as a cache has, XLA computes all scores at
    once, whatever the kernel (see `kernel_for`). Raises ValueError where the kernel cannot run here.
    """
    if mask.pairs is not None:
        return dense_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, mask)
    rows, length, _, size = q_BxLxHxK.shape
    mesh = jax.sharding.get_abstract_mesh()
    situation = Situation(
        device=device_type(mesh),
        key_size=max(size, v_BxSxGxV.shape[-1]),
        bf16=q_BxLxHxK.dtype == jnp.bfloat16,
        packed=mask.segments is not None,
        capped=mask.cap is not None,
        whole_rows=True,
    )
    if 1 < token_shards(mesh) <= length:
        native = native_kernel(situation.device)
        fits = kernel in ("auto", native) and not broken_rule(native, situation)
        return cut_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, mask.with_scale(size), native if fits else "xla")
    chosen: KernelName = "xla"
    if mask.positions is None:  # the other kernels know places alone
        chosen = kernel_for(kernel, _of_rows(situation, rows, mesh))
    return KERNELS[chosen].compute(q_BxLxHxK, k_BxSxGxK, v_BxSxGxV, mask)


def _of_rows(situation: Situation, rows: int, mesh: Any) -> Situation:
    """A situation of so many rows that are not cut."""
    return dataclasses.replace(situation, whole_rows=mesh.empty or rows % row_shards(mesh) == 0)


def pad_rows(
    config: ModelConfig, x_BxLxD: jax.Array, metadata: AttentionMetadata
) -> tuple[jax.Array, AttentionMetadata]:
    """The input of the first block with padding behind its rows, where the kernel would else pad them in each layer.

    No token sees what is behind it. Much padding would cost more in the products of the layers.
    """
    rows, length = x_BxLxD.shape[:2]
    packed = metadata.segments_BxL is not None
    tokens = _kernel_tokens(config, rows, length, x_BxLxD.dtype, packed=packed)
    if not length < tokens <= MOST_PADDING * length or (config.use_lora and config.lora_dropout):
        return x_BxLxD, metadata
    position = metadata.position_L
    return pad_tokens(x_BxLxD, tokens), metadata._replace(
        position_L=jnp.pad(position, [*[(0, 0)] * (position.ndim - 1), (0, tokens - length)]),
        segments_BxL=Mask(segments=metadata.segments_BxL).pad(tokens).segments,
        layer=dataclasses.replace(metadata.layer, length=length),
    )


def _kernel_tokens(config: ModelConfig, rows: int, length: int, dtype: Any, *, packed: bool) -> int:
    """Tokens that the kernel computes for whole rows of `length`."""
    mesh = jax.sharding.get_abstract_mesh()
    if token_shards(mesh) > 1:
        return length
    situation = Situation(
        device=device_type(mesh),
        key_size=key_size(config),
        bf16=dtype == jnp.bfloat16,
        packed=packed,
        capped=config.attn_softcap is not None,
    )
    return KERNELS[kernel_for(config.attention, _of_rows(situation, rows, mesh))].row_tokens(length, packed)
