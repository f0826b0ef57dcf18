"""Steps and evaluations of batches with fewer rows than virtual shards: each shard is a part of a row.

As with many rows, every number is made by programs of one device, the same ones on each. Across devices go the tree of
additions, and copies of keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.model.pieces import RowCut
from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_update import BlockUpdate
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.key_moves import ByShard, KeyMoves
from roxxel_dist.train.exact.layout import Layout, copies, shapes_of
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.piece_programs import AFTER, BEFORE, FIRST, LAST, Model, Piece, PiecePrograms
from roxxel_dist.train.exact.reduction import Exchange, Programs, Reduction, Tree, add_sums
from roxxel_dist.train.exact.uneven_key_moves import UnevenKeyMoves
from roxxel_dist.train.exact.update import Totals, WholeUpdate
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams


class Kept(NamedTuple):
    """What a layer's forward pass leaves for the backward pass, of each shard."""

    x: ByShard
    q: ByShard
    kv: ByShard
    normed: ByShard
    mixed: ByShard
    log_sums: ByShard


@dataclass(frozen=True)
class CompiledForward:
    """The forward pass up to the losses."""

    layout: Layout
    moves: KeyMoves | UnevenKeyMoves
    pieces: Programs
    embed: Programs
    before: Programs
    after: Programs
    depth: int
    """Layers."""

    @cached_property
    def numbers(self) -> ByShard:
        """int32[], of each shard."""
        layout = self.layout
        return [[_on(np.int32(shard), device) for shard in layout.shards_of(device)] for device in layout.devices]

    @cached_property
    def layers(self) -> ByShard:
        """int32[], the number of each layer on each device."""
        return [[_on(np.int32(layer), device) for layer in range(self.depth)] for device in self.layout.devices]

    @cached_property
    def zeros(self) -> list[jax.Array]:
        """float32[] 0, on each device."""
        return [_on(np.float32(0), device) for device in self.layout.devices]

    @classmethod
    def compiled(
        cls,
        programs: PiecePrograms,
        layout: Layout,
        model: Model,
        batch: Any,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "tuple[CompiledForward, dict[str, Any]]":
        """For such (abstract) arguments; and the shapes of what one shard has, by the names of `PiecePrograms`."""
        devices, cut = layout.devices, programs.cut
        number = jax.ShapeDtypeStruct((), np.int32)
        here = max(1, programs.rows // layout.line.size) if layout.is_even else programs.rows
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((here, leaf.shape[1]), leaf.dtype), batch)

        def cut_piece(rows: Any, shard: jax.Array) -> Any:
            return piece_of(cut, rows, shard)

        piece, segments = jax.eval_shape(cut_piece, rows, number)
        x = jax.eval_shape(programs.embed, model, number, piece)
        q, k, v, normed = jax.eval_shape(programs.before, model, number, number, piece.positions, x)
        kind = KeyMoves if layout.is_even else UnevenKeyMoves
        moves, kv = kind.compiled(layout, cut, (k, v), compile_one, for_each)
        zero = jax.ShapeDtypeStruct((), np.float32)
        after = model, number, number, segments, x, q, normed, kv, zero
        _, _, mixed, log_sums = jax.eval_shape(programs.after, *after)
        forward = cls(
            layout=layout,
            moves=moves,
            pieces=for_each(jax.jit(cut_piece), (rows, number), devices),
            embed=for_each(jax.jit(programs.embed), (model, number, piece), devices),
            before=for_each(jax.jit(programs.before), (model, number, number, piece.positions, x), devices),
            after=for_each(jax.jit(programs.after), after, devices),
            depth=programs.layers,
        )
        like = {"number": number, "piece": piece, "segments": segments, "x": x, "q": q, "kv": kv, "normed": normed}
        return forward, like | {"mixed": mixed, "log_sums": log_sums, "balance": zero}

    def each(self, compute: Callable[[int, int], Any]) -> ByShard:
        """Of each device and shard; every device has something to do at once."""
        found: ByShard = [[] for _ in self.layout.devices]
        for k in range(self.layout.most):
            for i, own in enumerate(found):
                if k < len(self.numbers[i]):
                    own.append(compute(i, k))
        return found

    def cut(self, batch: Any) -> ByShard:
        """(piece, segments of its row) of each shard."""
        rows = copies(batch, self.layout.devices)
        return self.each(lambda i, k: self.pieces[i](rows[i], self.numbers[i][k]))

    def run(self, models: list[Model], pieces: ByShard, *, keep: bool) -> tuple[list[Kept], ByShard]:
        """(what is kept of each layer, (the output of the last block, the balance) of each shard)."""
        kept: list[Kept] = []
        number, each = self.numbers, self.each
        x = each(lambda i, k: self.embed[i](models[i], number[i][k], pieces[i][k][0]))
        balance = each(lambda i, _: self.zeros[i])
        for layer in range(self.depth):
            at = [own[layer] for own in self.layers]
            heads = each(
                lambda i, k, x=x, at=at: self.before[i](
                    models[i], number[i][k], at[i], pieces[i][k][0].positions, x[i][k]
                )
            )
            kv = [[part[1:3] for part in own] for own in heads]
            rows = self.moves.keys_of_rows(kv)
            out = each(
                lambda i, k, x=x, at=at, heads=heads, rows=rows, balance=balance: self.after[i](
                    models[i],
                    number[i][k],
                    at[i],
                    pieces[i][k][1],
                    x[i][k],
                    heads[i][k][0],
                    heads[i][k][3],
                    rows[i][k],
                    balance[i][k],
                )
            )
            if keep:
                kept.append(Kept(x, _field(heads, 0), kv, _field(heads, 3), _field(out, 2), _field(out, 3)))
            x, balance = _field(out, 0), _field(out, 1)
        return kept, [list(zip(*both, strict=True)) for both in zip(x, balance, strict=True)]


def _field(of_shards: ByShard, number: int) -> ByShard:
    return [[part[number] for part in own] for own in of_shards]


def _on(number: Any, device: Any) -> jax.Array:
    return jax.device_put(number, device)


def piece_of(cut: RowCut, batch: Any, shard: jax.Array) -> tuple[Piece, jax.Array | None]:
    """(the piece, int32[M, C] the segments of its row) of a shard.

    `batch` has the rows of a device: a part of all that lies on a multiple of their number, or all.
    """
    packed = hasattr(batch, "tokens")
    here, numbers = jax.tree.leaves(batch)[0].shape[0], cut.numbers(shard)
    row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, shard // cut.shards % here, keepdims=False), batch)
    tokens, segments, positions = row if packed else (row, None, None)
    inputs, targets = tokens[:-1], tokens[1:]
    counted = jnp.ones(targets.shape, bool) if segments is None else segments[1:] == segments[:-1]
    places = jnp.arange(inputs.shape[0]) if positions is None else positions[:-1]
    # Padding counts nothing, and no token before it attends to it.
    piece = Piece(cut.split(inputs), cut.split(targets), cut.split(counted, repeat=False), cut.split(places))
    return Piece(*(each[numbers] for each in piece)), None if segments is None else cut.split(segments[:-1])


@dataclass(frozen=True)
class CompiledLongStep:
    """The sums of all shards and the update, for shards of parts of rows: see `step.CompiledStep`."""

    layout: Layout
    forward: CompiledForward
    losses_back: Programs
    after_back: Programs
    before_back: Programs
    embed_back: Programs
    adds: dict[str, Programs]
    """Of packed gradients of each use of parameters."""
    join: Programs
    exchange: Exchange
    update: WholeUpdate | BlockUpdate

    @classmethod
    def compiled(
        cls,
        shard_programs: ShardPrograms,
        layout: Layout,
        state: TrainState,
        hparams: Hparams,
        batch: Any,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "CompiledLongStep":
        """The programs for such (abstract) arguments."""
        devices = layout.devices
        model = Model(*shapes_of((state.params, state.rest, hparams)))
        programs = PiecePrograms.of(shard_programs, model, batch, training=True)
        forward, like = CompiledForward.compiled(programs, layout, model, batch, compile_one, for_each)
        number, piece, segments, x, q, kv, normed, mixed, log_sums, zero = like.values()
        losses = model, number, piece, x, zero
        after = model, number, number, segments, x, q, normed, kv, mixed, log_sums, x, zero
        last, *_ = jax.eval_shape(programs.losses_back, *losses)
        of_after, _, _, d_normed, _ = jax.eval_shape(programs.after_back, *after)
        half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((x.shape[0], *leaf.shape[1:]), np.float32), kv)
        before = model, number, number, piece.positions, x, x, q, half, d_normed
        of_before, _ = jax.eval_shape(programs.before_back, *before)
        first = jax.eval_shape(programs.embed_back, model, number, piece, x)
        sums = {LAST: last, FIRST: first, BEFORE: [of_before] * programs.layers, AFTER: [of_after] * programs.layers}
        named = jax.eval_shape(lambda sums: programs.named(sums, model.params), sums)
        packed = hasattr(batch, "tokens")
        totals = Totals.of(
            shard_programs,
            state.params,
            named,
            layout=layout,
            join=lambda sums, model, counts: programs.joined(sums, model, is_packed=packed),
            weight=lambda sums: sums[LAST][1][1],
            batch=batch,
        )

        def join_sums(sums: dict[str, Any]) -> Packed:
            return totals.pack(programs.named(sums, model.params))

        total = jax.eval_shape(join_sums, sums)
        exchange, update = totals.compiled(total, state, hparams, {}, compile_one, for_each)
        adds: dict[str, Programs] = {}
        if layout.most > 1:
            for use, each in ((LAST, last), (FIRST, first), (BEFORE, of_before), (AFTER, of_after)):
                adds[use] = for_each(jax.jit(add_sums, donate_argnums=0), (each, each), devices)
        return cls(
            layout=layout,
            forward=forward,
            losses_back=for_each(jax.jit(programs.losses_back), losses, devices),
            after_back=for_each(jax.jit(programs.after_back), after, devices),
            before_back=for_each(jax.jit(programs.before_back), before, devices),
            embed_back=for_each(jax.jit(programs.embed_back), (model, number, piece, x), devices),
            adds=adds,
            join=for_each(jax.jit(join_sums), (sums,), devices),
            exchange=exchange,
            update=update,
        )

    def _trees(self, use: str) -> list[Tree]:
        adds = self.adds.get(use, [add_sums] * len(self.layout.devices))
        firsts = [self.layout.shards_of(device).start for device in self.layout.devices]
        return [Tree(add, first) for add, first in zip(adds, firsts, strict=True)]

    def totals(self, models: list[Model], batch: Any) -> tuple[list[Packed], list[Leaves]]:
        """(the packed sums of all shards, no counts: the update knows them), by device of this process."""
        run, number = self.forward, self.forward.numbers
        pieces = run.cut(batch)
        kept, out = run.run(models, pieces, keep=True)
        trees = self._trees(LAST)

        def losses(i: int, k: int) -> Any:
            sums, d_x, d_balance = self.losses_back[i](models[i], number[i][k], pieces[i][k][0], *out[i][k])
            trees[i].put(sums)
            return d_x, d_balance

        d_out = run.each(losses)
        d_x, d_balance = _field(d_out, 0), _field(d_out, 1)
        sums: list[dict[str, Any]] = [{LAST: tree.sums(), BEFORE: [], AFTER: []} for tree in trees]
        for layer in reversed(range(len(kept))):
            at = [own[layer] for own in run.layers]
            of_layer = kept.pop()
            d_x = self._back(models, pieces, of_layer, at, d_x, d_balance, sums)
        trees = self._trees(FIRST)
        run.each(lambda i, k: trees[i].put(self.embed_back[i](models[i], number[i][k], pieces[i][k][0], d_x[i][k])))
        own = [
            [
                join({LAST: last, FIRST: first, BEFORE: [*before[::-1]], AFTER: [*after[::-1]]})
                for last, first, before, after in zip(
                    each[LAST],
                    tree.sums(),
                    zip(*each[BEFORE], strict=True),
                    zip(*each[AFTER], strict=True),
                    strict=True,
                )
            ]
            for join, each, tree in zip(self.join, sums, trees, strict=True)
        ]
        del sums
        return self.exchange.run(own), [{} for _ in own]

    def _back(
        self,
        models: list[Model],
        pieces: ByShard,
        kept: Kept,
        at: list[Any],
        d_x: ByShard,
        d_balance: ByShard,
        sums: list[dict[str, Any]],
    ) -> ByShard:
        """The gradient of a layer's input, from that of its output; those of its parameters are put to the `sums`, of
        each subtree of a device's shards."""
        run, number = self.forward, self.forward.numbers
        x, q, kv, normed, mixed, log_sums = kept
        rows, trees = run.moves.keys_of_rows(kv), self._trees(AFTER)
        found: ByShard = [[] for _ in models]

        def after(i: int, k: int) -> Any:
            grads, *of_inputs, d_kv = self.after_back[i](
                models[i],
                number[i][k],
                at[i],
                pieces[i][k][1],
                x[i][k],
                q[i][k],
                normed[i][k],
                rows[i][k],
                mixed[i][k],
                log_sums[i][k],
                d_x[i][k],
                d_balance[i][k],
            )
            trees[i].put(grads)
            found[i].append(of_inputs)
            return d_kv

        d_kv = run.moves.sums(after)
        others = self._trees(BEFORE)

        def before(i: int, k: int) -> Any:
            d_x, d_q, d_normed = found[i][k]
            grads, d_x = self.before_back[i](
                models[i], number[i][k], at[i], pieces[i][k][0].positions, x[i][k], d_x, d_q, d_kv[i][k], d_normed
            )
            others[i].put(grads)
            return d_x

        d_x = run.each(before)
        for own, tree, other in zip(sums, trees, others, strict=True):
            own[AFTER].append(tree.sums())
            own[BEFORE].append(other.sums())
        return d_x


@dataclass(frozen=True)
class CompiledLongEvaluation:
    """(models, batch) -> the packed sums of the losses of all shards, on each device."""

    forward: CompiledForward
    losses: Programs
    reduction: Reduction

    @classmethod
    def compiled(
        cls,
        shard_programs: ShardPrograms,
        layout: Layout,
        model: Model,
        batch: Any,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "CompiledLongEvaluation":
        """The programs for such (abstract) arguments."""
        programs = PiecePrograms.of(shard_programs, model, batch, training=False)
        forward, like = CompiledForward.compiled(programs, layout, model, batch, compile_one, for_each)
        args = model, like["number"], like["piece"], like["x"], like["balance"]
        total = jax.eval_shape(programs.losses, *args)
        losses = for_each(jax.jit(programs.losses), args, layout.devices)
        exchange = Exchange.compiled(layout, total, total, compile_one, for_each)
        return cls(forward, losses, Reduction.compiled(layout, total, exchange, for_each))

    def __call__(self, models: list[Model], batch: Any) -> list[Packed]:
        """The sums."""
        run = self.forward
        pieces = run.cut(batch)
        _, out = run.run(models, pieces, keep=False)
        return self.reduction.run(
            lambda i, k: self.losses[i](models[i], run.numbers[i][k], pieces[i][k][0], *out[i][k])
        )
