"""What an update takes apart: blocks of large arrays, which of them each device has, and groups of arrays that it needs
whole.

They follow from names and shapes alone, so a program for a block or a group is the same on any number of devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import AXES, DATA, FSDP
from roxxel_dist.cluster.parameter_sharding import parameter_sharding
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.train.exact.gradient import TILE, Packed, pack, unpack, wide
from roxxel_dist.train.exact.layout import SHARDS, ShardLayout
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.optimizer import NamedOptimizer, Optimizer, is_elementwise
from roxxel_dist.train.step.state import TrainState

GROUPS = 8
"""Large arrays that are updated whole are so in groups of about this share of all of them."""
CHUNKS = 4
"""Gradients are sent in arrays of about this share of all of them."""
Parts = dict[str, list[jax.Array]]
"""Of each parameter the gradients that add up to its own, such as those of the two uses of a tied embedding."""


@dataclass(frozen=True)
class Blocks:
    """How the large parameters of a model are cut, each into `count` blocks."""

    count: int
    """The number of virtual shards."""
    dimensions: Mapping[str, int]
    """Of each large parameter: the dimension that is cut."""
    groups: tuple[tuple[str, ...], ...]
    """The large parameters: the first group is updated block by block, any other one whole."""
    small: tuple[str, ...]
    """All other parameters."""

    @classmethod
    def of_model(cls, split: ModuleSplit, params: Mapping[str, Any], optimizer: Optimizer, count: int) -> "Blocks":
        """The blocks of a model, whose parameters may be abstract, and the optimizer for it.

        All parameters count as small, and are updated together, where the optimizer is the user's: it may take any
        parameters together.
        """
        found = block_dimensions(split, params, count)
        if not found or not isinstance(optimizer, NamedOptimizer) or optimizer.own is not None:
            return cls(count, {}, ((),), tuple(params))
        alike = tuple(name for name in found if is_elementwise(optimizer, name, params[name]))
        others = [name for name in found if name not in alike]
        sizes = {name: math.prod(params[name].shape) for name in others}
        groups: list[tuple[str, ...]] = []
        for name in others:
            joined = (*groups[-1], name) if groups else (name,)
            if groups and sum(sizes[each] for each in joined) * GROUPS <= sum(sizes.values()):
                groups[-1] = joined
            else:
                groups.append((name,))
        return cls(count, found, (alike, *groups), tuple(name for name in params if name not in found))

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block of an array."""
        return tuple(size // self.count if i == self.dimensions[name] else size for i, size in enumerate(shape))


def block_dimensions(split: ModuleSplit, params: Mapping[str, Any], count: int) -> dict[str, int]:
    """The dimension that fsdp would cut on `count` devices, by the names of the parameters that it would cut."""
    mesh: Any = AbstractMesh((1, count, 1, 1), AXES)
    found = {}
    for name, spec, axes in zip(split.params.names, split.params.partition_spec, split.params.axes, strict=True):
        if spec is None and wide(params[name].dtype) == jnp.float32:
            entries = [*parameter_sharding(name, params[name].shape, mesh, None, True, axes).spec]
            if FSDP in entries or DATA in entries:  # the first axis, where the second has one device
                found[name] = entries.index(FSDP if FSDP in entries else DATA)
    return found


@dataclass(frozen=True)
class BlockSums:
    """How sums of gradients are packed: of each group the blocks, one behind the other, and apart from them the rest.

    So a device can be sent whole blocks. A large group is packed as several chunks, each a part of every block.
    """

    blocks: Blocks
    params: Leaves
    """All parameters, as shapes."""
    like: Any
    """The tree of sums, as shapes. Dictionaries in it that have names and shapes of parameters are gradients."""

    @cached_property
    def chunks(self) -> list[dict[str, range]]:
        """The keys of the packed chunks of each group, and the elements of a block that each has."""
        sizes = [
            sum(self._uses[name] * math.prod(self.blocks.shape(name, self.params[name].shape)) for name in group)
            for group in self.blocks.groups
        ]
        found = []
        for i, size in enumerate(sizes):
            count = max(1, round(CHUNKS * size / max(1, sum(sizes))))
            ends = [size * k // count for k in range(count + 1)]
            found.append({f"group {i}.{k}": range(*ends[k : k + 2]) for k in range(count) if size})
        return found

    @property
    def names(self) -> list[str]:
        """The keys of all chunks."""
        return [name for group in self.chunks for name in group]

    @cached_property
    def _uses(self) -> dict[str, int]:
        """How many gradients each large parameter has in the tree."""
        found = self._large(self.like)
        return {name: len(found[name]) for name in self.blocks.dimensions}

    def pack(self, sums: Any) -> Packed:
        """float32[1, count x N] of each chunk, and what is left as `pack` gives it."""
        large, packed = self._large(sums), pack(self._rest(sums))
        for chunks, group in zip(self.chunks, self.blocks.groups, strict=True):
            if rows := [self._in_rows(name, leaf) for name in group for leaf in large[name]]:
                blocks = jnp.concatenate(rows, 1)
                packed |= {key: blocks[:, part.start : part.stop].reshape(1, -1) for key, part in chunks.items()}
        return packed

    def rest(self, packed: Packed) -> Any:
        """The tree without the gradients of large parameters."""
        return unpack(packed, self._rest(self.like))

    def block(self, group: int, chunks: Sequence[jax.Array]) -> Parts:
        """The gradients of a block of each parameter of a group, from float32[1, N] of each chunk."""
        flat = jnp.concatenate(chunks, 1)
        shapes = {name: self.blocks.shape(name, self.params[name].shape) for name in self.blocks.groups[group]}
        found, start = dict[str, list[jax.Array]](), 0
        for name, shape in shapes.items():
            for _ in range(self._uses[name]):
                stop = start + math.prod(shape)
                found.setdefault(name, []).append(flat[0, start:stop].reshape(shape))
                start = stop
        return found

    def whole(self, group: int, chunks: Sequence[jax.Array]) -> Parts:
        """The gradients of each parameter of a group, from float32[1, count x N] of each chunk."""
        rows = [chunk.reshape(self.blocks.count, 1, -1) for chunk in chunks]
        parts = jax.vmap(lambda *row: self.block(group, row))(*rows)
        return {name: [self._from_blocks(name, leaf) for leaf in leaves] for name, leaves in parts.items()}

    def _in_rows(self, name: str, leaf: jax.Array) -> jax.Array:
        cut, count = self.blocks.dimensions[name], self.blocks.count
        apart = leaf.reshape(*leaf.shape[:cut], count, leaf.shape[cut] // count, *leaf.shape[cut + 1 :])
        return jnp.moveaxis(apart, cut, 0).reshape(count, -1).astype(jnp.float32)

    def _from_blocks(self, name: str, blocks: jax.Array) -> jax.Array:
        return jnp.moveaxis(blocks, 0, self.blocks.dimensions[name]).reshape(self.params[name].shape)

    def _is_gradients(self, node: Any) -> bool:
        return (
            isinstance(node, dict)
            and bool(node)
            and all(name in self.params and leaf.shape == self.params[name].shape for name, leaf in node.items())
        )

    def _large(self, sums: Any) -> Parts:
        found: Parts = {}
        for node in jax.tree.leaves(sums, is_leaf=self._is_gradients):
            for name in node if self._is_gradients(node) else ():
                if name in self.blocks.dimensions:
                    found.setdefault(name, []).append(node[name])
        return found

    def _rest(self, sums: Any) -> Any:
        def others(node: Any) -> Any:
            if not self._is_gradients(node):
                return node
            return {name: leaf for name, leaf in node.items() if name not in self.blocks.dimensions}

        return jax.tree.map(others, sums, is_leaf=self._is_gradients)


@dataclass(frozen=True)
class Selection:
    """Parameters and what the optimizer keeps of them, apart from the optimizer's own numbers."""

    treedef: Any
    owners: tuple[str | None, ...]
    """Of each leaf the parameter that it is of, None of a number that is of all."""
    places: tuple[int, ...]
    """Of each leaf its place among those of (parameters, the optimizer's state)."""

    @classmethod
    def of_names(cls, state: TrainState, names: Sequence[str]) -> "Selection":
        """The selection of these parameters of a state, which may be abstract."""
        chosen, every = frozenset(names), frozenset(state.params)
        whole = jax.tree.structure((state.params, state.opt_state))
        numbered = jax.tree.unflatten(whole, range(whole.num_leaves))

        def is_named(node: Any) -> bool:
            return isinstance(node, dict) and bool(node) and every.issuperset(node)

        def choose(node: Any) -> Any:
            return {name: part for name, part in node.items() if name in chosen} if is_named(node) else node

        def owner_of(path: Sequence[Any]) -> str | None:
            return next((k.key for k in path if isinstance(k, jax.tree_util.DictKey) and k.key in every), None)

        leaves, treedef = jax.tree.flatten_with_path(jax.tree.map(choose, numbered, is_leaf=is_named))
        return cls(treedef, tuple(owner_of(path) for path, _ in leaves), tuple(place for _, place in leaves))

    @cached_property
    def own(self) -> list[int]:
        """The places of the arrays of these parameters."""
        return [place for place, owner in zip(self.places, self.owners, strict=True) if owner]

    @cached_property
    def common(self) -> list[int]:
        """The places of the numbers that are of all."""
        return [place for place, owner in zip(self.places, self.owners, strict=True) if not owner]

    def leaves(self, state: TrainState) -> tuple[list[Any], list[Any]]:
        """(arrays of these parameters, the numbers that are of all)."""
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return [leaves[place] for place in self.own], [leaves[place] for place in self.common]

    def tree(self, own: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """(the parameters, the optimizer's state of them) of what `leaves` gave."""
        first, second = iter(own), iter(numbers)
        return jax.tree.unflatten(self.treedef, [next(first if owner else second) for owner in self.owners])

    @property
    def names_of_own(self) -> list[str]:
        """The parameter of each array that `leaves` gives."""
        return [owner for owner in self.owners if owner]


@dataclass(frozen=True)
class Ownership:
    """Ranges of blocks, by device of `layout.line`."""

    layout: ShardLayout
    count: int
    """Of all blocks."""
    owned: tuple[range, ...]
    """What a device updates: the blocks of the slices that it keeps, or all, where it keeps other slices or the
    whole."""
    is_cut: bool
    """Whether what it updates is what it keeps."""

    @classmethod
    def of_blocks(cls, layout: ShardLayout, blocks: Blocks, leaves: Sequence[tuple[str, Any]]) -> "Ownership":
        """The ranges for arrays that are updated in blocks, by the names of their parameters, with shardings."""
        found = [_owned(layout, blocks, name, leaf) for name, leaf in leaves]
        is_cut = bool(found) and found[0] is not None and all(each == found[0] for each in found)
        owned = found[0] if is_cut and found[0] is not None else (range(blocks.count),) * layout.line.size
        return cls(layout, blocks.count, owned, is_cut)

    @cached_property
    def teams(self) -> list[list[int]]:
        """The devices that update the same blocks."""
        found: dict[range, list[int]] = {}
        for number, own in enumerate(self.owned):
            found.setdefault(own, []).append(number)
        return list(found.values())

    @cached_property
    def shares(self) -> list[range]:
        """What a device adds up: those that update the same blocks share them."""
        found = [range(0)] * len(self.owned)
        for team in self.teams:
            own, size = self.owned[team[0]], len(team)
            for i, number in enumerate(team):
                found[number] = own[len(own) * i // size : len(own) * (i + 1) // size]
        return found

    @property
    def most(self) -> int:
        """The blocks of the largest share."""
        return max(map(len, self.shares))

    def on_this_process(self, ranges: Sequence[range]) -> list[range]:
        """The ranges of the devices of this process."""
        places = {device: i for i, device in enumerate(self.layout.line.devices.flat)}
        return [ranges[places[device]] for device in self.layout.devices]

    def pieces(self, flat: jax.Array) -> jax.Array:
        """[devices, M]: what is sent to each device that adds it up, of all blocks, [1, N]."""
        order = [own[min(i, len(own) - 1)] for own in self.shares for i in range(self.most)]
        return _rows_in_order(flat.reshape(self.count, -1), order).reshape(len(self.shares), -1)

    def gather_team(self, flat: jax.Array) -> jax.Array:
        """[1, N], the blocks that a device updates, from its share; within a shard_map over all devices."""
        team = self.teams[0]
        groups = None if len(self.teams) == 1 else self.teams
        own = flat.reshape(self.most, -1)
        return gather_blocks(own, [self.shares[i] for i in team], self.owned[team[0]], groups).reshape(1, -1)

    def gather_all(self, flat: jax.Array) -> jax.Array:
        """[1, N], all blocks, likewise."""
        return gather_blocks(flat.reshape(self.most, -1), self.shares, range(self.count)).reshape(1, -1)


def _owned(layout: ShardLayout, blocks: Blocks, name: str, leaf: Any) -> tuple[range, ...] | None:
    """The blocks that each device has of an array; None where its slices are no blocks."""
    cut, found = blocks.dimensions[name], {}
    for device, place in leaf.sharding.devices_indices_map(leaf.shape).items():
        ends = [index.indices(size)[:2] for index, size in zip(place, leaf.shape, strict=True)]
        size = leaf.shape[cut] // blocks.count
        if any(end != (0, leaf.shape[i]) for i, end in enumerate(ends) if i != cut) or any(e % size for e in ends[cut]):
            return None
        found[device] = range(ends[cut][0] // size, ends[cut][1] // size)
    return tuple(found[device] for device in layout.line.devices.flat)


def _rows_in_order(rows: jax.Array, order: list[int]) -> jax.Array:
    """Rows in this order."""
    return rows if order == list(range(rows.shape[0])) else rows[np.array(order)]


def gather_blocks(
    own: jax.Array, ranges: Sequence[range], wanted: range, groups: list[list[int]] | None = None
) -> jax.Array:
    """What devices have of the `wanted` blocks, in their order; each has those of one of the `ranges`, in [most, …]."""
    whole = jnp.pad(own.reshape(-1), (0, -own.size % TILE))
    every = jax.lax.all_gather(whole[None], SHARDS, axis_index_groups=groups, tiled=True)
    every = every[:, : own.size].reshape(-1, *own.shape[1:])
    places = {block: i * own.shape[0] + k for i, each in enumerate(ranges) for k, block in enumerate(each)}
    return _rows_in_order(every, [places[block] for block in wanted])


def compile_across(layout: ShardLayout, function: Any, shape: tuple[int, ...], compiler: Compiler) -> Any:
    """The program of a function of what lies on each device of a float32 array of such a shape, [devices, …]."""
    spec = P(SHARDS)
    mapped = jax.shard_map(function, mesh=layout.line, in_specs=spec, out_specs=spec, check_vma=False)
    return compiler.one(jax.jit(mapped), (jax.ShapeDtypeStruct(shape, np.float32, sharding=layout.cut),), layout.line)
