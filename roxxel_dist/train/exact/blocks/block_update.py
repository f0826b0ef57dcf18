"""The update of a step by blocks of large arrays: with fsdp each device computes those that it keeps.

Norms are sums of squares of blocks, added in one order. Where the slices of devices are no blocks it is a
`spread_blocks.SpreadGroup` that updates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.blocks.block_programs import Inputs
from roxxel_dist.train.exact.blocks.ownership import BlockNumbers, run_across
from roxxel_dist.train.exact.blocks.selection import Selection, merge_selections
from roxxel_dist.train.exact.blocks.slices import Cut, Gather, free
from roxxel_dist.train.exact.blocks.spread_blocks import SpreadGroup
from roxxel_dist.train.exact.layout import ShardLayout
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.piece_programs import Model
from roxxel_dist.train.exact.reduction import Programs
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics


@dataclass(frozen=True)
class Arrays:
    """The arrays of some parameters, of which devices keep slices."""

    selection: Selection
    like: Sequence[Any]
    """As shapes with shardings."""
    gather: Gather
    """Of those that are not gathered yet: all but the parameters."""
    cut: Cut

    def whole(self, parts: Sequence[TrainState], models: Sequence[Model]) -> list[list[jax.Array]]:
        """By device; the slices are given back."""
        wholes = [part._replace(params=model.params) for part, model in zip(parts, models, strict=True)]
        arrays = self.gather.run([self.selection.leaves(whole)[0] for whole in wholes])
        for part in parts:
            free(self.selection.leaves(part)[0], self.like)
        return arrays

    def numbers(self, parts: Sequence[TrainState]) -> list[list[jax.Array]]:
        """The optimizer's own numbers, by device."""
        return [self.selection.leaves(part)[1] for part in parts]


@dataclass(frozen=True)
class Group:
    """Parameters that each device updates whole, and then keeps its slices of."""

    arrays: Arrays
    gathers: Sequence[Any]
    """Gather each chunk of their gradients; empty where a device has them."""
    update: Programs

    def run(
        self,
        layout: ShardLayout,
        parts: Sequence[TrainState],
        models: Sequence[Model],
        grads: Sequence[Any],
        inputs: Inputs,
    ) -> tuple[list[Any], list[Any], jax.Array]:
        """(the arrays as they are kept, the optimizer's own numbers, by device; the squares of the changes).

        `grads` are what a device has added up, or all where it has them.
        """
        if self.gathers:
            grads = gather_chunks(layout, self.gathers, grads)
        wholes, common = self.arrays.whole(parts, models), self.arrays.numbers(parts)
        done = [
            update(whole, *args, *given)
            for update, whole, given, *args in zip(self.update, wholes, inputs, common, grads, strict=True)
        ]
        return self.arrays.cut.run([own for own, _, _ in done]), [numbers for _, numbers, _ in done], done[0][2]


@dataclass(frozen=True)
class BlockGroup:
    """Parameters that are updated block by block, of which each device keeps blocks."""

    selection: Selection
    params: Leaves
    """As shapes with shardings."""
    gathers: Sequence[Any]
    """Gather each chunk of the gradients of blocks that a device updates; empty where it has added them up."""
    split: Programs
    """Splits these into blocks; likewise."""
    take: Programs
    """Empty where a device has one block."""
    put: Programs
    update: Programs
    squares: BlockNumbers
    count: int
    """Of the blocks that a device updates."""

    @cached_property
    def numbers(self) -> list[list[jax.Array]]:
        """int32[], of these, on each device of this process."""
        devices = self.squares.layout.devices
        return [[jax.device_put(np.int32(k), device) for k in range(self.count)] for device in devices]

    def run(
        self,
        parts: Sequence[TrainState],
        models: Sequence[Model],
        chunks: list[list[jax.Array]],
        grads: list[list[list[jax.Array]]],
        inputs: Inputs,
    ) -> tuple[list[Any], jax.Array]:
        """(the arrays as they are kept, by device; float32[1, count] the squares of the changes).

        `chunks` and `grads` are what a device has added up: of all its blocks, and of each.
        """
        if self.gathers:
            every = gather_chunks(self.squares.layout, self.gathers, chunks)
            grads = [split(own) for split, own in zip(self.split, every, strict=True)]
            del every
        chunks.clear()
        own, common = self.selection.take_slices(parts, models, self.params)
        squares: list[list[jax.Array]] = [[] for _ in parts]
        for k in range(self.count):
            for i, update in enumerate(self.update):  # every device has something to do at once
                at = self.numbers[i][k]
                block = self.take[i](own[i], at) if self.take else own[i]
                block, _, square = update(block, common[i], grads[i].pop(0), *inputs[i])
                squares[i].append(square)
                own[i] = self.put[i](own[i], block, at) if self.put else block
        return own, self.squares.run(squares)[0]


@dataclass(frozen=True)
class SquaresOfBlocks:
    """The squares of the gradients of each block of all groups, which a device has added up."""

    names: Sequence[str]
    """Of the chunks of the first group, whose gradients are passed on."""
    split: Programs
    """(shares, other totals) -> (the gradients of each block, the weight of the sums)."""
    squares_of: Programs
    gather: BlockNumbers

    def run(self, shares: list[Packed], totals: list[Packed]) -> tuple[list[list[list[jax.Array]]], list[jax.Array]]:
        """(the gradients of each block of the first group, the squares of all blocks), by device of this process."""
        opened = [split(*own) for split, *own in zip(self.split, shares, totals, strict=True)]
        squares = [
            [square(block, weight) for block in blocks]
            for square, (blocks, weight) in zip(self.squares_of, opened, strict=True)
        ]
        return [[[block[name] for name in self.names] for block in own] for own, _ in opened], self.gather.run(squares)


@dataclass(frozen=True)
class BlockUpdate:
    """(states, models, totals, counts) -> (states, metrics), by device of this process."""

    layout: ShardLayout
    names: Sequence[Sequence[str]]
    """Of the packed chunks of each group of large parameters; the first one is that of `blocks`."""
    squares: SquaresOfBlocks | None
    """None where no parameter is updated in blocks."""
    numbers: Programs
    blocks: BlockGroup | SpreadGroup | None
    groups: Sequence[Group]
    """The other groups of large parameters, then the small ones."""
    cut_rest: Cut
    norm: Any

    def run(
        self, parts: Sequence[TrainState], models: Sequence[Model], totals: list[Packed], counts: Sequence[Leaves]
    ) -> tuple[list[TrainState], Metrics]:
        """The states are donated. Metrics are those of the first device: all have the same."""
        shares = [{name: total.pop(name) for group in self.names for name in group} for total in totals]
        blocks, squares = self.squares.run(shares, totals) if self.squares else ([], [None] * len(parts))
        found = [
            numbers(*args, part.step, part.health, count)
            for numbers, part, count, *args in zip(self.numbers, parts, counts, totals, squares, models, strict=True)
        ]
        inputs = [(own[0], scalars_of(model.hparams)) for own, model in zip(found, models, strict=True)]
        done: list[tuple[Selection, list[Any]]] = []
        changes: list[jax.Array] = []
        if self.blocks is not None:
            chunks = [[own.pop(name) for name in self.names[0]] for own in shares]
            own, change = self.blocks.run(parts, models, chunks, blocks, inputs)
            done.append((self.blocks.selection, own))
            changes.append(change)
        common: list[Any] = []
        large = self.names[1:]
        for group, names in zip(self.groups, [*large, ()], strict=True):
            of_group = [[own.pop(name) for name in names] for own in shares] if names else [own[2] for own in found]
            own, common, change = group.run(self.layout, parts, models, of_group, inputs)
            done.append((group.arrays.selection, own))
            changes.append(change)
        rests = self.cut_rest.run([own[1].rest for own in found])
        states = []
        for i, part in enumerate(parts):
            params, opt_state = merge_selections(part, [selection.tree(own[i], common[i]) for selection, own in done])
            states.append(TrainState(found[i][1].step, params, rests[i], opt_state, found[i][1].health))
        return states, self.norm(found[0][3], changes)


def gather_chunks(
    layout: ShardLayout, programs: Sequence[Any], chunks: Sequence[list[jax.Array]]
) -> list[list[jax.Array]]:
    """What programs for each chunk give, by device of this process; the chunks are given back."""
    found: list[list[jax.Array]] = [[] for _ in chunks]
    for program in programs:
        for own, chunk in zip(found, run_across(layout, program, [each.pop(0) for each in chunks]), strict=True):
            own.append(chunk)
    return found


def scalars_of(hparams: Hparams) -> Hparams:
    """The numbers among the inputs of a step."""
    return {name: leaf for name, leaf in hparams.items() if leaf.shape == ()}
