"""The update of a step by blocks of large arrays: with fsdp each device computes those that it keeps.

Norms are sums of squares of blocks, added in one order. Where the slices of devices are no blocks it is a
`spread_blocks.SpreadGroup` that updates them. `Gather`, `Cut` and `run_across` move numbers between devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.blocks import Selection
from roxxel_dist.train.exact.gradient import Model, Packed
from roxxel_dist.train.exact.layout import Programs, ShardLayout
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics

StateLeaves = Sequence[Sequence[Any]]
"""The leaves of (parameters, the optimizer's state), by device of this process."""


class Numbers(NamedTuple):
    """What the update of each parameter takes beside its own arrays."""

    weight: jax.Array
    """float32[]: what the sums are divided by."""
    norm: jax.Array
    """float32[]: of the whole gradient."""
    loss: jax.Array
    """float32[]: what is minimized."""
    step: jax.Array
    """int32[]: steps done before."""
    good: jax.Array
    """int32[]: good steps, with this one."""
    bad: jax.Array
    """bool[]: whether the step is bad."""


Inputs = Sequence[tuple[Numbers, Hparams]]
"""(what updates take, the numbers among the inputs of a step), by device of this process."""


def copies(tree: Any, devices: Sequence[Any]) -> list[Any]:
    """What lies of a tree of global arrays on each of these devices of this process; nothing is copied."""
    leaves, treedef = jax.tree.flatten(tree)
    parts = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [jax.tree.unflatten(treedef, [part[device] for part in parts]) for device in devices]


def line_array(layout: ShardLayout, pieces: Sequence[jax.Array]) -> jax.Array:
    """[1, N] arrays of the devices of this process, in order, as a part of one array [devices, N]."""
    shape = (layout.line.size, *pieces[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, layout.cut, list(pieces), dtype=pieces[0].dtype)


def run_across(layout: ShardLayout, program: Any, own: Sequence[jax.Array]) -> list[jax.Array]:
    """What a program of `compile_across` gives, by device of this process; as it is where there is none."""
    if program is None:
        return list(own)
    every = program(line_array(layout, own))
    return [every.addressable_data(i) for i in range(len(own))]


def is_cut(like: Any) -> bool:
    """Whether a device has a slice of an array, or of its `jax.ShapeDtypeStruct` with sharding."""
    return not like.sharding.is_fully_replicated


def free(arrays: Sequence[jax.Array], like: Sequence[Any]) -> None:
    """Give the memory back of those that are cut, or are the whole of such: what works on them keeps it until then."""
    for array, leaf in zip(arrays, like, strict=True):
        if is_cut(leaf):
            array.delete()


@dataclass(frozen=True)
class Gather:
    """Gives each device whole trees, of those of its slices. What is not cut is passed on."""

    layout: ShardLayout
    like: Sequence[Any]
    """The leaves of the whole tree, with shardings."""
    program: Any
    """None where no leaf is cut."""

    @classmethod
    def compile_gather(cls, layout: ShardLayout, like: Any, compiler: Compiler) -> "Gather":
        """The moves of trees such as `like`."""
        leaves = jax.tree.leaves(like)

        def gather_slices(slices: list[jax.Array]) -> list[jax.Array]:
            return slices

        if not (cut := [leaf for leaf in leaves if is_cut(leaf)]):
            return cls(layout, leaves, None)
        whole = jax.jit(gather_slices, out_shardings=NamedSharding(layout.mesh, P()))
        return cls(layout, leaves, compiler.one(whole, (cut,), layout.mesh))

    def run(self, parts: list[Any]) -> list[Any]:
        """Run it on trees by device of this process."""
        if self.program is None:
            return parts
        treedef, slices = jax.tree.structure(parts[0]), [jax.tree.leaves(part) for part in parts]
        given = [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(each))
            for leaf, *each in zip(self.like, *slices, strict=True)
            if is_cut(leaf)
        ]
        wholes = [iter(own) for own in copies(self.program(given), self.layout.devices)]
        return [
            jax.tree.unflatten(
                treedef, [next(whole) if is_cut(leaf) else part for leaf, part in zip(self.like, own, strict=True)]
            )
            for own, whole in zip(slices, wholes, strict=True)
        ]


@dataclass(frozen=True)
class Cut:
    """Takes the slices of each device from its whole trees. What is not cut is passed on."""

    like: Sequence[Any]
    """The leaves of the whole tree, with shardings."""
    programs: Programs
    """Empty where no leaf is cut."""

    @classmethod
    def compile_cut(cls, layout: ShardLayout, like: Any, compiler: Compiler) -> "Cut":
        """The moves of trees such as `like`."""
        leaves = jax.tree.leaves(like)
        if not (cut := [leaf for leaf in leaves if is_cut(leaf)]):
            return cls(leaves, ())
        return cls(leaves, [compiler.each(_taking(cut, device), (cut,), [device])[0] for device in layout.devices])

    def run(self, wholes: list[Any]) -> list[Any]:
        """Run it on trees by device of this process."""
        if not self.programs:
            return wholes
        return [self._slices(take, whole) for take, whole in zip(self.programs, wholes, strict=True)]

    def _slices(self, take: Any, whole: Any) -> Any:
        leaves, treedef = jax.tree.flatten(whole)
        slices = iter(take([leaf for leaf, like in zip(leaves, self.like, strict=True) if is_cut(like)]))
        own = [next(slices) if is_cut(like) else leaf for leaf, like in zip(leaves, self.like, strict=True)]
        return jax.tree.unflatten(treedef, own)


def _taking(cut: Sequence[Any], device: Any) -> Any:
    """The jitted function of a device that takes its slices."""
    places = [leaf.sharding.devices_indices_map(leaf.shape)[device] for leaf in cut]

    def take_slices(wholes: list[jax.Array]) -> list[jax.Array]:
        return [whole[place] for whole, place in zip(wholes, places, strict=True)]

    return jax.jit(take_slices)


@dataclass(frozen=True)
class Arrays:
    """The arrays of some parameters, of which devices keep slices."""

    selection: Selection
    like: Sequence[Any]
    """As shapes with shardings."""
    gather: Gather
    """Of those that are not gathered yet: all but the parameters."""
    cut: Cut

    def whole(self, slices: StateLeaves, gathered: StateLeaves) -> list[list[jax.Array]]:
        """The whole arrays by device; the slices are given back."""
        arrays = self.gather.run(leaves_of(self.selection.own, gathered))
        for leaves in leaves_of(self.selection.own, slices):
            free(leaves, self.like)
        return arrays


@dataclass(frozen=True)
class Group:
    """Parameters that each device updates whole, and then keeps its slices of."""

    arrays: Arrays
    gathers: Sequence[Any]
    """Gather each chunk of their gradients; empty where a device has them."""
    update: Programs

    def run(
        self, layout: ShardLayout, slices: StateLeaves, gathered: StateLeaves, grads: Sequence[Any], inputs: Inputs
    ) -> tuple[list[Any], list[Any], jax.Array]:
        """(the arrays as they are kept, the optimizer's own numbers, by device; the squares of the changes).

        `grads` are what a device has added up, or all where it has them.
        """
        if self.gathers:
            grads = gather_chunks(layout, self.gathers, grads)
        wholes, common = self.arrays.whole(slices, gathered), leaves_of(self.arrays.selection.common, slices)
        done = [
            update(whole, *args, *given)
            for update, whole, given, *args in zip(self.update, wholes, inputs, common, grads, strict=True)
        ]
        return self.arrays.cut.run([own for own, _, _ in done]), [numbers for _, numbers, _ in done], done[0][2]


@dataclass(frozen=True)
class BlockNumbers:
    """Gives each device a number of each block, from the devices that have computed it."""

    layout: ShardLayout
    stack: Sequence[Any]
    gather: Any
    """None where there is one device."""

    def run(self, numbers: list[list[jax.Array]]) -> list[jax.Array]:
        """float32[1, count], by device of this process, from float32[1] of each of its blocks."""
        stacked = [stack(own) for stack, own in zip(self.stack, numbers, strict=True)]
        return run_across(self.layout, self.gather, stacked)


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
        own: list[list[jax.Array]],
        common: list[list[jax.Array]],
        chunks: list[list[jax.Array]],
        grads: list[list[list[jax.Array]]],
        inputs: Inputs,
    ) -> tuple[list[Any], jax.Array]:
        """(the arrays as they are kept, by device; float32[1, count] the squares of the changes).

        `own` and `common` are the slices of a device and the optimizer's own numbers, `chunks` and `grads` what it has
        added up: of all its blocks, and of each.
        """
        if self.gathers:
            every = gather_chunks(self.squares.layout, self.gathers, chunks)
            grads = [split(own) for split, own in zip(self.split, every, strict=True)]
            del every
        chunks.clear()
        squares: list[list[jax.Array]] = [[] for _ in own]
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
    blocks: Any
    """A `BlockGroup` or a `SpreadGroup`; None as above."""
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
        structure = jax.tree.structure((parts[0].params, parts[0].opt_state))
        slices = [jax.tree.leaves((part.params, part.opt_state)) for part in parts]
        gathered = [jax.tree.leaves((model.params, part.opt_state)) for part, model in zip(parts, models, strict=True)]
        done: list[tuple[list[int], list[Any]]] = []
        changes: list[jax.Array] = []
        if self.blocks is not None:
            chunks = [[own.pop(name) for name in self.names[0]] for own in shares]
            selection, params = self.blocks.selection, self.blocks.params
            for model in models:  # it has the slices too, which are updated
                free([model.params[name] for name in params], list(params.values()))
            own, common = leaves_of(selection.own, slices), leaves_of(selection.common, slices)
            own, change = self.blocks.run(own, common, chunks, blocks, inputs)
            done.append((selection.own, own))
            changes.append(change)
        common: list[Any] = []
        for group, names in zip(self.groups, [*self.names[1:], ()], strict=True):
            of_group = [[own.pop(name) for name in names] for own in shares] if names else [own[2] for own in found]
            own, common, change = group.run(self.layout, slices, gathered, of_group, inputs)
            done.append((group.arrays.selection.own, own))
            changes.append(change)
        rests = self.cut_rest.run([own[1].rest for own in found])
        done.append((self.groups[-1].arrays.selection.common, common))
        states = []
        for i, (_, after, _, _) in enumerate(found):
            leaves: list[Any] = [None] * structure.num_leaves
            for places, new in done:
                for place, leaf in zip(places, new[i], strict=True):
                    leaves[place] = leaf
            params, opt_state = jax.tree.unflatten(structure, leaves)
            states.append(TrainState(after.step, params, rests[i], opt_state, after.health))
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


def leaves_of(places: Sequence[int], of_states: StateLeaves) -> list[list[Any]]:
    """The leaves at some places, by device."""
    return [[leaves[place] for place in places] for leaves in of_states]


def scalars_of(hparams: Hparams) -> Hparams:
    """The numbers among the inputs of a step."""
    return {name: leaf for name, leaf in hparams.items() if leaf.shape == ()}
