"""A row that is cut into shards of its tokens, and a block of a Transformer on one of these.

The cut is a `RowCut` without a halo, whose parts are the shards: each attends to as many keys as any other. A shard is
an array of N blocks of C tokens, [N, C, ...], of both pieces. Every function here is of one shard, for a program of one
device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.step_parts import ATTENTION
from roxxel_dist.model.attention.blocked import Blocks
from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.model.attention.mask import Mask
from roxxel_dist.model.layers import DynamicScalar
from roxxel_dist.model.mlp import Balance
from roxxel_dist.model.transformer import Block


def in_blocks(cut: RowCut, x_L: jax.Array, *, repeat: bool = True) -> jax.Array:
    """[L] numbers of the tokens of a row to [M, C], M blocks of C tokens; the last one is repeated at the end, so that
    padding is like a token, or else it is 0."""
    short = [(0, cut.tokens - x_L.shape[0])]
    padded = jnp.pad(x_L, short, mode="edge") if repeat else jnp.pad(x_L, short)
    return padded.reshape(cut.row_blocks, cut.size)


def keys_of_shard(cut: RowCut, shard: jax.Array, mask: Mask) -> Blocks:
    """Which blocks of keys of its row each block of a shard attends to; `mask`: its segments are int32[M, C]."""
    numbers, of_k = cut.numbers(shard), mask.labels(lambda x: x[:, None])
    return Blocks.between(numbers, cut.size, of_k.labels(lambda x: x[numbers]), of_k)


def only_block(blocks: Any) -> Block:
    """The block of a stack of one layer."""
    graphdef, shared, layers = nnx.split(blocks, DynamicScalar, ...)
    return nnx.merge(graphdef, shared, jax.tree.map(lambda leaf: leaf[0], layers), copy=True)


def before_attention(block: Block, x_NxCxD: jax.Array, position_NxC: jax.Array) -> tuple[Any, ...]:
    """Queries [N, 1, G, H / G, C, K], keys [N, 1, G, C, K] and values [N, 1, G, C, V] of a shard, as in
    `attention_kernels`; and [N, C, D] the normed input, where the attention has a gate that needs it, else None."""
    normed = block.attention_input(x_NxCxD)
    with jax.named_scope(ATTENTION):
        q, k, v = block.attention.heads(normed, position_NxC)
    q = q.reshape(*k.shape[:3], -1, q.shape[-1])
    return *(jnp.moveaxis(each, 1, -2)[:, None] for each in (q, k, v)), None if block.attention.gate is None else normed


def after_attention(
    block: Block, x_NxCxD: jax.Array, mixed: jax.Array, normed_NxCxD: jax.Array | None
) -> tuple[jax.Array, Balance]:
    """[N, C, D] the output of a block, and the balance of its experts.

    Args:
        block: with its random streams.
        x_NxCxD: its input.
        mixed: [N, 1, G, H / G, C, V], what the heads gathered.
        normed_NxCxD: for a gate.
    """
    heads = jnp.moveaxis(mixed[:, 0], -2, 1)  # [N, C, G, H / G, V]
    return block.finish(x_NxCxD, heads.reshape(*heads.shape[:2], -1, heads.shape[-1]), normed_NxCxD)
