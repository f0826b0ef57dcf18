"""Steps and evaluations of batches with fewer rows than virtual shards: each shard is a part of a row.

As with many rows, every number is made by programs of one device, the same ones on each. Across devices go the tree of
additions, and copies of keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.model.mlp import Balance
from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_programs import BlockPrograms
from roxxel_dist.train.exact.block_update import BlockUpdate, copies
from roxxel_dist.train.exact.compiled_step import Exchange, Reduction, SumTree, add_sums
from roxxel_dist.train.exact.gradient import Model, Packed, ShardPrograms
from roxxel_dist.train.exact.key_moves import ByShard, KeyMoves
from roxxel_dist.train.exact.layout import Programs, ShardLayout, rows_like, shapes_of
from roxxel_dist.train.exact.piece_programs import AFTER, BEFORE, FIRST, LAST, Kept, Piece, PiecePrograms, split_tokens
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams

NUMBER, ZERO = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.float32)
"""Of a shard or a layer, and of the gradient of the balance of experts."""


@dataclass(frozen=True)
class LongShapes:
    """The shapes of one shard."""

    programs: PiecePrograms
    model: Model
    rows: Any
    """The rows of a device."""
    piece: Piece
    segments: Any
    kept: Kept
    """Of a block, with keys and values of the shard."""
    kv: Any
    """Those of its row."""

    @classmethod
    def of_batch(cls, programs: PiecePrograms, layout: ShardLayout, model: Model, batch: Any) -> "LongShapes":
        """The shapes for an (abstract) model and batch."""
        cut, here = programs.cut, programs.rows
        if layout.is_even:
            here = max(1, here // layout.line.size)
        rows = rows_like(batch, here)
        piece, segments = jax.eval_shape(lambda rows, shard: piece_of(cut, rows, shard), rows, NUMBER)
        x = jax.eval_shape(programs.embed, model, NUMBER, piece)
        q, k, v, normed = jax.eval_shape(programs.before, model, NUMBER, NUMBER, piece.positions, x)
        own = cls(programs, model, rows, piece, segments, Kept(x, q, normed, (k, v)), rows_like((k, v), cut.row_blocks))
        _, _, mixed, log_sums = jax.eval_shape(programs.after, *own.after)
        return replace(own, kept=own.kept._replace(mixed=mixed, log_sums=log_sums))

    @property
    def before(self) -> tuple[Any, ...]:
        """The arguments of that program; so the next ones."""
        return self.model, NUMBER, NUMBER, self.piece.positions, self.kept.x

    @property
    def after(self) -> tuple[Any, ...]:
        """The arguments of a block after its attention."""
        kept = self.kept._replace(kv=self.kv, mixed=None, log_sums=None)
        return self.model, NUMBER, NUMBER, self.segments, kept, self.programs.balance

    @property
    def losses(self) -> tuple[Any, ...]:
        """The arguments of the losses, forward and backward."""
        return self.model, NUMBER, self.piece, self.kept.x, self.programs.balance

    @property
    def after_back(self) -> tuple[Any, ...]:
        """The arguments of a block after its attention, backward."""
        return self.model, NUMBER, NUMBER, self.segments, self.kept._replace(kv=self.kv), self.kept.x, ZERO

    @cached_property
    def _of_after_back(self) -> tuple[Any, ...]:
        """What that program gives."""
        return jax.eval_shape(self.programs.after_back, *self.after_back)

    @cached_property
    def before_back(self) -> tuple[Any, ...]:
        """The arguments of a block before its attention, backward."""
        *_, d_normed, _ = self._of_after_back
        half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.kept.kv)
        return *self.before, self.kept.x, self.kept.q, half, d_normed

    @property
    def embed_back(self) -> tuple[Any, ...]:
        """The arguments of the embedding, backward."""
        return self.model, NUMBER, self.piece, self.kept.x

    @cached_property
    def sums(self) -> dict[str, Packed]:
        """The packed gradients of each use of parameters, of one layer where it is of a block."""
        programs = self.programs
        return {
            LAST: jax.eval_shape(programs.losses_back, *self.losses)[0],
            FIRST: jax.eval_shape(programs.embed_back, *self.embed_back),
            BEFORE: jax.eval_shape(programs.before_back, *self.before_back)[0],
            AFTER: self._of_after_back[0],
        }


@dataclass(frozen=True)
class LongSums:
    """How the sums of shards become totals."""

    shapes: LongShapes
    update: BlockPrograms
    jitted: Any
    """Packs the sums of all uses, those of blocks by layer."""
    args: tuple[Any, ...]
    packed: Packed

    @classmethod
    def of_step(
        cls, shard_programs: ShardPrograms, layout: ShardLayout, state: TrainState, hparams: Hparams, batch: Any
    ) -> "LongSums":
        """The sums of a step for such (abstract) arguments."""
        model = Model(*shapes_of((state.params, state.rest, hparams)))
        programs = PiecePrograms.of_model(shard_programs, model, batch, training=True)
        shapes = LongShapes.of_batch(programs, layout, model, batch)
        sums = shapes.sums | {use: [shapes.sums[use]] * programs.layers for use in (BEFORE, AFTER)}
        named = jax.eval_shape(lambda sums: programs.sums_by_name(sums, model.params), sums)
        is_packed = hasattr(batch, "tokens")
        update = BlockPrograms.of_params(
            shard_programs,
            state.params,
            named,
            layout=layout,
            join=lambda sums, model, counts: programs.join_uses(sums, model, is_packed=is_packed),
            weight=lambda sums: sums[LAST][1][1],
            batch=batch,
        )

        def join_sums(sums: dict[str, Any]) -> Packed:
            return update.sums.pack(programs.sums_by_name(sums, model.params))

        return cls(shapes, update, jax.jit(join_sums), (sums,), jax.eval_shape(join_sums, sums))


def piece_of(cut: RowCut, batch: Any, shard: jax.Array) -> tuple[Piece, jax.Array | None]:
    """(the piece, int32[M, C] the segments of its row) of a shard.

    `batch` has the rows of a device: a part of all that lies on a multiple of their number, or all.
    """
    packed = hasattr(batch, "tokens")
    here, numbers = jax.tree.leaves(batch)[0].shape[0], cut.numbers(shard)
    row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, shard // cut.parts % here, keepdims=False), batch)
    tokens, segments, positions = row if packed else (row, None, None)
    inputs, targets = tokens[:-1], tokens[1:]
    counted = jnp.ones(targets.shape, bool) if segments is None else segments[1:] == segments[:-1]
    places = jnp.arange(inputs.shape[0]) if positions is None else positions[:-1]
    split = partial(split_tokens, cut)
    # Padding counts nothing, and no token before it attends to it.
    piece = Piece(split(inputs), split(targets), split(counted, repeat=False), split(places))
    return Piece(*(each[numbers] for each in piece)), None if segments is None else split(segments[:-1])


@dataclass(frozen=True)
class CompiledForward:
    """The forward pass up to the losses."""

    layout: ShardLayout
    moves: KeyMoves
    pieces: Programs
    embed: Programs
    before: Programs
    after: Programs
    depth: int
    """Layers."""
    balance: Balance
    """Its shapes."""

    @cached_property
    def layers(self) -> ByShard:
        """int32[], the number of each layer on each device."""
        return [
            [jax.device_put(np.int32(layer), device) for layer in range(self.depth)] for device in self.layout.devices
        ]

    @cached_property
    def zeros(self) -> list[Balance]:
        """The balance below the first layer, on each device."""
        zero = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.balance)
        return [jax.device_put(zero, device) for device in self.layout.devices]

    @classmethod
    def compile_forward(cls, shapes: LongShapes, layout: ShardLayout, compiler: Compiler) -> "CompiledForward":
        """The programs for such (abstract) arguments."""
        programs, devices = shapes.programs, layout.devices

        def cut_piece(rows: Any, shard: jax.Array) -> Any:
            return piece_of(programs.cut, rows, shard)

        return cls(
            layout=layout,
            moves=KeyMoves.compile_moves(layout, programs.cut, shapes.kept.kv, compiler),
            pieces=compiler.each(jax.jit(cut_piece), (shapes.rows, NUMBER), devices),
            embed=compiler.each(jax.jit(programs.embed), (shapes.model, NUMBER, shapes.piece), devices),
            before=compiler.each(jax.jit(programs.before), shapes.before, devices),
            after=compiler.each(jax.jit(programs.after), shapes.after, devices),
            depth=programs.layers,
            balance=programs.balance,
        )

    def each(self, compute: Callable[[int, int], Any]) -> ByShard:
        """What a function gives of each device and shard."""
        found: ByShard = [[] for _ in self.layout.devices]
        for i, k in self.layout.turns:
            found[i].append(compute(i, k))
        return found

    def cut(self, batch: Any) -> ByShard:
        """(piece, segments of its row) of each shard."""
        rows = copies(batch, self.layout.devices)
        number = self.layout.numbers
        return self.each(lambda i, k: self.pieces[i](rows[i], number[i][k]))

    def run(self, models: list[Model], pieces: ByShard, *, keep: bool) -> tuple[list[ByShard], ByShard]:
        """(what is kept of each layer and shard, (the output of the last block, the balance) of each shard)."""
        kept, number = list[ByShard](), self.layout.numbers
        x = self.each(lambda i, k: self.embed[i](models[i], number[i][k], pieces[i][k][0]))
        balance = self.each(lambda i, _: self.zeros[i])
        for layer in range(self.depth):
            of_layer, x, balance = self._block(models, pieces, layer, x, balance)
            if keep:
                kept.append(of_layer)
        return kept, [list(zip(*both, strict=True)) for both in zip(x, balance, strict=True)]

    def _block(
        self, models: list[Model], pieces: ByShard, layer: int, x: ByShard, balance: ByShard
    ) -> tuple[ByShard, ByShard, ByShard]:
        """(the `Kept` of a block, its output, the balance up to there), of each shard."""
        at, number = [own[layer] for own in self.layers], self.layout.numbers

        def before(i: int, k: int) -> Kept:
            q, keys, values, normed = self.before[i](models[i], number[i][k], at[i], pieces[i][k][0].positions, x[i][k])
            return Kept(x[i][k], q, normed, (keys, values))

        kept = self.each(before)
        rows = self.moves.keys_of_rows(_keys(kept))

        def after(i: int, k: int) -> Any:
            of_row = kept[i][k]._replace(kv=rows[i][k])
            return self.after[i](models[i], number[i][k], at[i], pieces[i][k][1], of_row, balance[i][k])

        out = self.each(after)
        kept = self.each(lambda i, k: kept[i][k]._replace(mixed=out[i][k][2], log_sums=out[i][k][3]))
        return kept, _field(out, 0), _field(out, 1)


def _field(of_shards: ByShard, number: int) -> ByShard:
    return [[part[number] for part in own] for own in of_shards]


def _keys(kept: ByShard) -> ByShard:
    return [[part.kv for part in own] for own in kept]


@dataclass(frozen=True)
class CompiledLongStep:
    """The sums of all shards and the update, for shards of parts of rows: see `step.CompiledStep`."""

    layout: ShardLayout
    forward: CompiledForward
    losses_back: Programs
    after_back: Programs
    before_back: Programs
    embed_back: Programs
    adds: dict[str, Programs]
    """Of packed gradients of each use of parameters."""
    join: Programs
    exchange: Exchange
    update: BlockUpdate

    @classmethod
    def compile_step(
        cls,
        shard_programs: ShardPrograms,
        layout: ShardLayout,
        state: TrainState,
        hparams: Hparams,
        batch: Any,
        compiler: Compiler,
    ) -> "CompiledLongStep":
        """The programs for such (abstract) arguments."""
        devices, own = layout.devices, LongSums.of_step(shard_programs, layout, state, hparams, batch)
        shapes, programs = own.shapes, own.shapes.programs
        forward = CompiledForward.compile_forward(shapes, layout, compiler)
        exchange, update = own.update.compile_update(own.packed, state, hparams, {}, compiler)
        adds: dict[str, Programs] = {}
        if layout.most > 1:
            for use, each in shapes.sums.items():
                adds[use] = compiler.each(jax.jit(add_sums, donate_argnums=0), (each, each), devices)
        return cls(
            layout=layout,
            forward=forward,
            losses_back=compiler.each(jax.jit(programs.losses_back), shapes.losses, devices),
            after_back=compiler.each(jax.jit(programs.after_back), shapes.after_back, devices),
            before_back=compiler.each(jax.jit(programs.before_back), shapes.before_back, devices),
            embed_back=compiler.each(jax.jit(programs.embed_back), shapes.embed_back, devices),
            adds=adds,
            join=compiler.each(own.jitted, own.args, devices),
            exchange=exchange,
            update=update,
        )

    def _trees(self, use: str) -> list[SumTree]:
        adds = self.adds.get(use, [add_sums] * len(self.layout.devices))
        return [SumTree(add, own.start) for add, own in zip(adds, self.layout.owned, strict=True)]

    def totals(self, models: list[Model], batch: Any) -> tuple[list[Packed], list[Leaves]]:
        """(the packed sums of all shards, no counts: the update knows them), by device of this process."""
        run, number = self.forward, self.layout.numbers
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
        kept: ByShard,
        at: list[Any],
        d_x: ByShard,
        d_balance: ByShard,
        sums: list[dict[str, Any]],
    ) -> ByShard:
        """The gradient of a layer's input, from that of its output; those of its parameters are put to the `sums`, of
        each subtree of a device's shards."""
        run, number = self.forward, self.layout.numbers
        rows, trees = run.moves.keys_of_rows(_keys(kept)), self._trees(AFTER)
        found: ByShard = [[] for _ in models]

        def after(i: int, k: int) -> Any:
            of_row = kept[i][k]._replace(kv=rows[i][k])
            grads, *of_inputs, d_kv = self.after_back[i](
                models[i], number[i][k], at[i], pieces[i][k][1], of_row, d_x[i][k], d_balance[i][k]
            )
            trees[i].put(grads)
            found[i].append(of_inputs)
            return d_kv

        d_kv = run.moves.sums(after)
        others = self._trees(BEFORE)

        def before(i: int, k: int) -> Any:
            d_x, d_q, d_normed = found[i][k]
            x, positions = kept[i][k].x, pieces[i][k][0].positions
            grads, d_x = self.before_back[i](
                models[i], number[i][k], at[i], positions, x, d_x, d_q, d_kv[i][k], d_normed
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
    def compile_losses(
        cls, shard_programs: ShardPrograms, layout: ShardLayout, model: Model, batch: Any, compiler: Compiler
    ) -> "CompiledLongEvaluation":
        """The programs for such (abstract) arguments."""
        programs = PiecePrograms.of_model(shard_programs, model, batch, training=False)
        shapes = LongShapes.of_batch(programs, layout, model, batch)
        forward = CompiledForward.compile_forward(shapes, layout, compiler)
        total = jax.eval_shape(programs.losses, *shapes.losses)
        losses = compiler.each(jax.jit(programs.losses), shapes.losses, layout.devices)
        exchange = Exchange.compile_exchange(layout, total, total, compiler)
        return cls(forward, losses, Reduction.compile_reduction(layout, total, exchange, compiler))

    def __call__(self, models: list[Model], batch: Any) -> list[Packed]:
        """The sums."""
        run, number = self.forward, self.forward.layout.numbers
        pieces = run.cut(batch)
        _, out = run.run(models, pieces, keep=False)
        return self.reduction.run(lambda i, k: self.losses[i](models[i], number[i][k], pieces[i][k][0], *out[i][k]))
