"""The update of a step. Each device computes it for the whole state, or for blocks of it; with fsdp it keeps slices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_compile import BlockCompiler
from roxxel_dist.train.exact.block_programs import BlockPrograms, Join
from roxxel_dist.train.exact.block_update import BlockUpdate
from roxxel_dist.train.exact.blocks import Blocks, BlockSums
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import Layout, shapes_of
from roxxel_dist.train.exact.ownership import Ownership, Shares
from roxxel_dist.train.exact.packing import Packed, pack
from roxxel_dist.train.exact.piece_programs import Model
from roxxel_dist.train.exact.reduction import Exchange, Programs
from roxxel_dist.train.exact.selection import Selection
from roxxel_dist.train.exact.slices import Cut, Gather, free
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.optimizer import for_model
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics


@dataclass(frozen=True)
class WholeUpdate:
    """(states, models, totals, counts) -> (states, metrics), by device of this process."""

    gather: Gather
    """Of the optimizer's state."""
    programs: Programs
    cut: Cut

    def run(
        self, parts: Sequence[TrainState], models: Sequence[Model], totals: list[Packed], counts: Sequence[Leaves]
    ) -> tuple[list[TrainState], Metrics]:
        """The states are donated. Metrics are those of the first device: all have the same."""
        moments = self.gather.run([part.opt_state for part in parts])
        wholes = [
            part._replace(params=model.params, rest=model.rest, opt_state=own)
            for part, model, own in zip(parts, models, moments, strict=True)
        ]
        for part in parts:
            free(jax.tree.leaves(part), self.cut.like)
        hparams = [model.hparams for model in models]
        done = [update(*args) for update, *args in zip(self.programs, wholes, hparams, totals, counts, strict=True)]
        return self.cut.run([state for state, _ in done]), done[0][1]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """How the sums of all shards are packed, and become an update."""

    programs: ShardPrograms
    layout: Layout
    like: Any
    """The tree of sums, as shapes."""
    join: Join
    weight: Callable[[Any], jax.Array]
    """Of the sums."""
    batch: Any
    """Its shapes."""
    blocks: BlockSums | None
    """How they are packed for an update by blocks; None where everything is updated at once."""

    @classmethod
    def of(cls, programs: ShardPrograms, params: Leaves, like: Any, **rest: Any) -> "Totals":
        """For (abstract) parameters and sums."""
        optimizer = for_model(programs.optimizer, programs.split.params.matrices)
        blocks = Blocks.of(programs.split, params, optimizer, programs.shards)
        sums = None if blocks is None else BlockSums(blocks, shapes_of(params), like)
        return cls(programs=programs, like=like, blocks=sums, **rest)

    def pack(self, sums: Any) -> Packed:
        """Sums of a shard as they are added up."""
        return pack(sums) if self.blocks is None else self.blocks.pack(sums)

    def ownership(self, blocks: Blocks, state: TrainState) -> Ownership:
        """Of blocks of such an (abstract) state, with shardings."""
        alike = Selection.of(state, blocks.groups[0])
        leaves = list(zip(alike.names_of_own, alike.apart(state)[0], strict=True))
        return Ownership.of(self.layout, blocks, leaves)

    def compiled(
        self, packed: Packed, state: TrainState, hparams: Hparams, counts: Leaves, compile_one: Compile,
        for_each: CompileForEach,
    ) -> tuple[Exchange, WholeUpdate | BlockUpdate]:  # fmt: skip
        """What gives devices the totals of such packed sums, and the update from those, for such (abstract) arguments,
        with shardings."""
        programs, layout = self.programs, self.layout
        if self.blocks is None:
            exchange = Exchange.compiled(layout, self.like, packed, compile_one, for_each)
            return exchange, self._whole(exchange, state, hparams, counts, compile_one, for_each)
        owner = self.ownership(self.blocks.blocks, state)
        shares = Shares(owner, frozenset(self.blocks.names))
        exchange = Exchange.compiled(layout, self.like, packed, compile_one, for_each, shares)
        of_blocks = BlockPrograms(programs, self.blocks, self.join, self.weight, self.batch)
        compiler = BlockCompiler(of_blocks, owner, state, hparams, compile_one, for_each)
        return exchange, compiler.compiled(exchange.kept, counts)

    def _whole(
        self, exchange: Exchange, state: TrainState, hparams: Hparams, counts: Leaves, compile_one: Compile,
        for_each: CompileForEach,
    ) -> WholeUpdate:  # fmt: skip
        programs = self.programs

        def update(state: TrainState, hparams: Hparams, total: Packed, counts: Leaves) -> tuple[TrainState, Metrics]:
            hparams = programs.optimizer.for_batch(hparams, self.batch)
            whole, counts = self.join(exchange.unpack(total), Model(state.params, state.rest, hparams), counts)
            return programs.finish(whole, state, hparams, counts)

        args = shapes_of(state), shapes_of(hparams), exchange.kept, counts
        return WholeUpdate(
            gather=Gather.compiled(exchange.layout, state.opt_state, compile_one),
            programs=for_each(jax.jit(update, donate_argnums=0), args, exchange.layout.devices),
            cut=Cut.compiled(exchange.layout, state, for_each),
        )
