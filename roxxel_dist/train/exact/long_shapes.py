"""The shapes of what a virtual shard that is a part of a row has, takes and gives: see `long_rows.py`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.train.exact.block_programs import BlockPrograms
from roxxel_dist.train.exact.gradient import Model, Packed, ShardPrograms
from roxxel_dist.train.exact.layout import ShardLayout, rows_like, shapes_of
from roxxel_dist.train.exact.piece_programs import AFTER, BEFORE, FIRST, LAST, Kept, Piece, PiecePrograms, split_tokens
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
    join: Callable[[dict[str, Any]], Packed]
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

        return cls(shapes, update, join_sums, (sums,), jax.eval_shape(join_sums, sums))


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
