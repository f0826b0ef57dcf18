"""A training step and an evaluation that give the same bits on any number of devices.

Every number is made by programs of one device, the same ones on each; nothing but a binary tree of additions over the
virtual shards goes across (see `compiled_step.py`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.parameter_sharding import fsdp_axis
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.train.exact.block_programs import BlockPrograms
from roxxel_dist.train.exact.block_update import Gather, copies
from roxxel_dist.train.exact.blocks import block_dimensions
from roxxel_dist.train.exact.compiled_step import CompiledStep, Exchange, HparamCopies, Reduction, RowCutter, RowStep
from roxxel_dist.train.exact.gradient import Model, Packed, ShardPrograms
from roxxel_dist.train.exact.layout import Programs, ShardLayout, rows_like, shapes_of
from roxxel_dist.train.exact.long_rows import CompiledLongEvaluation, CompiledLongStep
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.state import TrainState, placed_state
from roxxel_dist.train.step.step import BALANCE, Hparams


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
class ShardedStep:
    """What `AotCompiler` makes a step of, for one shape of a batch; see `CompiledStep`."""

    programs: ShardPrograms
    layout: ShardLayout

    def compile(self, compiler: Compiler, state: TrainState, hparams: Hparams, batch: Any) -> "CompiledStep":
        """The programs for such (abstract) arguments."""
        programs, layout, batch = self.programs, self.layout, shapes_of(batch)
        gather = Gather.compile_gather(layout, Model(state.params, state.rest, hparams), compiler)
        if jax.tree.leaves(batch)[0].shape[0] < programs.shards:
            step = CompiledLongStep.compile_step(programs, layout, state, hparams, batch, compiler)
        else:
            rows, _ = RowCutter.compile_cutter(layout, batch, compiler)
            own = RowSums.of_step(programs, layout, state, hparams, batch)
            exchange, update = own.update.compile_update(own.packed, state, hparams, own.counts, compiler)
            sums = compiler.each(own.jitted, own.args, layout.devices)
            step = RowStep(rows, sums, Reduction.compile_reduction(layout, own.packed, exchange, compiler), update)
        return CompiledStep(layout, gather, step, HparamCopies(layout), state)


@dataclass(frozen=True)
class RowSums:
    """What is computed of a virtual shard of whole rows."""

    update: BlockPrograms
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
        """The sums of a step for such (abstract) arguments."""
        part = rows_like(batch, jax.tree.leaves(batch)[0].shape[0] // layout.count)
        args = *shapes_of((state.params, state.rest, hparams)), part, jax.ShapeDtypeStruct((), np.int32)
        like, counts = jax.eval_shape(programs.sums, *args)
        update = BlockPrograms.of_params(
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
            return update.sums.pack(sums), counts

        return cls(update, jax.jit(packed_sums), args, jax.eval_shape(packed_sums, *args)[0], counts)


@dataclass(frozen=True)
class ShardedEvaluation:
    """What `AotCompiler` makes an evaluation of, for one shape of a batch; see `CompiledEvaluation`."""

    programs: ShardPrograms
    layout: ShardLayout

    def compile(
        self, compiler: Compiler, params: Leaves, rest: Leaves, hparams: Hparams, batch: Any
    ) -> "CompiledEvaluation":
        """The programs for such (abstract) arguments."""
        layout, programs = self.layout, self.programs
        gather = Gather.compile_gather(layout, Model(params, rest, hparams), compiler)
        params, rest, hparams, batch = shapes_of((params, rest, hparams, batch))
        if jax.tree.leaves(batch)[0].shape[0] < programs.shards:
            model = Model(params, rest, hparams)
            losses = CompiledLongEvaluation.compile_losses(programs, layout, model, batch, compiler)
            exchange = losses.reduction.exchange
            others = exchange.like["float32"].shape[1] - 2 - (programs.end is not None)
            names = [BALANCE][:others]  # no loss of the user's own is cut so
        else:
            rows, part = RowCutter.compile_cutter(layout, batch, compiler)
            args = params, rest, hparams, part
            total, names = jax.eval_shape(programs.losses, *args), programs.scalar_names(*args)
            exchange = Exchange.compile_exchange(layout, total, total, compiler)
            reduction = Reduction.compile_reduction(layout, total, exchange, compiler)
            losses = RowEvaluation(rows, compiler.each(jax.jit(programs.losses), args, layout.devices), reduction)

        def mean_losses(total: Packed) -> dict[str, jax.Array]:
            return programs.mean_losses(exchange.unpack(total), names)

        mean = compiler.each(jax.jit(mean_losses), (exchange.kept,), layout.devices[:1])[0]
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
