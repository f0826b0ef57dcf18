"""Which blocks of an update each device has: those that it adds up the gradients of, and those that it updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from roxxel_dist.train.exact.blocks.blocks import Blocks
from roxxel_dist.train.exact.layout import SHARDS, ShardLayout
from roxxel_dist.train.exact.packing import TILE
from roxxel_dist.train.step.compile import Compile


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
        """For arrays that are updated in blocks, by the names of their parameters, with shardings."""
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
        """Those of the devices of this process."""
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


def compile_across(layout: ShardLayout, function: Any, shape: tuple[int, ...], compile_one: Compile) -> Any:
    """The program of a function of what lies on each device of a float32 array of such a shape, [devices, …]."""
    spec = P(SHARDS)
    mapped = jax.shard_map(function, mesh=layout.line, in_specs=spec, out_specs=spec, check_vma=False)
    return compile_one(jax.jit(mapped), (jax.ShapeDtypeStruct(shape, np.float32, sharding=layout.cut),), layout.line)


@dataclass(frozen=True)
class Shares:
    """Packed sums of which a device gets its share alone."""

    ownership: Ownership
    names: frozenset[str]
    """Of the chunks among packed sums."""
