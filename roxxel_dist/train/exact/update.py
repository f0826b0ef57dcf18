"""The update of a step, from the packed sums of all shards; with fsdp each device keeps slices of the state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.blocks.block_compile import BlockCompiler
from roxxel_dist.train.exact.blocks.block_programs import BlockPrograms, Join
from roxxel_dist.train.exact.blocks.block_update import BlockUpdate
from roxxel_dist.train.exact.blocks.blocks import Blocks, BlockSums
from roxxel_dist.train.exact.blocks.ownership import Ownership, Shares
from roxxel_dist.train.exact.blocks.selection import Selection
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import ShardLayout, shapes_of
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.reduction import Exchange
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.optimizer import for_model
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams


@dataclass(frozen=True, kw_only=True)
class Totals:
    """How the sums of all shards are packed, and become an update."""

    programs: ShardPrograms
    layout: ShardLayout
    like: Any
    """The tree of sums, as shapes."""
    join: Join
    weight: Callable[[Any], jax.Array]
    """Of the sums."""
    batch: Any
    """Its shapes."""
    blocks: BlockSums
    """How they are packed for an update by blocks."""

    @classmethod
    def of_params(cls, programs: ShardPrograms, params: Leaves, like: Any, **rest: Any) -> "Totals":
        """For (abstract) parameters and sums."""
        optimizer = for_model(programs.optimizer, programs.split.params.matrices)
        blocks = Blocks.of_model(programs.split, params, optimizer, programs.shards)
        return cls(programs=programs, like=like, blocks=BlockSums(blocks, shapes_of(params), like), **rest)

    def pack(self, sums: Any) -> Packed:
        """Sums of a shard as they are added up."""
        return self.blocks.pack(sums)

    def ownership(self, blocks: Blocks, state: TrainState) -> Ownership:
        """Of blocks of such an (abstract) state, with shardings."""
        alike = Selection.of_names(state, blocks.groups[0])
        leaves = list(zip(alike.names_of_own, alike.leaves(state)[0], strict=True))
        return Ownership.of_blocks(self.layout, blocks, leaves)

    def compile_update(
        self, packed: Packed, state: TrainState, hparams: Hparams, counts: Leaves, compile_one: Compile,
        for_each: CompileForEach,
    ) -> tuple[Exchange, BlockUpdate]:  # fmt: skip
        """What gives devices the totals of such packed sums, and the update from those, for such (abstract) arguments,
        with shardings."""
        owner = self.ownership(self.blocks.blocks, state)
        shares = Shares(owner, frozenset(self.blocks.names))
        exchange = Exchange.compile_exchange(self.layout, self.like, packed, compile_one, for_each, shares)
        of_blocks = BlockPrograms(self.programs, self.blocks, self.join, self.weight, self.batch)
        compiler = BlockCompiler(of_blocks, owner, state, hparams, compile_one, for_each)
        return exchange, compiler.compile_update(exchange.kept, counts)
