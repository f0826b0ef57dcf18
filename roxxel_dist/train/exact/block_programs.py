"""What one device computes in an update by blocks and groups (see `blocks.py`), as pure functions; and how that is
compiled for the arrays and devices of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_update import (
    Arrays,
    BlockGroup,
    BlockNumbers,
    BlockUpdate,
    Cut,
    Gather,
    Group,
    Numbers,
    SquaresOfBlocks,
    scalars_of,
)
from roxxel_dist.train.exact.blocks import Blocks, BlockSums, Ownership, Parts, Selection, compile_across, gather_blocks
from roxxel_dist.train.exact.compiled_step import Exchange
from roxxel_dist.train.exact.gradient import Model, Packed, ShardPrograms, Sums
from roxxel_dist.train.exact.layout import Programs, ShardLayout, shapes_of
from roxxel_dist.train.exact.spread_blocks import SpreadArrays, SpreadGroup, fetch_gradients
from roxxel_dist.train.step.average import next_average
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.optimizer import Optimizer, for_model, global_norm
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import EMA, Hparams, Loss, Metrics, divisor, step_metrics, update_parameters

Join = Callable[[Any, Model, Leaves], tuple[Sums, Leaves]]
"""(sums of all shards as they were added up, model, counts of random streams) -> (the same as `Sums`, the counts)."""


class Rest(NamedTuple):
    """The state after a step but for parameters and what the optimizer keeps."""

    step: jax.Array
    rest: Leaves
    health: LossMonitorState


@dataclass(frozen=True, kw_only=True)
class BlockPrograms:
    """How the packed sums of all shards become an update: the functions of one device, to be jitted."""

    programs: ShardPrograms
    layout: ShardLayout
    optimizer: Optimizer
    """For the model."""
    sums: BlockSums
    join: Join
    weight: Callable[[Any], jax.Array]
    """Of the sums of all shards: what they are divided by."""
    batch: Any
    """Its shapes."""

    @classmethod
    def of_params(cls, programs: ShardPrograms, params: Leaves, like: Any, **rest: Any) -> "BlockPrograms":
        """The functions for (abstract) parameters, and a tree of sums such as `like`."""
        optimizer = for_model(programs.optimizer, programs.split.params.matrices)
        blocks = Blocks.of_model(programs.split, params, optimizer, programs.shards)
        sums = BlockSums(blocks, shapes_of(params), like)
        return cls(programs=programs, optimizer=optimizer, sums=sums, **rest)

    def ownership(self, state: TrainState) -> Ownership:
        """The blocks that each device has of such an (abstract) state, with shardings."""
        alike = Selection.of_names(state, self.sums.blocks.groups[0])
        leaves = list(zip(alike.names_of_own, alike.leaves(state)[0], strict=True))
        return Ownership.of_blocks(self.layout, self.sums.blocks, leaves)

    def compile_update(
        self, packed: Packed, state: TrainState, hparams: Hparams, counts: Leaves, compiler: Compiler
    ) -> tuple[Exchange, BlockUpdate]:
        """What gives devices the totals of such packed sums, and the update from those, for such (abstract) arguments,
        with shardings."""
        owner, layout = self.ownership(state), self.layout
        exchange = Exchange.compile_exchange(layout, self.sums.like, packed, compiler, owner, self.sums.names)
        return exchange, BlockCompiler(self, owner, state, hparams, compiler).compile_update(exchange.kept, counts)

    def weight_of(self, packed: Packed) -> jax.Array:
        """float32[]: what the sums of all shards are divided by."""
        return self.weight(self.sums.rest(packed))

    def gradient(self, parts: Mapping[str, Sequence[jax.Array]], weight: jax.Array) -> Leaves:
        """The mean gradients, in the types of their parameters."""
        counted, params = divisor(weight), self.sums.params
        return {name: (reduce(jnp.add, leaves) / counted).astype(params[name].dtype) for name, leaves in parts.items()}

    def squares(self, block: Packed, weight: jax.Array) -> jax.Array:
        """float32[1]: the sum of the squares of the gradient of a block of all groups."""
        groups = [
            self.sums.block(i, [block[name] for name in chunks]) for i, chunks in enumerate(self.sums.chunks) if chunks
        ]
        return squares_of([self.gradient(parts, weight) for parts in groups])[None]

    def numbers(
        self,
        packed: Packed,
        squares: jax.Array | None,
        model: Model,
        step: jax.Array,
        health: LossMonitorState,
        counts: Leaves,
    ) -> tuple[Numbers, Rest, Parts, Metrics]:
        """(what all updates take, the state beside them, the gradient sums of small parameters, the metrics but for the
        norm of the update) of the sums without those of blocks, and float32[1, V] the squares of these, if there are
        any."""
        whole, counts = self.join(self.sums.rest(packed), model, counts)
        counted, settings = divisor(whole.weight), self.optimizer.for_batch(model.hparams, self.batch)
        small = {name: [grad] for name, grad in whole.grads.items()}
        grads = self.gradient(small, whole.weight)
        norm = global_norm(grads) if squares is None else jnp.sqrt(squares.sum() + squares_of(grads))
        means = {
            name: (leaf / self.programs.shards).astype(model.rest[name].dtype)
            for name, leaf in whole.statistics.items()
        }
        scalars = {name: value / counted for name, value in whole.scalars.items()}
        loss = Loss(whole.loss / counted, scalars, whole.row_loss, row_weight=whole.row_weight, load=whole.load)
        skip, norms = self.programs.skip_bad, {"grad_norm": norm}
        metrics, bad = step_metrics(self.optimizer, settings, step, health, loss, norms, skip_bad=skip)
        rest = {**model.rest, **counts, **means}
        if skip:
            rest = jax.tree.map(partial(jnp.where, bad), model.rest, rest)
        shared = Numbers(whole.weight, norm, loss.minimized, step, metrics.health.good, bad)
        return shared, Rest(step + 1, rest, metrics.health), small, metrics

    def update(
        self, selection: Selection, own: list[Any], common: list[Any], parts: Parts, numbers: Numbers, hparams: Hparams
    ) -> tuple[list[Any], list[Any], jax.Array]:
        """(arrays, the optimizer's own numbers, float32[1] the sum of the squares of the changes) after a step, of some
        parameters or a block of each, as `Selection.leaves` gives them."""
        before = params, opt_state = selection.tree(own, common)
        grads = self.gradient(parts, numbers.weight)
        args = self.optimizer.for_batch(hparams, self.batch), numbers.step, grads, params, opt_state
        changes, after, inner = update_parameters(self.optimizer, *args, numbers.loss, numbers.norm)
        inner = next_average(opt_state, inner, after, hparams.get(EMA), numbers.good)
        leaves = jax.tree.leaves((after, inner))
        if self.programs.skip_bad:
            leaves = [
                jnp.where(numbers.bad, old, new) for old, new in zip(jax.tree.leaves(before), leaves, strict=True)
            ]
        pairs = list(zip(leaves, selection.owners, strict=True))
        own, common = [leaf for leaf, owner in pairs if owner], [leaf for leaf, owner in pairs if not owner]
        return own, common, squares_of(changes)[None]


def squares_of(leaves: Any) -> jax.Array:
    """float32[]: the sum of the squares of all elements."""
    sums = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(leaves)]
    return reduce(jnp.add, sums, jnp.float32(0))


def add_update_norm(metrics: Metrics, squares: list[jax.Array]) -> Metrics:
    """The metrics with the norm of the update, of the squares of blocks, float32[1, V], and of groups, float32[1]."""
    total = reduce(jnp.add, [each.sum() for each in squares])
    return metrics._replace(scalars={**metrics.scalars, "update_norm": jnp.sqrt(total)})


@dataclass(frozen=True)
class BlockCompiler:
    """Makes a `BlockUpdate` for abstract arguments, with shardings."""

    programs: BlockPrograms
    ownership: Ownership
    state: TrainState
    hparams: Hparams
    compiler: Compiler

    @property
    def layout(self) -> ShardLayout:
        """The layout of the devices."""
        return self.ownership.layout

    @property
    def blocks(self) -> Blocks:
        """The blocks of the parameters."""
        return self.programs.sums.blocks

    def compile_update(self, totals: Packed, counts: Leaves) -> BlockUpdate:
        """The update for such totals, of which each device has its share."""
        programs, layout, owner = self.programs, self.layout, self.ownership
        names = [list(chunks) for chunks in programs.sums.chunks]
        shares = {name: totals[name] for group in names for name in group}
        rest = {name: leaf for name, leaf in totals.items() if name not in shares}
        squares = jax.ShapeDtypeStruct((1, owner.count), np.float32) if shares else None
        model = shapes_of(Model(self.state.params, self.state.rest, self.hparams))
        args = rest, squares, model, *shapes_of((self.state.step, self.state.health)), counts
        numbers, _, small, metrics = jax.eval_shape(programs.numbers, *args)
        inputs = numbers, scalars_of(shapes_of(self.hparams))
        chunks = [[shares[name] for name in group] for group in names]
        blocks = self._block_group(chunks[0], inputs) if chunks[0] else None
        large = [self._group(i, own, inputs) for i, own in enumerate(chunks) if i]
        one = jax.ShapeDtypeStruct((1,), np.float32)
        changes = [squares] * (blocks is not None) + [one] * (len(large) + 1)
        return BlockUpdate(
            layout=layout,
            names=names,
            squares=self._squares(shares, rest) if shares else None,
            numbers=self.each(programs.numbers, *args),
            blocks=blocks,
            groups=[*large, self._small_group(small, inputs)],
            cut_rest=Cut.compile_cut(layout, self.state.rest, self.compiler),
            norm=self.compiler.each(jax.jit(add_update_norm), (metrics, changes), layout.devices[:1])[0],
        )

    def each(self, function: Any, *args: Any, donate: tuple[int, ...] = ()) -> Programs:
        """A function of one device, on each of this process."""
        return self.compiler.each(jax.jit(function, donate_argnums=donate), shapes_of(args), self.layout.devices)

    def _flat(self, share: Any, blocks: int) -> Any:
        """Shape of so many blocks, of of a device's share."""
        return jax.ShapeDtypeStruct((1, share.shape[1] // self.ownership.most * blocks), np.float32)

    def _squares(self, shares: Packed, rest: Packed) -> SquaresOfBlocks:
        owner, layout, programs = self.ownership, self.layout, self.programs
        block = {name: self._flat(leaf, 1) for name, leaf in shares.items()}
        weight, here = jax.eval_shape(programs.weight_of, rest), owner.on_this_process(owner.shares)
        return SquaresOfBlocks(
            names=list(programs.sums.chunks[0]),
            split=[
                self._split(shares, rest, len(own), device) for own, device in zip(here, layout.devices, strict=True)
            ],
            squares_of=self.each(programs.squares, block, weight),
            gather=self._numbers(owner.shares),
        )

    def _numbers(self, ranges: Sequence[range]) -> BlockNumbers:
        """Numbers of blocks, for devices that compute these."""
        layout, most, count = self.layout, max(map(len, ranges)), self.ownership.count

        def stack_numbers(each: list[jax.Array]) -> jax.Array:
            return jnp.pad(jnp.concatenate(each), (0, most - len(each)))[None]

        def gather_numbers(own: jax.Array) -> jax.Array:
            return gather_blocks(own[0], ranges, range(count))[None]

        one = jax.ShapeDtypeStruct((1,), np.float32)
        here = zip(self.ownership.on_this_process(ranges), layout.devices, strict=True)
        stack = [self.compiler.each(jax.jit(stack_numbers), ([one] * len(own),), [device])[0] for own, device in here]
        if (size := layout.line.size) == 1:
            return BlockNumbers(layout, stack, None)
        return BlockNumbers(layout, stack, compile_across(layout, gather_numbers, (size, most), self.compiler))

    def _split(self, shares: Packed, rest: Packed, count: int, device: Any) -> Any:
        def open_shares(shares: Packed, rest: Packed) -> Any:
            return split_blocks(shares, count, self.ownership.most), self.programs.weight_of(rest)

        return self.compiler.each(jax.jit(open_shares), (shares, rest), [device])[0]

    def _gathers(self, function: Any, chunks: Sequence[Any]) -> Sequence[Any]:
        if (size := self.layout.line.size) == 1:
            return ()
        shapes = [(size, share.shape[1]) for share in chunks]
        programs = {
            shape: compile_across(self.layout, function, shape, self.compiler) for shape in dict.fromkeys(shapes)
        }
        return [programs[shape] for shape in shapes]

    def _arrays(self, names: Sequence[str]) -> Arrays:
        selection = Selection.of_names(self.state, names)
        like = selection.leaves(self.state)[0]
        everywhere = NamedSharding(self.layout.mesh, P())  # the parameters are gathered for the gradient already
        params = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
            for name, leaf in self.state.params.items()
        }
        gathered = selection.leaves(self.state._replace(params=params))[0]
        return Arrays(
            selection=selection,
            like=like,
            gather=Gather.compile_gather(self.layout, gathered, self.compiler),
            cut=Cut.compile_cut(self.layout, like, self.compiler),
        )

    def _group(self, number: int, chunks: Sequence[Any], inputs: Any) -> Group:
        """A group of large parameters."""
        arrays = self._arrays(self.blocks.groups[number])
        selection, programs = arrays.selection, self.programs

        def update_group(own: Any, common: Any, chunks: Any, numbers: Any, hparams: Hparams) -> Any:
            return programs.update(selection, own, common, programs.sums.whole(number, chunks), numbers, hparams)

        whole = [self._flat(share, self.ownership.count) for share in chunks]
        args = *selection.leaves(self.state), whole, *inputs
        return Group(
            arrays=arrays,
            gathers=self._gathers(self.ownership.gather_all, chunks),
            update=self.each(update_group, *args, donate=(0,)),
        )

    def _small_group(self, grads: Any, inputs: Any) -> Group:
        arrays = self._arrays(self.blocks.small)

        def update_small(*args: Any) -> Any:
            return self.programs.update(arrays.selection, *args)

        args = *arrays.selection.leaves(self.state), grads, *inputs
        return Group(arrays, (), self.each(update_small, *args, donate=(0,)))

    def _block_group(self, chunks: Sequence[Any], inputs: Any) -> BlockGroup | SpreadGroup:
        owner, programs, names = self.ownership, self.programs, self.blocks.groups[0]
        selection = Selection.of_names(self.state, names)
        like, common = selection.leaves(self.state)
        cuts = [self.blocks.dimensions[name] for name in selection.names_of_own]
        own = [
            jax.ShapeDtypeStruct(self.blocks.shape(name, leaf.shape), leaf.dtype)
            for name, leaf in zip(selection.names_of_own, like, strict=True)
        ]

        def update_block(own: Any, common: Any, chunks: Any, numbers: Any, hparams: Hparams) -> Any:
            return programs.update(selection, own, common, programs.sums.block(0, chunks), numbers, hparams)

        args = own, common, [self._flat(share, 1) for share in chunks], *inputs
        params, update = {name: self.state.params[name] for name in names}, self.each(update_block, *args, donate=(0,))
        squares = self._numbers(owner.owned)
        if not owner.is_cut:
            return SpreadGroup(
                selection=selection,
                params=params,
                arrays=SpreadArrays.compile_spread(self.layout, like, cuts, owner.count, self.compiler),
                gradients=fetch_gradients(owner, chunks, self.compiler),
                update=update,
                squares=squares,
                count=owner.count,
            )
        sent, split = self._team(chunks)
        take, put = self._moves(own, cuts)
        return BlockGroup(selection, params, sent, split, take, put, update, squares, len(owner.owned[0]))

    def _team(self, chunks: Sequence[Any]) -> tuple[Sequence[Any], Programs]:
        """What gathers the gradients of the blocks that a device updates, and takes these apart."""
        owner, here = self.ownership, len(self.ownership.owned[0])
        if len(owner.teams[0]) == 1:
            return (), ()

        def open_blocks(chunks: list[jax.Array]) -> list[list[jax.Array]]:
            return split_blocks(chunks, here, here)

        every = [self._flat(share, here) for share in chunks]
        return self._gathers(owner.gather_team, chunks), self.each(open_blocks, every)

    def _moves(self, blocks: Sequence[Any], cuts: Sequence[int]) -> tuple[Programs, Programs]:
        """What takes a block of each array, by its number among those of a device, and what puts it back."""
        if (here := len(self.ownership.owned[0])) == 1:
            return (), ()

        def take_block(arrays: list[Any], index: jax.Array) -> list[Any]:
            return [_block_of(leaf, cut, here, index) for leaf, cut in zip(arrays, cuts, strict=True)]

        def put_block(arrays: list[Any], blocks: list[Any], index: jax.Array) -> list[Any]:
            return [
                jax.lax.dynamic_update_slice_in_dim(leaf, block, index * block.shape[cut], cut)
                for leaf, block, cut in zip(arrays, blocks, cuts, strict=True)
            ]

        kept = [
            jax.ShapeDtypeStruct(
                tuple(size * here if i == cut else size for i, size in enumerate(block.shape)), block.dtype
            )
            for block, cut in zip(blocks, cuts, strict=True)
        ]
        number = jax.ShapeDtypeStruct((), np.int32)
        return self.each(take_block, kept, number), self.each(put_block, kept, list(blocks), number, donate=(0,))


def split_blocks(tree: Any, count: int, most: int) -> list[Any]:
    """The first `count` blocks of a tree of arrays of `most`, [1, most x N]."""

    def block(flat: jax.Array, k: int) -> jax.Array:
        size = flat.shape[1] // most
        return flat[:, k * size : (k + 1) * size]

    return [jax.tree.map(lambda flat, k=k: block(flat, k), tree) for k in range(count)]


def _block_of(array: jax.Array, cut: int, blocks: int, index: jax.Array) -> jax.Array:
    size = array.shape[cut] // blocks
    return jax.lax.dynamic_slice_in_dim(array, index * size, size, cut)
