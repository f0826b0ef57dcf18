"""A Transformer on rows that are cut into pieces, with the same bits on any number of devices.

A row is cut into 2 S pieces of its tokens. They lie in pairs (i, 2 S - 1 - i), one pair or several on a device: the
tokens of a pair together see as many keys as those of any other pair. Three rules keep every number the same:
- What is computed for a piece is computed in a loop over pieces, by the same instructions wherever it lies. No loop has
  a single iteration: XLA would dissolve it, and merge its body with what is around it.
- A sum over pieces is a binary tree over them in their order: loops of two iterations, one inside the other, add the
  halves of what a device has, and then devices add up what they have with the one 1, 2, 4, … places away.
- Nothing else goes across devices but copies of keys and values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.model.attention_kernels import Blocks, block_of, blocked_backward, blocked_forward, first_blocks
from roxxel_dist.model.layers import FULL_PRECISION, DynamicScalar
from roxxel_dist.model.loss import losses_of_states
from roxxel_dist.model.scan_layers import run_stack
from roxxel_dist.model.transformer import Block, Transformer, embedded

PIECES = "pieces"
"""The axis of the devices that share a row."""


@dataclass(frozen=True)
class PieceLayout:
    """How rows are cut into pieces, and which a device has."""

    rows: int
    """On each device, each with all or some of its pieces."""
    each: int
    """Pieces of a row that a device has: a power of two, at least 2."""
    devices: int
    """That share a row: a power of two."""
    blocks: int
    """Of attention in a piece."""
    size: int
    """Tokens of a block."""

    @classmethod
    def of(cls, rows: int, devices: int, shards: int, length: int, window: int | None) -> "PieceLayout":
        """For `rows` rows of `length` inputs, cut into `shards` pairs of pieces over `devices`.

        Powers of two, where either a device has several rows or several devices have one.
        """
        tokens = -(-length // (2 * shards // rows))
        blocks = -(-tokens // block_of(window))
        return cls(max(1, rows // devices), 2 * shards // max(rows, devices), max(1, devices // rows), blocks,
                   -(-tokens // blocks))  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a piece."""
        return self.blocks * self.size

    @property
    def of_row(self) -> int:
        """Pieces of a row."""
        return self.each * self.devices

    @cached_property
    def order(self) -> np.ndarray:
        """The pieces of a row in the order in which devices have them: 0, 2 S - 1, 1, 2 S - 2, …"""
        first = np.arange(self.of_row // 2)
        return np.stack([first, self.of_row - 1 - first], 1).reshape(-1)

    def numbers(self) -> jax.Array:
        """int32[each]: which pieces of its rows this device has."""
        place = jax.lax.axis_index(PIECES) * self.each + jnp.arange(self.each)
        return jnp.asarray(self.order, jnp.int32)[place]

    def cut(self, x_RxL: jax.Array, repeat: bool = True) -> jax.Array:
        """[R, L] numbers of the tokens of rows to the device's pieces [R x each, C].

        At the end of a row the last one is repeated, so that padding is like a token, or 0.
        """
        every = self.padded(x_RxL, repeat).reshape(self.rows, self.of_row, self.tokens)
        return every[:, self.numbers()].reshape(-1, self.tokens)

    def padded(self, x_RxL: jax.Array, repeat: bool = True) -> jax.Array:
        """Rows of as many tokens as their pieces have."""
        short = [(0, 0), (0, self.of_row * self.tokens - x_RxL.shape[1])]
        return jnp.pad(x_RxL, short, mode="edge") if repeat else jnp.pad(x_RxL, short)

    def gather(self, x: jax.Array) -> jax.Array:
        """[R x each, C, ...] of the pieces here to [R, 2 S, C, ...], all pieces of these rows in their order."""
        x = x.reshape(self.rows, self.each, *x.shape[1:])
        if self.devices > 1:
            x = jax.lax.all_gather(x, PIECES, axis=1, tiled=True)
        return x[:, np.argsort(self.order)]

    def scatter(self, x: jax.Array) -> jax.Array:
        """[R, 2 S, C, ...] to [R x each, C, ...]: the sum over the devices of what they have of these pieces.

        Each device keeps one half of the pieces and sends away the other, of which it keeps one half, and so on.
        """
        x, device, distance = x[:, self.order], jax.lax.axis_index(PIECES), 1
        x = x.reshape(self.rows, self.devices, self.each, *x.shape[2:])
        while distance < self.devices:
            x = x.reshape(self.rows, -1, 2, *x.shape[2:])
            odd = (device // distance) % 2 == 1
            kept, sent = jnp.where(odd, x[:, :, 1], x[:, :, 0]), jnp.where(odd, x[:, :, 0], x[:, :, 1])
            x = kept + jax.lax.ppermute(sent, PIECES, [(i, i ^ distance) for i in range(self.devices)])
            distance *= 2
        return x.reshape(self.rows * self.each, *x.shape[3:])


def over_pieces(compute: Callable[..., Any], *pieces: Any) -> Any:
    """`compute` of each of the 2^n pieces along the first axis of these trees, one after the other.

    Gradients of what it uses beside them are added up as `sum_over_pieces` adds.
    """
    count = _count(pieces)
    if count == 1:
        return jax.tree.map(lambda leaf: leaf[None], compute(*_first(pieces)))
    result = jax.lax.map(lambda half: over_pieces(compute, *half), _halves(pieces, count))
    return _joined(result, count)


def sum_over_pieces(compute: Callable[..., tuple[Any, Any]], *pieces: Any) -> tuple[Any, Any]:
    """(the sum of the first results of `compute`, the second ones) of each of the 2^n pieces: see `over_pieces`."""
    like = jax.eval_shape(lambda pieces: compute(*_first(pieces))[0], pieces)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    def total_of(pieces: Any) -> tuple[Any, Any]:
        count = _count(pieces)
        if count == 1:
            total, result = compute(*_first(pieces))
            return total, jax.tree.map(lambda leaf: leaf[None], result)

        def add(total: Any, half: Any) -> tuple[Any, Any]:
            more, result = total_of(half)
            return jax.tree.map(jnp.add, total, more), result

        total, result = jax.lax.scan(add, zeros, _halves(pieces, count))
        return total, _joined(result, count)

    return total_of(pieces)


def _count(pieces: Any) -> int:
    return jax.tree.leaves(pieces)[0].shape[0]


def _first(pieces: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], pieces)


def _halves(pieces: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(2, count // 2, *leaf.shape[1:]), pieces)


def _joined(halves: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), halves)


def tree_sum(x_Px: jax.Array) -> jax.Array:
    """[2^n, ...] to [...]: neighbours are added, then their sums."""
    while x_Px.shape[0] > 1:
        x_Px = x_Px[0::2] + x_Px[1::2]
    return x_Px[0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def piece_attention(
    q_PxCxHxK: jax.Array,
    k_PxCxGxK: jax.Array,
    v_PxCxGxV: jax.Array,
    segments_RxL: jax.Array | None,
    layout: PieceLayout,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Causal attention [P, C, H, V] of the pieces of a device, within a shard_map along `PIECES`.

    Args:
        q_PxCxHxK: queries of its pieces; groups of H / G share a key.
        k_PxCxGxK: their keys, which the other devices of the row get too.
        v_PxCxGxV: their values, likewise.
        segments_RxL: int32, of whole rows: a token attends to its own segment. None: a row is one segment.
        layout: of the pieces.
        window: how many tokens a token attends to, itself included; None for all before it.
        scale: of the scores.
    """
    return _forward(q_PxCxHxK, k_PxCxGxK, v_PxCxGxV, segments_RxL, layout, window, scale)[0]


# Below, shapes are of R rows, of which a device has P pieces each, of N blocks of C tokens: queries are
# [R, P, N, 1, G, H / G, C, K], and all M blocks of keys of a row [R, M, 1, G, C, K], as in `attention_kernels`.


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    layout: PieceLayout,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Any]:
    keys, values = _all_blocks(k, layout), _all_blocks(v, layout)

    def of_row(q: jax.Array, keys: jax.Array, values: jax.Array, of_k: jax.Array | None) -> Any:
        def of_piece(q: jax.Array, number: jax.Array) -> Any:
            return blocked_forward(q, keys, values, _seen(number, of_k, layout, window), window, scale)

        return over_pieces(of_piece, q, layout.numbers())

    out, log_sums = _over_rows(of_row, _blocks(q, k.shape[2], layout), keys, values, _segments(segments, layout))
    return _tokens(out), (q, k, v, segments, out, log_sums)


def _backward(layout: PieceLayout, window: int | None, scale: float, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, segments, out, log_sums = kept
    # Gathered again, not kept since the forward pass, which XLA would do: the barrier makes it another computation.
    k, v, d_out = jax.lax.optimization_barrier((k, v, d_out))
    keys, values = _all_blocks(k, layout), _all_blocks(v, layout)

    def of_row(of_q: Any, keys: jax.Array, values: jax.Array, of_k: jax.Array | None) -> Any:
        def of_piece(of_q: Any, number: jax.Array) -> Any:
            q, out, log_sums, d_out = of_q
            at = _seen(number, of_k, layout, window)
            d_q, *d_keys = blocked_backward(q, keys, values, at, out, log_sums, d_out, window, scale)
            return d_keys, d_q

        return sum_over_pieces(of_piece, of_q, layout.numbers())

    of_q = _blocks(q, k.shape[2], layout), out, log_sums, _blocks(d_out, k.shape[2], layout)
    d_keys, d_q = _over_rows(of_row, of_q, keys, values, _segments(segments, layout))
    d_k, d_v = (layout.scatter(_pieces(x, layout)).astype(like.dtype) for x, like in zip(d_keys, (k, v), strict=True))
    return _tokens(d_q), d_k, d_v, None


piece_attention.defvjp(_forward, _backward)


def _over_rows(compute: Callable[..., Any], *arrays: Any) -> Any:
    """`compute` of each row along the first axis of these trees."""
    if jax.tree.leaves(arrays)[0].shape[0] > 1:
        return jax.lax.map(lambda row: compute(*row), arrays)
    return jax.tree.map(lambda leaf: leaf[None], compute(*jax.tree.map(lambda leaf: leaf[0], arrays)))


def _blocks(x: jax.Array, groups: int, layout: PieceLayout) -> jax.Array:
    """[R x P, C', H, K] to [R, P, N, 1, G, H / G, C, K]."""
    shape = layout.rows, layout.each, layout.blocks, 1, layout.size, groups, x.shape[2] // groups, x.shape[3]
    return jnp.moveaxis(x.reshape(shape), 4, -2)


def _tokens(x: jax.Array) -> jax.Array:
    """The inverse of `_blocks`."""
    rows, each, blocks, _, groups, shared, size, width = x.shape
    return jnp.moveaxis(x, -2, 4).reshape(rows * each, blocks * size, groups * shared, width)


def _all_blocks(x: jax.Array, layout: PieceLayout) -> jax.Array:
    """[R x P, C', G, K] of the pieces here to [R, M, 1, G, C, K] of whole rows."""
    rows = layout.gather(x).reshape(layout.rows, -1, 1, layout.size, *x.shape[2:])
    return jnp.moveaxis(rows, 3, -2)


def _pieces(x: jax.Array, layout: PieceLayout) -> jax.Array:
    """[R, M, 1, G, C, K] to [R, pieces of a row, C', G, K]."""
    return jnp.moveaxis(x, -2, 3).reshape(layout.rows, layout.of_row, layout.tokens, *x.shape[3:4], x.shape[-1])


def _segments(segments_RxL: jax.Array | None, layout: PieceLayout) -> jax.Array | None:
    """[R, M, 1, C]."""
    if segments_RxL is None:
        return None
    return layout.padded(segments_RxL).reshape(layout.rows, -1, 1, layout.size)


def _seen(number: jax.Array, of_k: jax.Array | None, layout: PieceLayout, window: int | None) -> Blocks:
    """Which blocks of keys of its row the blocks of a piece attend to."""
    numbers = number * layout.blocks + jnp.arange(layout.blocks)
    of_q = None if of_k is None else of_k[numbers]
    return Blocks(numbers, first_blocks(numbers, layout.size, window, of_q, of_k), of_q, of_k)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a batch that a device has, and how it computes them."""

    layout: PieceLayout
    first_row: jax.Array
    """int32[]: the number of the device's first row in the batch, for random streams."""
    length: int
    """Inputs of a row."""
    segments_RxL: jax.Array | None
    positions_RxL: jax.Array | None
    compute_dtype: Any
    """What floating parameters are cast to, where a piece is computed; their gradients are added up in their own."""
    uncast: bool = False
    """Whether parameters marked `FULL_PRECISION` stay as they are."""

    def narrow(self, state: Any) -> Any:
        """The NNX state of parameters, as a piece uses it."""
        if self.compute_dtype is None:
            return state

        def cast(leaf: jax.Array) -> jax.Array:
            return leaf.astype(self.compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        def of_variable(variable: Any) -> Any:
            kept = self.uncast and variable.get_metadata().get(FULL_PRECISION)
            return variable if kept else jax.tree.map(cast, variable)

        return jax.tree.map(of_variable, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def positions(self) -> jax.Array:
        """int32[P, C] of the tokens of each piece."""
        rows = self.positions_RxL
        if rows is None:
            rows = jnp.broadcast_to(jnp.arange(self.length), (self.layout.rows, self.length))
        return self.layout.cut(rows)

    def stream_numbers(self) -> jax.Array:
        """int32[P]: of each piece another one, the same on any devices."""
        rows = self.first_row + jnp.arange(self.layout.rows)
        return (rows[:, None] * self.layout.of_row + self.layout.numbers()).reshape(-1)


def piece_losses(
    model: Transformer, output: Any, pieces: Pieces, tokens_RxL: jax.Array, targets_RxL: jax.Array, counted_RxL: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each piece, float32[P] each: the sum of its losses, how many these are, and that many times the balance loss.

    Args:
        model: parameters that `pieces` casts.
        output: its output layer; another object, where the parameters of a tied embedding are to have one gradient for
            each of the two.
        pieces: of the rows of this device.
        tokens_RxL: int32 inputs.
        targets_RxL: int32: the token after each.
        counted_RxL: bool: which targets count.
    """
    config, layout = model.config, pieces.layout
    # Padding at the end of a row counts nothing, and no token before it attends to it.
    real_PxC = layout.cut(jnp.ones(tokens_RxL.shape, bool), repeat=False)
    counted_PxC = layout.cut(counted_RxL) & real_PxC
    position_PxC = pieces.positions()

    inputs = (model.embedding, model.position) if config.pos_encoding == "learned" else (model.embedding,)
    graphdef, state = nnx.split(inputs)

    def embed(tokens_C: jax.Array, position_C: jax.Array) -> jax.Array:
        own: Any = nnx.merge(graphdef, pieces.narrow(state), copy=True)
        return embedded(config, own[0], own[1] if len(own) > 1 else None, tokens_C[None], position_C[None])[0]

    x_PxCxD = over_pieces(embed, layout.cut(tokens_RxL), position_PxC)
    remat = config.gradient_checkpointing and not model.deterministic
    run = partial(_run_block, pieces, position_PxC)
    x_PxCxD, balance_P, _ = run_stack(model.blocks, x_PxCxD, None, None, scan=config.scan_layers, remat=remat, run=run)
    factor = model.alpha_balance[...] if config.use_moe else 0.0
    last, last_state = nnx.split((model.norm, output))

    def losses(x_CxD: jax.Array, targets_C: jax.Array, counted_C: jax.Array, balance: jax.Array) -> Any:
        own: Any = nnx.merge(last, pieces.narrow(last_state), copy=True)
        norm, output = own
        x_BxCxD = norm(x_CxD[None])
        if model.output_scale != 1:
            x_BxCxD = x_BxCxD * model.output_scale
        losses_BxC = losses_of_states(config, output, x_BxCxD, targets_C[None])
        count = jnp.float32(counted_C.sum())
        return jnp.where(counted_C, losses_BxC[0], 0).sum(), count, count * balance * factor

    return over_pieces(losses, x_PxCxD, layout.cut(targets_RxL), counted_PxC, balance_P)


def _run_block(
    pieces: Pieces, position_PxC: jax.Array, make: Callable[[Any, Any], Block], x_PxCxD: jax.Array, params: Any,
    streams: Any,
) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
    """[P, C, D] through a block, float32[P] the balance of its experts, and its random streams after it."""

    attention = make(params, streams).attention

    def before(x_CxD: jax.Array, position_C: jax.Array) -> Any:
        block = make(pieces.narrow(params), streams)
        normed_BxCxD = block.attention_norm(x_CxD[None])
        q, k, v = block.attention.heads(normed_BxCxD, position_C[None])
        # The gate's input comes from here: a norm that two loops used would have two sums as its gradient.
        return q[0], k[0], v[0], None if attention.gate is None else normed_BxCxD[0]

    def after(x_CxD: jax.Array, mixed_CxHxK: jax.Array, normed_CxD: jax.Array | None, number: jax.Array) -> Any:
        block = make(pieces.narrow(params), jax.tree.map(lambda leaf: _folded(leaf, number), streams))
        normed_BxCxD = None if normed_CxD is None else normed_CxD[None]
        y_BxCxD, balance = block.finish(x_CxD[None], mixed_CxHxK[None], normed_BxCxD)
        return y_BxCxD[0], balance, [leaf for leaf in jax.tree.leaves(_streams(block)) if not _is_key(leaf)]

    q, k, v, normed = over_pieces(before, x_PxCxD, position_PxC)
    scale = attention.scale or 1 / math.sqrt(q.shape[-1])
    mixed = piece_attention(q, k, v, pieces.segments_RxL, pieces.layout, attention.window, scale)
    x_PxCxD, balance_P, counts = over_pieces(after, x_PxCxD, mixed, normed, pieces.stream_numbers())
    leaves, tree = jax.tree.flatten(streams)
    left = iter(counts)  # the same after each piece
    return x_PxCxD, balance_P, tree.unflatten([leaf if _is_key(leaf) else next(left)[0] for leaf in leaves])


def _streams(block: Block) -> Any:
    """What changes when a block is called."""
    return nnx.split(block, DynamicScalar, nnx.Param, ...)[3]


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _folded(leaf: jax.Array, number: jax.Array) -> jax.Array:
    return jax.random.fold_in(leaf, number) if _is_key(leaf) else leaf
