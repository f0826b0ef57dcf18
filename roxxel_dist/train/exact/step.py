"""A training step and an evaluation that give the same bits on any number of devices.

Every number is made by programs of one device, the same ones on each; nothing but a binary tree of additions over the
virtual shards goes across (see `reduction.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.parameter_sharding import fsdp_axis
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.train.exact.blocks.block_update import BlockUpdate
from roxxel_dist.train.exact.blocks.blocks import block_dimensions
from roxxel_dist.train.exact.blocks.slices import Gather
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import DeviceStates, ShardLayout, copies, shapes_of
from roxxel_dist.train.exact.long_rows import CompiledLongEvaluation, CompiledLongStep
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.piece_programs import Model
from roxxel_dist.train.exact.reduction import Exchange, Programs, Reduction
from roxxel_dist.train.exact.update import Totals
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.state import TrainState, placed_state
from roxxel_dist.train.step.step import BALANCE, Hparams, Metrics


def exact_places(
    split: ModuleSplit, state: TrainState, hparams: Leaves, init_optimizer: Any, mesh: Mesh, shards: int, *, fsdp: bool
) -> tuple[TrainState, Leaves]:
    """How arrays of one device, or their shapes, lie on a mesh with virtual shards: as shapes with shardings.

    Each device has the whole or, with `fsdp`, its slices: where it can be, of as many blocks of an update (see
    `blocks.py`).
    """
    if not fsdp:
        everywhere = NamedSharding(mesh, P())
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), (state, hparams)
        )
    fits = shards % mesh.shape[fsdp_axis(mesh)] == 0
    cut = block_dimensions(split, state.params, shards) if fits else {}
    return placed_state(split, state, hparams, init_optimizer, mesh, cut)


@dataclass(frozen=True)
class RowCutter:
    """Gives each device the rows of its virtual shards."""

    layout: ShardLayout
    cut: Programs
    """Empty where each device has one."""

    @classmethod
    def compile_cutter(cls, layout: ShardLayout, batch: Any, for_each: CompileForEach) -> "tuple[RowCutter, Any]":
        """For such (abstract) batches; and the rows of a shard, as `jax.ShapeDtypeStruct`s."""

        def part(rows: int) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, leaf.shape[1]), leaf.dtype), batch)

        rows, cut = jax.tree.leaves(batch)[0].shape[0], ()
        if not layout.is_even:
            args = part(rows), jax.ShapeDtypeStruct((), np.int32)
            cut = for_each(jax.jit(rows_of_shard(rows // layout.count)), args, layout.devices)
        elif layout.most > 1:
            cut = for_each(jax.jit(cutter(layout.most)), (part(rows // layout.line.size),), layout.devices)
        return cls(layout, cut), part(rows // layout.count)

    @cached_property
    def numbers(self) -> list[list[jax.Array]]:
        """Of its shards, int32[], by device."""
        return shard_numbers(self.layout)

    def run(self, batch: Any) -> list[Sequence[Any]]:
        """The rows of each shard, by device of this process."""
        own = self.layout.rows(batch)
        if not self.cut:
            return [(rows,) for rows in own]
        if self.layout.is_even:
            return [cut(rows) for cut, rows in zip(self.cut, own, strict=True)]
        return [
            [cut(rows, number) for number in numbers]
            for cut, rows, numbers in zip(self.cut, own, self.numbers, strict=True)
        ]


def rows_of_shard(size: int) -> Callable[[Any, jax.Array], Any]:
    """Takes the `size` rows of a shard, by its number, int32[], from those of all."""

    def rows_of_shard(rows: Any, shard: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, shard * size, size), rows)

    return rows_of_shard


def cutter(count: int) -> Callable[[Any], list[Any]]:
    """Cuts rows into so many equal parts, in order; the name is the program's."""

    def cut_rows(rows: Any) -> list[Any]:
        size = jax.tree.leaves(rows)[0].shape[0] // count
        begins = range(0, size * count, size)
        return [jax.tree.map(lambda leaf, begin=begin: leaf[begin : begin + size], rows) for begin in begins]

    cut_rows.__name__ = f"cut_rows_{count}"
    return cut_rows


@dataclass
class HparamCopies:
    """The inputs of every step on each device of this process: taken apart once, as they stay the same."""

    layout: ShardLayout
    _known: tuple[Hparams, list[Hparams]] | None = field(default=None, repr=False)

    def copies_of(self, hparams: Hparams) -> list[Hparams]:
        """By device."""
        if self._known is None or self._known[0] is not hparams:
            self._known = hparams, copies(hparams, self.layout.devices)
        return self._known[1]


@dataclass(frozen=True)
class ShardedStep:
    """What `AotCompiler` makes a step of, for one shape of a batch; see `CompiledStep`."""

    programs: ShardPrograms
    layout: ShardLayout

    def compile(
        self, compile_one: Compile, for_each: CompileForEach, state: TrainState, hparams: Hparams, batch: Any
    ) -> "CompiledStep":
        """The programs for such (abstract) arguments."""
        programs, layout, batch = self.programs, self.layout, shapes_of(batch)
        gather = Gather.compile_gather(layout, Model(state.params, state.rest, hparams), compile_one)
        kind = CompiledLongStep if jax.tree.leaves(batch)[0].shape[0] < programs.shards else RowStep
        step = kind.compile_step(programs, layout, state, hparams, batch, compile_one, for_each)
        return CompiledStep(layout, gather, step, HparamCopies(layout), state)


@dataclass(frozen=True)
class CompiledStep:
    """(state, hparams, batch) -> (state, metrics), as `make_step` has it, but for `DeviceStates`.

    It takes a `TrainState` of global arrays too. The state is donated; nothing waits for the devices.
    """

    layout: ShardLayout
    gather: Gather
    """Of the `Model`."""
    step: "RowStep | CompiledLongStep"
    hparams: HparamCopies
    like: TrainState
    """The shapes of the state, with shardings."""

    def __call__(self, state: TrainState | DeviceStates, hparams: Hparams, batch: Any) -> tuple[DeviceStates, Metrics]:
        """One step."""
        parts = state.parts if isinstance(state, DeviceStates) else copies(state, self.layout.devices)
        inputs = self.hparams.copies_of(hparams)
        models = self.gather.run([Model(part.params, part.rest, own) for part, own in zip(parts, inputs, strict=True)])
        totals, counts = self.step.totals(models, batch)
        parts, metrics = self.step.update.run(parts, models, totals, counts)
        return DeviceStates(parts, self.like), metrics


@dataclass(frozen=True)
class RowSums:
    """What is computed of a virtual shard of whole rows."""

    totals: Totals
    jitted: Any
    args: tuple[Any, ...]
    """Its arguments, as shapes."""
    packed: Packed
    """The sums that it gives, as shapes."""
    counts: Leaves
    """Those of random streams, as shapes."""

    @classmethod
    def of_step(
        cls, programs: ShardPrograms, layout: ShardLayout, state: TrainState, hparams: Hparams, batch: Any
    ) -> "RowSums":
        """For such (abstract) arguments."""
        part = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // layout.count, leaf.shape[1]), leaf.dtype), batch
        )
        args = *shapes_of((state.params, state.rest, hparams)), part, jax.ShapeDtypeStruct((), np.int32)
        like, counts = jax.eval_shape(programs.sums, *args)
        totals = Totals.of_params(
            programs,
            state.params,
            like,
            layout=layout,
            join=lambda sums, model, counts: (sums, counts),
            weight=lambda sums: sums.weight,
            batch=shapes_of(batch),
        )

        def packed_sums(*args: Any) -> tuple[Packed, Leaves]:
            sums, counts = programs.sums(*args)
            return totals.pack(sums), counts

        return cls(totals, jax.jit(packed_sums), args, jax.eval_shape(packed_sums, *args)[0], counts)


@dataclass(frozen=True)
class RowStep:
    """The sums of all shards and the update, for shards of whole rows."""

    rows: RowCutter
    sums: Programs
    reduction: Reduction
    update: BlockUpdate

    @classmethod
    def compile_step(
        cls,
        programs: ShardPrograms,
        layout: ShardLayout,
        state: TrainState,
        hparams: Hparams,
        batch: Any,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "RowStep":
        """The programs for such (abstract) arguments."""
        rows, _ = RowCutter.compile_cutter(layout, batch, for_each)
        own = RowSums.of_step(programs, layout, state, hparams, batch)
        exchange, update = own.totals.compile_update(own.packed, state, hparams, own.counts, compile_one, for_each)
        return cls(
            rows=rows,
            sums=for_each(own.jitted, own.args, layout.devices),
            reduction=Reduction.compile_reduction(layout, own.packed, exchange, for_each),
            update=update,
        )

    def totals(self, models: list[Model], batch: Any) -> tuple[list[Packed], list[Leaves]]:
        """(the packed sums of all shards, the counts of random streams), by device of this process."""
        rows, counts = self.rows.run(batch), list[Leaves]({} for _ in models)

        def sums_of(i: int, k: int) -> Packed:
            total, after = self.sums[i](*models[i], rows[i][k], self.rows.numbers[i][k])
            counts[i] = counts[i] or after
            return total

        return self.reduction.run(sums_of), counts


def shard_numbers(layout: ShardLayout) -> list[list[jax.Array]]:
    """The number of each shard, int32[], by device of this process."""
    return [
        [jax.device_put(np.int32(number), device) for number in layout.shards_of(device)] for device in layout.devices
    ]


@dataclass(frozen=True)
class ShardedEvaluation:
    """What `AotCompiler` makes an evaluation of, for one shape of a batch; see `CompiledEvaluation`."""

    programs: ShardPrograms
    layout: ShardLayout

    def compile(
        self,
        compile_one: Compile,
        for_each: CompileForEach,
        params: Leaves,
        rest: Leaves,
        hparams: Hparams,
        batch: Any,
    ) -> "CompiledEvaluation":
        """The programs for such (abstract) arguments."""
        layout, programs = self.layout, self.programs
        gather = Gather.compile_gather(layout, Model(params, rest, hparams), compile_one)
        params, rest, hparams, batch = shapes_of((params, rest, hparams, batch))
        if jax.tree.leaves(batch)[0].shape[0] < programs.shards:
            model = Model(params, rest, hparams)
            losses = CompiledLongEvaluation.compile_losses(programs, layout, model, batch, compile_one, for_each)
            exchange = losses.reduction.exchange
            others = exchange.like["float32"].shape[1] - 2 - (programs.end is not None)
            names = [BALANCE][:others]  # no loss of the user's own is cut so
        else:
            rows, part = RowCutter.compile_cutter(layout, batch, for_each)
            args = params, rest, hparams, part
            total, names = jax.eval_shape(programs.losses, *args), programs.scalar_names(*args)
            exchange = Exchange.compile_exchange(layout, total, total, compile_one, for_each)
            reduction = Reduction.compile_reduction(layout, total, exchange, for_each)
            losses = RowEvaluation(rows, for_each(jax.jit(programs.losses), args, layout.devices), reduction)

        def mean_losses(total: Packed) -> dict[str, jax.Array]:
            return programs.mean_losses(exchange.unpack(total), names)

        mean = for_each(jax.jit(mean_losses), (exchange.kept,), layout.devices[:1])[0]
        return CompiledEvaluation(layout, gather, losses, mean, HparamCopies(layout))


@dataclass(frozen=True)
class CompiledEvaluation:
    """(params, rest, hparams, batch) -> losses, as `make_eval_step` has it, on the first device of this process."""

    layout: ShardLayout
    gather: Gather
    losses: "RowEvaluation | CompiledLongEvaluation"
    mean: Any
    hparams: HparamCopies

    def __call__(self, params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> dict[str, jax.Array]:
        """The losses of a batch."""
        parts, inputs = copies((params, rest), self.layout.devices), self.hparams.copies_of(hparams)
        models = self.gather.run([Model(part[0], part[1], own) for part, own in zip(parts, inputs, strict=True)])
        return self.mean(self.losses(models, batch)[0])


@dataclass(frozen=True)
class RowEvaluation:
    """(models, batch) -> the packed sums of the losses of all shards, on each device, for shards of whole rows."""

    rows: RowCutter
    losses: Programs
    reduction: Reduction

    def __call__(self, models: list[Model], batch: Any) -> list[Packed]:
        """The sums."""
        rows = self.rows.run(batch)
        return self.reduction.run(lambda i, k: self.losses[i](*models[i], rows[i][k]))
