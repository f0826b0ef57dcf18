"""What one device computes of a virtual shard that is a part of a row. Pure functions.

The cut is a `RowCut` without a halo, whose parts are the shards: each attends to as many keys as any other. A shard is
an array of N blocks of C tokens, [N, C, ...], of both pieces.

A step calls them block by block, first for all shards forward, then backward. What a block keeps for the backward pass
is its input, its heads and what they gathered; the rest is computed again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.step_parts import ATTENTION
from roxxel_dist.model.attention.blocked import Blocks, blocked_backward, blocked_forward
from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.model.attention.mask import Mask, mask_of
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.cross_entropy import Losses
from roxxel_dist.model.layers import DynamicScalar
from roxxel_dist.model.loss import losses_of_states, minimized_of_states, next_token_loss
from roxxel_dist.model.mlp import Balance
from roxxel_dist.model.split import Leaves
from roxxel_dist.model.transformer import Block
from roxxel_dist.train.exact.gradient import (
    Model,
    Packed,
    ShardPrograms,
    Sums,
    fold_in_shard,
    pack,
    random_counts,
    unpack,
)
from roxxel_dist.train.step.step import BALANCE, divisor


def split_tokens(cut: RowCut, x_L: jax.Array, *, repeat: bool = True) -> jax.Array:
    """[L] numbers of the tokens of a row to [M, C], M blocks of C tokens; the last one is repeated at the end, so that
    padding is like a token, or else it is 0."""
    short = [(0, cut.tokens - x_L.shape[0])]
    padded = jnp.pad(x_L, short, mode="edge") if repeat else jnp.pad(x_L, short)
    return padded.reshape(cut.row_blocks, cut.size)


def keys_of_shard(cut: RowCut, shard: jax.Array, mask: Mask) -> Blocks:
    """Which blocks of keys of its row each block of a shard attends to; `mask`: its segments are int32[M, C]."""
    numbers, of_k = cut.numbers(shard), mask.map_labels(lambda x: x[:, None])
    return Blocks.between(numbers, cut.size, of_k.map_labels(lambda x: x[numbers]), of_k)


def only_block(blocks: Any) -> Block:
    """The block of a stack of one layer."""
    graphdef, shared, layers = nnx.split(blocks, DynamicScalar, ...)
    return nnx.merge(graphdef, shared, jax.tree.map(lambda leaf: leaf[0], layers), copy=True)


def attention_inputs(block: Block, x_NxCxD: jax.Array, position_NxC: jax.Array) -> tuple[Any, ...]:
    """Queries [N, 1, G, H / G, C, K], keys [N, 1, G, C, K] and values [N, 1, G, C, V] of a shard, as in
    `attention_kernels`; and [N, C, D] the normed input, where the attention has a gate that needs it, else None."""
    normed = block.attention_input(x_NxCxD)
    with jax.named_scope(ATTENTION):
        q, k, v = block.attention.heads(normed, position_NxC)
    q = q.reshape(*k.shape[:3], -1, q.shape[-1])
    return *(jnp.moveaxis(each, 1, -2)[:, None] for each in (q, k, v)), None if block.attention.gate is None else normed


def finish_block(
    block: Block, x_NxCxD: jax.Array, mixed: jax.Array, normed_NxCxD: jax.Array | None
) -> tuple[jax.Array, Balance]:
    """([N, C, D] the output of a block with its random streams, the balance of its experts) from its input, what the
    heads gathered, [N, 1, G, H / G, C, V], and for a gate the normed input."""
    heads = jnp.moveaxis(mixed[:, 0], -2, 1)  # [N, C, G, H / G, V]
    return block.finish(x_NxCxD, heads.reshape(*heads.shape[:2], -1, heads.shape[-1]), normed_NxCxD)


BLOCKS = "blocks."
"""Begins the names of the leaves of all blocks, whose first axis is the layer."""
BEFORE, AFTER, FIRST, LAST = "before", "after", "first", "last"
"""The four uses of parameters: of a block before and after its attention, below the first block and above the last. A
tied embedding is used twice, anything else once."""


class Piece(NamedTuple):
    """The tokens of a virtual shard, each [N, C]."""

    tokens: jax.Array
    targets: jax.Array
    counted: jax.Array
    """bool: whether the loss of a target counts."""
    positions: jax.Array


class Kept(NamedTuple):
    """What the forward pass of a block leaves for the backward pass, of a shard."""

    x: Any
    """[N, C, D], the block's input."""
    q: Any
    """Queries, as `attention_inputs` gives them."""
    normed: Any
    kv: Any
    """Keys and values of the shard; for the programs those of its whole row."""
    mixed: Any = None
    """What the heads gathered, and the logarithms of the softmax sums."""
    log_sums: Any = None


@dataclass(frozen=True)
class PiecePrograms:
    """The functions of one device, to be jitted."""

    programs: ShardPrograms
    cut: RowCut
    rows: int
    """Of a batch."""
    config: ModelConfig
    training: bool

    @classmethod
    def of_model(cls, programs: ShardPrograms, model: Model, batch: Any, *, training: bool) -> "PiecePrograms":
        """The functions for such (abstract) arguments."""
        rows, length = jax.tree.leaves(batch)[0].shape
        config = programs.split.merge(*model, training=training).config
        cut = RowCut.of_length(programs.shards // rows, length - 1, config.window, by_place=False)
        return cls(programs, cut, rows, config, training)

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return self.config.num_blocks

    @property
    def balance(self) -> Balance:
        """The shapes of that of a shard."""
        of_layers: Any = jax.ShapeDtypeStruct((self.layers, self.config.n_experts), jnp.float32)
        loss: Any = jax.ShapeDtypeStruct((), jnp.float32)
        return Balance(loss, of_layers if self.config.use_moe else None)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The names of the parameters of each use."""
        params = self.programs.split.params.names
        attention = BLOCKS + "attention"
        own = (attention + ".out.", attention + ".gate.")
        before = [name for name in params if name.startswith(attention) and not name.startswith(own)]
        first = [name for name in params if name.startswith(("embedding.", "position."))]
        after = [name for name in params if name.startswith(BLOCKS) and name not in before]
        others = [name for name in params if name not in {*before, *after, *first}]
        tied = [name for name in first if name.startswith("embedding.")] if "head.kernel" not in params else []
        return {BEFORE: before, AFTER: after, FIRST: first, LAST: others + tied}

    def _function(
        self, use: str, model: Model, shard: jax.Array, layer: jax.Array | None, compute: Callable[..., Any]
    ) -> tuple[Leaves, Callable[..., Any]]:
        """(the parameters of this use, a function of them and of more arguments: `compute` of the module and these).

        Of a `layer`, int32[], the module is its block.
        """
        split, (params, rest, hparams) = self.programs.split, model
        rest = fold_in_shard(rest, shard)
        if layer is not None:
            params, rest, frozen = (
                {name: _of_layer(name, leaf, layer) for name, leaf in leaves.items()}
                for leaves in (params, rest, {name: hparams[name] for name in split.frozen.names})
            )
            hparams = hparams | frozen

        def function(own: Leaves, *args: Any) -> Any:
            module = split.merge(params | own, rest, hparams, training=self.training, dtype=self.programs.compute_dtype)
            return compute(module if layer is None else only_block(module.blocks), *args)

        return {name: params[name] for name in self.names[use]}, function

    def _pull_back(self, use: str, model: Model, shard: Any, layer: Any, compute: Any, args: Any, gradient: Any) -> Any:
        """(the packed gradients of the parameters of a use, those of `args`) from the gradient of the result."""
        own, function = self._function(use, model, shard, layer, compute)
        d_own, *d_args = jax.vjp(function, own, *args)[1](gradient)
        return pack(d_own), *d_args

    def embed(self, model: Model, shard: jax.Array, piece: Piece) -> jax.Array:
        """[N, C, D], the input of the first block."""
        own, function = self._function(FIRST, model, shard, None, _embed)
        return function(own, piece.tokens, piece.positions)

    def embed_back(self, model: Model, shard: jax.Array, piece: Piece, d_x: jax.Array) -> Packed:
        """The gradients of what `embed` uses."""
        own, function = self._function(FIRST, model, shard, None, _embed)
        return pack(jax.vjp(lambda own: function(own, piece.tokens, piece.positions), own)[1](d_x)[0])

    def before(self, model: Model, shard: jax.Array, layer: jax.Array, position: jax.Array, x: jax.Array) -> Any:
        """What `attention_inputs` gives."""
        own, function = self._function(BEFORE, model, shard, layer, attention_inputs)
        return function(own, x, position)

    def before_back(
        self, model: Model, shard: Any, layer: Any, position: Any, x: Any, d_x: Any, d_q: Any, d_kv: Any, d_normed: Any
    ) -> tuple[Packed, jax.Array]:
        """(the gradients of the parameters, that of the block's input) where `after_back` gave `d_x`."""

        def compute(block: Any, x: jax.Array) -> Any:
            q, *kv, normed = attention_inputs(block, x, position)
            return q, *(each.astype(jnp.float32) for each in kv), normed

        grads, more = self._pull_back(BEFORE, model, shard, layer, compute, (x,), (d_q, *d_kv, d_normed))
        return grads, d_x + more

    def after(
        self, model: Model, shard: Any, layer: Any, segments: Any, kept: Kept, balance: Balance
    ) -> tuple[jax.Array, Balance, jax.Array, jax.Array]:
        """[N, C, D] a block's output, the balance up to here, and what the heads gathered, with sums."""
        (k, v), at = kept.kv, self._keys(shard, segments, kept.q)
        mixed, log_sums = blocked_forward(kept.q, k, v, at, self.cut.row_blocks)
        own, function = self._function(AFTER, model, shard, layer, finish_block)
        x, more = function(own, kept.x, mixed, kept.normed)
        load = None if balance.load is None else balance.load.at[layer].set(more.load)
        return x, Balance(balance.loss + more.loss, load), mixed, log_sums

    def after_back(
        self, model: Model, shard: Any, layer: Any, segments: Any, kept: Kept, d_x: Any, d_balance: Any
    ) -> tuple[Packed, jax.Array, jax.Array, jax.Array | None, Any]:
        """The gradients of parameters, of `x`, `q`, `normed`, and float32 of `kv`."""

        def compute(*args: Any) -> tuple[jax.Array, jax.Array]:
            x, balance = finish_block(*args)
            return x, balance.loss

        args = kept.x, kept.mixed, kept.normed
        grads, d_x, d_mixed, d_normed = self._pull_back(AFTER, model, shard, layer, compute, args, (d_x, d_balance))
        (k, v), at = kept.kv, self._keys(shard, segments, kept.q)
        d_q, *d_kv = blocked_backward(kept.q, k, v, at, kept.mixed, kept.log_sums, d_mixed, self.cut.row_blocks)
        return grads, d_x, d_q, d_normed, tuple(d_kv)

    def _keys(self, shard: Any, segments: Any, q: jax.Array) -> Blocks:
        mask = replace(mask_of(self.config).with_scale(q.shape[-1]), window=self.config.window, segments=segments)
        return keys_of_shard(self.cut, shard, mask)

    def losses(self, model: Model, shard: jax.Array, piece: Piece, x: jax.Array, balance: Balance) -> Packed:
        """The packed sums of the losses of a virtual shard, as `ShardPrograms.losses` gives them."""
        own, function = self._function(LAST, model, shard, None, self._losses_and_ends)
        (loss, count, of_experts, *_), ends = function(own, x, balance.loss, piece, shard)
        if self.programs.loss_fn is next_token_loss:
            return pack((loss + of_experts, count, ends))
        return pack((loss, count, of_experts if self.config.has_second_loss else None, ends))

    def losses_back(
        self, model: Model, shard: jax.Array, piece: Piece, x: jax.Array, balance: Balance
    ) -> tuple[Packed, jax.Array, jax.Array]:
        """(packed (gradients of the parameters, what `_losses` found, the load), of `x`, of the balance loss)."""
        own, function = self._function(LAST, model, shard, None, self._losses)
        gradient = jax.grad(function, (0, 1, 2), has_aux=True)
        (grads, d_x, d_balance), found = gradient(own, x, balance.loss, piece, shard)
        return pack((grads, (*found, balance.load))), d_x, d_balance

    def _losses(self, model: Any, x: jax.Array, balance: jax.Array, piece: Piece, shard: jax.Array) -> tuple[Any, Any]:
        """(what is minimized, (sum of the losses, their count, that many times the balance loss, [rows] the first two
        at the place of the row)), float32."""
        weights = jnp.float32(piece.counted)
        total, found = minimized_of_states(model.config, model.output, model.final(x), piece.targets, weights)
        of_experts = self._of_experts(model, balance, weights.sum())
        return total + of_experts, self._sums(found, of_experts, piece, shard)

    def _losses_and_ends(self, model: Any, x: jax.Array, balance: jax.Array, piece: Piece, shard: jax.Array) -> Any:
        """(what `_losses` found, the sum of the losses of end-of-text or None)."""
        found = losses_of_states(model.config, model.output, model.final(x), piece.targets)
        of_experts = self._of_experts(model, balance, jnp.float32(piece.counted.sum()))
        sums, end = self._sums(found, of_experts, piece, shard), self.programs.end
        ends = None if end is None else jnp.where(piece.counted & (piece.targets == end), found.losses, 0).sum()
        return sums, ends

    def _of_experts(self, model: Any, balance: jax.Array, count: jax.Array) -> jax.Array:
        return count * balance * (model.alpha_balance[...] if model.config.use_moe else 0.0)

    def _sums(self, found: Losses, of_experts: jax.Array, piece: Piece, shard: jax.Array) -> tuple[jax.Array, ...]:
        """What `_losses` found, of the losses of the tokens."""
        loss, count = jnp.where(piece.counted, found.losses, 0).sum(), jnp.float32(piece.counted.sum())
        if self.config.z_loss:
            of_experts += self.config.z_loss * jnp.where(piece.counted, jnp.square(found.log_sums), 0).sum()
        row = jnp.arange(self.rows) == shard // self.cut.parts
        return loss, count, of_experts, jnp.where(row, loss, 0), jnp.where(row, count, 0)

    def sums_by_name(self, sums: Mapping[str, Any], params: Leaves) -> dict[str, Any]:
        """The sums of all uses of (abstract) parameters by name: "first", "before" and "after" are gradients, "last"
        gradients and what `_losses` found.

        They are made of those of `losses_back` for "last", `embed_back` for "first", and a list of those of each layer.
        """
        own = {use: {name: params[name] for name in names} for use, names in self.names.items()}
        found = *[jax.ShapeDtypeStruct((), jnp.float32)] * 3, *[jax.ShapeDtypeStruct((self.rows,), jnp.float32)] * 2
        named: dict[str, Any] = {
            LAST: unpack(sums[LAST], (own[LAST], (*found, self.balance.load))),
            FIRST: unpack(sums[FIRST], own[FIRST]),
        }
        for use in (BEFORE, AFTER):
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), own[use])
            layers = [unpack(layer, shapes) for layer in sums[use]]
            named[use] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *layers)
        return named

    def join_uses(self, sums: Mapping[str, Any], model: Model, *, is_packed: bool) -> tuple[Sums, Leaves]:
        """(the sums of all shards, the counts of random streams after a step) of what `named` gives; gradients that
        are left out of that stay so."""
        grads, (loss, count, of_experts, row_loss, row_count, load) = sums[LAST]
        grads = dict(grads)
        for name, grad in sums[FIRST].items():
            grads[name] = grads[name] + grad if name in grads else grad
        grads |= sums[BEFORE] | sums[AFTER]
        grads = {name: grads[name] for name in model.params if name in grads}
        counts = self._counts(model)
        if self.programs.loss_fn is next_token_loss:
            return Sums(grads, loss + of_experts, count, {}, None, None, load, {}), counts
        scalars = {BALANCE: of_experts} if self.config.has_second_loss else {}
        weights = row_count if is_packed else None
        return Sums(grads, loss, count, scalars, row_loss / divisor(row_count), weights, load, {}), counts

    def _counts(self, model: Model) -> Leaves:
        """The counts of random streams after a call of the model: nothing else of it is computed."""
        split = self.programs.split
        module = split.merge(*model, training=True)
        module.states(jnp.zeros((1, 1), jnp.int32))
        after = split.rest_of(module)
        return {name: after[name] for name in sorted(random_counts(split, after))}


def _embed(model: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return model.embed(tokens, positions)


def _of_layer(name: str, leaf: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer) if name.startswith(BLOCKS) else leaf
