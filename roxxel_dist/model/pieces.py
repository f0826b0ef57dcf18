"""A row that is cut into shards of its tokens, and a block of a Transformer on one of these.

A row of 2 S pieces has S shards: shard i has the pieces i and 2 S - 1 - i, which together attend to as many keys as
those of any other shard. A shard is an array of N blocks of C tokens, [N, C, ...], of both pieces. Every function here
is of one shard, for a program of one device.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.cluster.step_parts import ATTENTION
from roxxel_dist.model.attention_kernels import Blocks, Labels, block_of
from roxxel_dist.model.layers import DynamicScalar
from roxxel_dist.model.transformer import Block


@dataclass(frozen=True)
class RowCut:
    """How a row is cut into shards, pieces and blocks."""

    shards: int
    """S, of a row."""
    per_piece: int
    """Blocks of a piece."""
    size: int
    """C, tokens of a block."""
    window: int | None
    """How many tokens a token attends to, itself included; None for all before it."""

    @classmethod
    def of(cls, shards: int, length: int, window: int | None) -> "RowCut":
        """For rows of `length` inputs: blocks of at most `block_of` tokens, with as little padding as they need."""
        tokens = -(-length // (2 * shards))
        per_piece = -(-tokens // block_of(window))
        return cls(shards, per_piece, -(-tokens // per_piece), window)

    @property
    def blocks(self) -> int:
        """M, of a row."""
        return 2 * self.shards * self.per_piece

    def numbers(self, shard: Any) -> jax.Array:
        """int32[N]: which blocks of its row a shard has. Shards are numbered through all rows of a batch."""
        first, each = shard % self.shards, jnp.arange(self.per_piece)
        last = 2 * self.shards - 1 - first
        return jnp.concatenate([first * self.per_piece + each, last * self.per_piece + each])

    @property
    def places(self) -> np.ndarray:
        """int[M]: the place of each block of a row where its shards lie one behind the other."""
        pairs = [(shard, 2 * self.shards - 1 - shard) for shard in range(self.shards)]
        return np.argsort((np.reshape(pairs, (-1, 1)) * self.per_piece + np.arange(self.per_piece)).reshape(-1))

    def split(self, x_L: jax.Array, *, repeat: bool = True) -> jax.Array:
        """[L] numbers of the tokens of a row to [M, C]; the last one is repeated at the end, so that padding is like a
        token, or else it is 0."""
        short = [(0, self.blocks * self.size - x_L.shape[0])]
        padded = jnp.pad(x_L, short, mode="edge") if repeat else jnp.pad(x_L, short)
        return padded.reshape(self.blocks, self.size)

    def seen(self, shard: jax.Array, segments_MxC: jax.Array | None) -> Blocks:
        """Which blocks of keys of its row each block of a shard attends to."""
        numbers, of_k = self.numbers(shard), None if segments_MxC is None else segments_MxC[:, None]
        of_q = None if of_k is None else of_k[numbers]
        return Blocks.between(numbers, self.size, self.window, Labels(of_q), Labels(of_k))


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
) -> tuple[jax.Array, jax.Array]:
    """[N, C, D] the output of a block, and float32[] the balance of its experts.

    Args:
        block: with its random streams.
        x_NxCxD: its input.
        mixed: [N, 1, G, H / G, C, V], what the heads gathered.
        normed_NxCxD: for a gate.
    """
    heads = jnp.moveaxis(mixed[:, 0], -2, 1)  # [N, C, G, H / G, V]
    return block.finish(x_NxCxD, heads.reshape(*heads.shape[:2], -1, heads.shape[-1]), normed_NxCxD)
