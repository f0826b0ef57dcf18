"""Steps and evaluations of batches with fewer rows than virtual shards: each row is cut into pieces of its tokens.

The sums of all shards come from one program over all devices (`model/pieces.py` says why its bits do not depend on
them), and what follows from them from programs of one device, as with many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.pieces import PIECES, PieceLayout, Pieces, piece_losses, tree_sum
from roxxel_dist.train.train_state import Leaves
from roxxel_dist.train.train_step import BALANCE, Hparams, divisor
from roxxel_dist.train.virtual_shards.gradient import ShardPrograms, Sums, random_counts
from roxxel_dist.train.virtual_shards.layout import Layout, copies
from roxxel_dist.train.virtual_shards.packing import Packed, add_across, pack, unpack, wide

ROWS = "rows"
"""The axis of the groups of devices that have the same rows."""
TIED = "embedding.embedding"
"""The parameter that a model with tied weights uses twice. Each use has a tree of sums of its own."""


@dataclass(frozen=True)
class LongRows:
    """Sums of a batch whose rows are cut into pieces, and which arrays its programs take."""

    programs: ShardPrograms
    layout: Layout
    rows: int
    """Of the batch."""

    @property
    def grid(self) -> Mesh:
        """The devices of `Layout.line`, those that share a row along `PIECES`."""
        devices = self.layout.line.devices
        groups = min(self.rows, devices.size)
        return Mesh(devices.reshape(groups, -1), (ROWS, PIECES), axis_types=(AxisType.Auto,) * 2)

    def joined(self, parts: Sequence[Any], like: Any) -> Any:
        """What lies on each device of this process as global arrays, of such shapes and shardings."""
        return jax.tree.map(
            lambda leaf, *each: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(each)),
            like,
            *parts,
        )

    def sums(self) -> Any:
        """(params, rest, hparams, batch) -> (the packed sums of all shards, the counts of random streams), jitted."""
        return self._mapped(self._packed_sums)

    def losses(self) -> Any:
        """(params, rest, hparams, batch) -> what `ShardPrograms.losses` gives, of all shards; jitted."""
        return self._mapped(self._losses)

    def like(self, params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> tuple[Any, ...]:
        """The shapes and shardings of such arguments."""
        everywhere, by_row = (NamedSharding(self.grid, spec) for spec in (P(), P(ROWS)))

        def placed(tree: Any, place: NamedSharding) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

        return *placed((params, rest, hparams), everywhere), placed(batch, by_row)

    def shapes(self, program: Any, *args: Any) -> Any:
        """The shapes of what a program gives for such arguments."""
        with jax.set_mesh(self.grid):
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), jax.eval_shape(program, *args)
            )

    def sums_like(self, *args: Any) -> Sums:
        """The shapes of the sums."""
        return self.shapes(self._mapped(self._sums), *args)[0]

    def _mapped(self, local: Any) -> Any:
        specs = P(), P(), P(), P(ROWS)
        return jax.jit(jax.shard_map(local, mesh=self.grid, in_specs=specs, out_specs=P(), check_vma=False))

    def _packed_sums(self, *args: Any) -> tuple[Packed, Leaves]:
        sums, counts = self._sums(*args)
        return pack(sums), counts

    def _sums(self, params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> tuple[Sums, Leaves]:
        """(the sums of all shards, the counts of random streams after them), from the rows of this device."""
        split = self.programs.split
        config = split.merge(params, rest, hparams, training=True).config

        def minimized(uses: tuple[Leaves, Leaves], rest: Leaves) -> tuple[jax.Array, Any]:
            model, found = self._measured(*uses, rest, hparams, batch, self._cast_of(params), training=True)
            after = split.rest_of(model)
            counts = {name: after[name] for name in sorted(random_counts(split)) if after[name] is not rest[name]}
            loss_P, _, balance_P = found
            return tree_sum(loss_P) + tree_sum(balance_P), (counts, found)

        # In the type of their sums: what a piece uses is cast where it is used.
        first = {name: leaf.astype(wide(leaf.dtype)) for name, leaf in params.items()}
        again = {TIED: first[TIED]} if config.weight_tying and TIED in first else {}
        grads, (counts, found) = jax.grad(minimized, has_aux=True)((first, again), rest)
        local = grads, self._of_rows(found), tuple(map(tree_sum, found))
        (grads, more), (row_loss, row_count), (loss, count, balance) = self._across(local)
        grads = {name: grad + more[name] if name in more else grad for name, grad in grads.items()}
        if self.programs.loss_fn is next_token_loss:
            return Sums(grads, loss + balance, count, {}, None, None, {}), counts
        scalars = {BALANCE: balance} if config.use_moe else {}
        row_weight = row_count if is_packed(batch) else None
        return Sums(grads, loss, count, scalars, row_loss / divisor(row_count), row_weight, {}), counts

    def _losses(self, params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> Packed:
        model, found = self._measured(params, {}, rest, hparams, batch, self._cast_of(params), training=False)
        loss, count, balance = self._across(tuple(map(tree_sum, found)))
        if self.programs.loss_fn is next_token_loss:
            return pack((loss + balance, count))
        return pack((loss, count, balance) if model.config.use_moe else (loss, count))

    def _cast_of(self, params: Leaves) -> dict[str, Any]:
        """What pieces cast parameters to, for `Pieces`."""
        if self.programs.compute_dtype is not None:
            return {"compute_dtype": self.programs.compute_dtype, "uncast": True}
        stored = {leaf.dtype for leaf in params.values()}
        narrow = stored.pop() if len(stored) == 1 else None
        return {"compute_dtype": None if narrow is None or narrow == wide(narrow) else narrow}

    def _measured(
        self, params: Leaves, again: Leaves, rest: Leaves, hparams: Hparams, batch: Any, cast: Any, *, training: bool
    ) -> tuple[Any, Any]:
        """(the model after it was called, what `piece_losses` gives) on this device; `again` is for its output."""
        split = self.programs.split
        model = split.merge(params, rest, hparams, training=training)
        other = split.merge({**params, **again}, rest, hparams, training=training) if again else model
        tokens, segments, positions = batch if is_packed(batch) else (batch, None, None)
        length = tokens.shape[1] - 1
        counted = jnp.ones(tokens[:, 1:].shape, bool) if segments is None else segments[:, 1:] == segments[:, :-1]
        layout = PieceLayout.of(self.rows, self.grid.size, self.programs.shards, length, model.config.window)
        pieces = Pieces(
            layout=layout, first_row=jax.lax.axis_index(ROWS) * layout.rows, length=length,
            segments_RxL=None if segments is None else segments[:, :-1],
            positions_RxL=None if positions is None else positions[:, :-1], **cast,
        )  # fmt: skip
        return model, piece_losses(model, other.output, pieces, tokens[:, :-1], tokens[:, 1:], counted)

    def _of_rows(self, found: Any) -> tuple[jax.Array, jax.Array]:
        """float32[rows of the batch] each: the sums of the losses of this device's rows, and their counts."""
        loss_P, count_P, _ = found
        rows = self.rows // self.grid.shape[ROWS]

        def placed(values_P: jax.Array) -> jax.Array:
            own_R = tree_sum(values_P.reshape(rows, -1).T)
            return jax.lax.dynamic_update_slice(jnp.zeros(self.rows), own_R, (jax.lax.axis_index(ROWS) * rows,))

        return placed(loss_P), placed(count_P)

    def _across(self, local: Any) -> Any:
        """The sums over all devices of a tree: pieces of a row first, as where they lie on one device."""
        packed = pack(local)
        for axis in (PIECES, ROWS):
            packed = add_across(packed, axis)
        return unpack(packed, local)


def is_packed(batch: Any) -> bool:
    """Whether rows have several documents."""
    return hasattr(batch, "tokens")


@dataclass(frozen=True)
class LongCopies:
    """Arrays on each device of this process as the global ones that a program of `LongRows` takes; none is copied."""

    rows: LongRows
    like: Any
    """Parameters, rest, hparams and batch: shapes and shardings."""

    def of(self, parts: Sequence[tuple[Any, Any, Any]], batch: Any) -> list[Any]:
        """The arguments, from the parameters, the rest and the hparams by device."""
        layout, state = self.rows.layout, self.like[:3]
        return [*self.rows.joined(parts, state), self.rows.joined(copies(batch, layout.devices), self.like[3])]
