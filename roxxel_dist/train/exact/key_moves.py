"""Copies of keys and values, and sums of their gradients, between the virtual shards of a row that is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.train.exact.block_update import copies, line_array
from roxxel_dist.train.exact.compiled_step import SumTree, add_sums, subtrees, total_of
from roxxel_dist.train.exact.layout import SHARDS, Programs, ShardLayout
from roxxel_dist.train.step.compile import Compiler

ROWS, PIECES = "rows", "pieces"
"""The axes of the devices: groups, and those of a group, which have shards of the same row."""
ByShard = list[list[Any]]
"""Something of each shard of each device of this process."""


@dataclass(frozen=True)
class KeyMoves:
    """Moves keys and values of shards to all devices that have shards of the row, and sums of their gradients back."""

    layout: ShardLayout
    here: int
    """Shards of one row on a device."""
    join: Programs
    gather: Any
    """None where a device has whole rows."""
    add: Programs
    scatter: Any
    """Likewise."""
    split: Programs
    mesh: Mesh

    @classmethod
    def compile_moves(cls, layout: ShardLayout, cut: RowCut, like: Any, compiler: Compiler) -> "KeyMoves":
        """The moves of (keys, values) of a shard such as `like`."""
        here = min(layout.most, cut.parts)
        share, devices, order = cut.parts // here, layout.devices, np.argsort(cut.places)
        mesh = Mesh(layout.line.devices.reshape(-1, share), (ROWS, PIECES), axis_types=(AxisType.Auto,) * 2)

        def join_keys(parts: list[Any]) -> Any:
            joined = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
            return joined if share > 1 else jax.tree.map(lambda x: x[cut.places], joined)

        def gather_keys(own: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.all_gather(x, PIECES, tiled=True)[cut.places], own)

        def scatter_sums(own: Any) -> Any:
            return jax.tree.map(lambda x: _scattered(x[order], share), own)

        def split_sums(own: Any) -> list[Any]:
            if share == 1:
                own = jax.tree.map(lambda x: x[order], own)
            parts = jax.tree.map(lambda x: jnp.split(x, here), own)
            return [
                jax.tree.map(lambda x, k=k: x[k], parts, is_leaf=lambda x: isinstance(x, list)) for k in range(here)
            ]

        def sized(blocks: int, of: Any = None, sharding: Any = None) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((blocks, *x.shape[1:]), of or x.dtype, sharding=sharding), like
            )

        sums = sized(cut.row_blocks, jnp.float32)
        gather = scatter = None
        if share > 1:
            spec, size = P((ROWS, PIECES)), layout.line.size
            cut_over = NamedSharding(mesh, spec)
            whole = sized(cut.row_blocks // share * size, sharding=cut_over)
            mapped = jax.shard_map(gather_keys, mesh=mesh, in_specs=spec, out_specs=P(ROWS), check_vma=False)
            gather = compiler.one(jax.jit(mapped), (whole,), mesh)
            whole = sized(cut.row_blocks * size, jnp.float32, sharding=cut_over)
            mapped = jax.shard_map(scatter_sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            scatter = compiler.one(jax.jit(mapped), (whole,), mesh)
        return cls(
            layout=layout,
            here=here,
            join=compiler.each(jax.jit(join_keys), ([like] * here,), devices),
            gather=gather,
            add=compiler.each(jax.jit(add_sums, donate_argnums=0), (sums, sums), devices) if here > 1 else (),
            scatter=scatter,
            split=compiler.each(jax.jit(split_sums), (sized(cut.row_blocks // share, jnp.float32),), devices),
            mesh=mesh,
        )

    def keys_of_rows(self, parts: ByShard) -> ByShard:
        """Keys and values of the whole row of each shard; shards of a row on a device have the same arrays."""
        found: ByShard = [[] for _ in parts]
        for first in range(0, self.layout.most, self.here):
            rows = [self.join[i](own[first : first + self.here]) for i, own in enumerate(parts)]
            rows = rows if self.gather is None else copies(self.gather(self._along(rows)), self.layout.devices)
            for i, row in enumerate(rows):
                found[i] += [row] * self.here
        return found

    def sums(self, compute: Callable[[int, int], Any]) -> ByShard:
        """Sums over the shards of a row of float32 gradients of its keys and values, which it asks for by device and
        shard: each shard gets those of its own keys and values."""
        found: ByShard = [[] for _ in self.layout.devices]
        for first in range(0, self.layout.most, self.here):
            trees = [SumTree(self.add[i] if self.add else add_sums) for i in range(len(found))]
            for k in range(first, first + self.here):
                for i, tree in enumerate(trees):
                    tree.put(compute(i, k))
            totals = [tree.total() for tree in trees]
            totals = totals if self.scatter is None else copies(self.scatter(self._along(totals)), self.layout.devices)
            for i, total in enumerate(totals):
                found[i] += self.split[i](total)
        return found

    def _along(self, parts: Sequence[Any]) -> Any:
        """Arrays of the devices of this process as global ones, cut along their first axis."""
        place, size = NamedSharding(self.mesh, P((ROWS, PIECES))), self.layout.line.size
        return jax.tree.map(
            lambda *each: jax.make_array_from_single_device_arrays(
                (size * each[0].shape[0], *each[0].shape[1:]), place, list(each)
            ),
            *parts,
        )


def _scattered(x: jax.Array, share: int) -> jax.Array:
    """[M, ...] of each device, in the order of the devices, to its own [M / share, ...]: the sum over the devices.

    Each keeps one half and sends away the other, then keeps one half of that half, and so on.
    """
    x, device, distance = x.reshape(share, -1, *x.shape[1:]), jax.lax.axis_index(PIECES), 1
    while distance < share:
        x = x.reshape(-1, 2, *x.shape[1:])
        odd = (device // distance) % 2 == 1
        kept, sent = jnp.where(odd, x[:, 1], x[:, 0]), jnp.where(odd, x[:, 0], x[:, 1])
        x = kept + jax.lax.ppermute(sent, PIECES, [(i, i ^ distance) for i in range(share)])
        distance *= 2
    return x[0]


class Part(NamedTuple):
    """A subtree of the tree of one row."""

    row: int
    first: int
    """Of its shards, counted within the row."""
    size: int
    """How many."""


def parts_of(shards: range, of_row: int) -> list[Part]:
    """The whole subtrees that a device's neighbouring shards are made of, `of_row` of which are a row's."""
    found = []
    for row in range(shards.start // of_row, (shards.stop - 1) // of_row + 1):
        begin = row * of_row
        own = range(max(shards.start, begin) - begin, min(shards.stop, begin + of_row) - begin)
        found += [Part(row, *subtree) for subtree in subtrees(own)]
    return found


@dataclass(frozen=True)
class UnevenKeyMoves:
    """`KeyMoves` where the devices do not divide the shards: a row may begin and end within a device.

    All keys and values are gathered on each device, which takes the rows of its shards. Gradients are added up on a
    device as far as its shards make whole subtrees of a row's tree. Each sum of a subtree is sent, in parts, to the
    devices of the shards that the parts are of, and these add the rest of the tree.
    """

    layout: ShardLayout
    shards: int
    """Of a row."""
    stack: Programs
    """The keys of a device's shards as one array, filled up to those of the device that has most."""
    gather: Any
    pick: Programs
    """A row of all."""
    add: Programs
    arrange: Programs
    """The parts of a device's sums by the shards that they are for."""
    exchange: Any
    finish: Programs
    """Adds the rest of the tree for each shard of a device."""

    @classmethod
    def compile_moves(cls, layout: ShardLayout, cut: RowCut, like: Any, compiler: Compiler) -> "UnevenKeyMoves":
        """The moves of (keys, values) of a shard such as `like`."""
        size, most, devices = layout.line.size, layout.most, layout.devices
        owned = [layout.shards_of(device) for device in layout.line.devices.flat]
        parts = [parts_of(own, cut.parts) for own in owned]
        most_parts, order = max(map(len, parts)), np.argsort(cut.places)
        # Where each shard is, when those of all devices lie one behind the other.
        slots = np.concatenate([np.arange(len(own)) + most * i for i, own in enumerate(owned)])

        def stack_keys(own: list[Any]) -> Any:
            return jax.tree.map(lambda *each: _filled(jnp.stack(each), most)[None], *own)

        def gather_keys(own: Any) -> Any:
            def rows(x: jax.Array) -> jax.Array:
                by_shard = jax.lax.all_gather(x[0], SHARDS, tiled=True)[slots]  # [shards of all rows, N, ...]
                return by_shard.reshape(-1, cut.row_blocks, *x.shape[3:])[:, cut.places][None]

            return jax.tree.map(rows, own)

        def pick_row(rows: Any, row: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x[0], row, keepdims=False), rows)

        def arranged(own: list[Part]) -> Callable[[list[Any]], Any]:
            numbers = np.array([[each[k] if k < len(each) else -1 for k in range(most)] for each in owned])

            def of_part(x: jax.Array, row: int) -> jax.Array:
                by_shard = x[order].reshape(cut.parts, -1, *x.shape[1:])[numbers % cut.parts]
                is_for = ((numbers // cut.parts) == row).reshape(size, most, *[1] * x.ndim)
                return jnp.where(is_for, by_shard, 0)  # [devices, their shards, N, ...]

            def arrange_sums(sums: list[Any]) -> Any:
                def leaves(*each: jax.Array) -> jax.Array:
                    stacked = [of_part(x, part.row) for x, part in zip(each, own, strict=True)]
                    return _filled(jnp.stack(stacked), most_parts).swapaxes(0, 1)[None]

                return jax.tree.map(leaves, *sums)

            return arrange_sums

        def exchange_sums(own: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.all_to_all(x[0], SHARDS, 0, 0, tiled=True)[None], own)

        def finished(own: range) -> Callable[[Any], list[Any]]:
            def finish_sums(received: Any) -> list[Any]:
                def total(x: jax.Array, k: int, row: int) -> jax.Array:
                    known = {
                        (part.first, part.size): x[0, device, number, k]
                        for device, each in enumerate(parts)
                        for number, part in enumerate(each)
                        if part.row == row
                    }
                    return total_of(known, 0, cut.parts)

                def of_shard(k: int) -> Any:
                    return jax.tree.map(lambda x: total(x, k, own[k] // cut.parts), received)

                return [of_shard(k) for k in range(len(own))]

            return finish_sums

        def along(tree: Any, *axes: int) -> Any:
            """The shapes on all devices of arrays [1, ...] of one."""
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((size, *axes, *x.shape[1:]), x.dtype, sharding=layout.cut), tree
            )

        def mapped(function: Any) -> Any:
            on = P(SHARDS)
            return jax.jit(jax.shard_map(function, mesh=layout.line, in_specs=on, out_specs=on, check_vma=False))

        def for_own(function: Callable[[int], Any], args: Callable[[int], Any]) -> Programs:
            """A program that differs by device, with its arguments, by the number of the device."""
            numbers = [list(layout.line.devices.flat).index(device) for device in devices]
            return [
                compiler.each(jax.jit(function(number)), args(number), [device])[0]
                for number, device in zip(numbers, devices, strict=True)
            ]

        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct((cut.row_blocks, *x.shape[1:]), x.dtype), like)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, layout.count // cut.parts, *x.shape), x.dtype), row)
        sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), row)
        stacked = jax.eval_shape(stack_keys, [like])
        sent = jax.eval_shape(arranged(parts[0]), [sums] * len(parts[0]))
        number = jax.ShapeDtypeStruct((), np.int32)
        return cls(
            layout=layout,
            shards=cut.parts,
            stack=for_own(lambda _: stack_keys, lambda i: ([like] * len(owned[i]),)),
            gather=compiler.one(mapped(gather_keys), (along(stacked),), layout.line),
            pick=compiler.each(jax.jit(pick_row), (rows, number), devices),
            add=compiler.each(jax.jit(add_sums, donate_argnums=0), (sums, sums), devices),
            arrange=for_own(lambda i: arranged(parts[i]), lambda i: ([sums] * len(parts[i]),)),
            exchange=compiler.one(mapped(exchange_sums), (along(sent),), layout.line),
            finish=for_own(lambda i: finished(owned[i]), lambda _: (sent,)),
        )

    @cached_property
    def rows(self) -> list[dict[int, jax.Array]]:
        """The rows that each device has shards of, by number, int32[]."""
        return [
            {row: jax.device_put(np.int32(row), device) for row in sorted({shard // self.shards for shard in own})}
            for device, own in zip(self.layout.devices, self.layout.owned, strict=True)
        ]

    def keys_of_rows(self, parts: ByShard) -> ByShard:
        """Keys and values of the whole row of each shard; shards of a row on a device have the same arrays."""
        rows = self._across(self.gather, [stack(own) for stack, own in zip(self.stack, parts, strict=True)])
        picked = [
            {row: pick(own, number) for row, number in numbers.items()}
            for pick, own, numbers in zip(self.pick, rows, self.rows, strict=True)
        ]
        return [
            [own[shard // self.shards] for shard in shards]
            for own, shards in zip(picked, self.layout.owned, strict=True)
        ]

    def sums(self, compute: Callable[[int, int], Any]) -> ByShard:
        """Sums over the shards of a row of float32 gradients of its keys and values, which it asks for by device and
        shard: each shard gets those of its own keys and values."""
        trees: list[dict[int, SumTree]] = [{} for _ in self.layout.owned]
        for i, k in self.layout.turns:
            row, place = divmod(self.layout.owned[i][k], self.shards)
            trees[i].setdefault(row, SumTree(self.add[i], place)).put(compute(i, k))
        sums = [[part for tree in own.values() for part in tree.sums()] for own in trees]
        arranged = [arrange(own) for arrange, own in zip(self.arrange, sums, strict=True)]
        del sums
        return [finish(own) for finish, own in zip(self.finish, self._across(self.exchange, arranged), strict=True)]

    def _across(self, program: Any, own: list[Any]) -> list[Any]:
        """What a program of all devices gives each device of this process, of what each has."""
        whole = program(jax.tree.map(lambda *each: line_array(self.layout, each), *own))
        return [jax.tree.map(lambda leaf, i=i: leaf.addressable_data(i), whole) for i in range(len(own))]


def _filled(x: jax.Array, count: int) -> jax.Array:
    """[N, ...] to [count, ...], the last ones 0."""
    return jnp.pad(x, ((0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))
