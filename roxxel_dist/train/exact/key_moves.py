"""Copies of keys and values, and sums of their gradients, between the virtual shards of a row that is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.train.exact.block_update import copies
from roxxel_dist.train.exact.compiled_step import SumTree, add_sums, subtrees, total_of
from roxxel_dist.train.exact.layout import Programs, ShardLayout
from roxxel_dist.train.step.compile import Compiler

ROWS, PIECES = "rows", "pieces"
"""The axes of the devices: groups, and those of a group, which have whole rows together."""
ByShard = list[list[Any]]
"""Something of each shard of each device of this process."""


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
class KeyMoves:
    """Moves keys and values of shards to all devices of their group, and sums of their gradients back.

    A group is as few neighbouring devices as have whole rows: one, or several; all where the devices do not divide the
    shards, as a row may then begin and end within a device. Gradients are added up on a device as far as its shards
    make whole subtrees of a row's tree. Each sum of a subtree is sent, in parts, to the devices of the shards that the
    parts are of, and these add the rest of the tree.
    """

    layout: ShardLayout
    row: int
    """Shards of a row."""
    group: int
    """Shards of a group."""
    mesh: Mesh
    stack: Programs
    """The keys of a device's shards as one array, filled up to those of the device that has most."""
    gather: Any
    """All rows of a group."""
    add: Programs
    """Empty where a device has one shard."""
    arrange: Programs
    """The parts of a device's sums by the shards that they are for."""
    exchange: Any
    finish: Programs
    """Adds the rest of the tree for each shard of a device."""

    @classmethod
    def compile_moves(cls, layout: ShardLayout, cut: RowCut, like: Any, compiler: Compiler) -> "KeyMoves":
        """The moves of (keys, values) of a shard such as `like`."""
        most, every = layout.most, list(layout.line.devices.flat)
        size = cut.parts // min(most, cut.parts) if layout.is_even else len(every)
        mesh = Mesh(layout.line.devices.reshape(-1, size), (ROWS, PIECES), axis_types=(AxisType.Auto,) * 2)
        owned = [layout.shards_of(device) for device in every[:size]]  # other groups are as the first
        parts = [parts_of(own, cut.parts) for own in owned]
        # The shard in each of the places that a device has for its own, and where each shard is, and each block of it.
        numbers = np.array([[each[k] if k < len(each) else -1 for k in range(most)] for each in owned])
        places = np.flatnonzero(numbers.reshape(-1) >= 0)[:, None] * cut.blocks + np.arange(cut.blocks)
        of_rows = places.reshape(-1, cut.row_blocks)[:, cut.places]
        of_shards, row_of = cut.of_parts.reshape(cut.parts, -1)[numbers % cut.parts], numbers // cut.parts

        def stack_keys(own: list[Any]) -> Any:
            return jax.tree.map(lambda *each: _filled(jnp.stack(each), most)[None], *own)

        def gather_keys(own: Any) -> list[Any]:
            def row(x: jax.Array, blocks: np.ndarray) -> jax.Array:
                return x.reshape(-1, *x.shape[2:])[blocks]

            group = jax.tree.map(lambda x: jax.lax.all_gather(x[0], PIECES, tiled=True), own)  # [shards, N, ...]
            return [jax.tree.map(lambda x, blocks=blocks: row(x, blocks), group) for blocks in of_rows]

        def arranged(own: list[Part]) -> Callable[[list[Any]], Any]:
            def of_part(x: jax.Array, row: int) -> jax.Array:
                return jnp.where((row_of == row).reshape(*row_of.shape, *[1] * x.ndim), x[of_shards], 0)

            def arrange_sums(sums: list[Any]) -> Any:
                def leaves(*each: jax.Array) -> jax.Array:
                    stacked = [of_part(x, part.row) for x, part in zip(each, own, strict=True)]
                    return _filled(jnp.stack(stacked), max(map(len, parts))).swapaxes(0, 1)[None]

                return jax.tree.map(leaves, *sums)  # [1, devices, parts, their shards, N, ...]

            return arrange_sums

        def exchange_sums(own: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.all_to_all(x[0], PIECES, 0, 0, tiled=True)[None], own)

        def finished(own: range) -> Callable[[Any], list[Any]]:
            def total(x: jax.Array, k: int) -> jax.Array:
                known = {
                    (part.first, part.size): x[0, device, number, k]
                    for device, each in enumerate(parts)
                    for number, part in enumerate(each)
                    if part.row == own[k] // cut.parts
                }
                return total_of(known, 0, cut.parts)

            def finish_sums(received: Any) -> list[Any]:
                return [jax.tree.map(lambda x, k=k: total(x, k), received) for k in range(len(own))]

            return finish_sums

        def across(function: Any, own: Any, out: P) -> Any:
            """A program of all devices, of arrays [1, ...] of each."""
            over = P((ROWS, PIECES))
            whole = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((len(every), *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, over)),
                own,
            )
            mapped = jax.shard_map(function, mesh=mesh, in_specs=over, out_specs=out, check_vma=False)
            return compiler.one(jax.jit(mapped), (whole,), mesh)

        def for_own(function: Callable[[int], Any], args: Callable[[int], Any]) -> Programs:
            """A program that differs by device, with its argument, by the number of the device in its group."""
            numbers = [every.index(device) % size for device in layout.devices]
            return [
                compiler.each(jax.jit(function(number)), (args(number),), [device])[0]
                for number, device in zip(numbers, layout.devices, strict=True)
            ]

        sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct((cut.row_blocks, *x.shape[1:]), jnp.float32), like)
        sent = jax.eval_shape(arranged(parts[0]), [sums] * len(parts[0]))
        return cls(
            layout=layout,
            row=cut.parts,
            group=layout.count * size // len(every),
            mesh=mesh,
            stack=for_own(lambda _: stack_keys, lambda i: [like] * len(owned[i])),
            gather=across(gather_keys, jax.eval_shape(stack_keys, [like]), P(ROWS)),
            add=compiler.each(jax.jit(add_sums, donate_argnums=0), (sums, sums), layout.devices) if most > 1 else (),
            arrange=for_own(lambda i: arranged(parts[i]), lambda i: [sums] * len(parts[i])),
            exchange=across(exchange_sums, sent, P((ROWS, PIECES))),
            finish=for_own(lambda i: finished(owned[i]), lambda _: sent),
        )

    def keys_of_rows(self, parts: ByShard) -> ByShard:
        """Keys and values of the whole row of each shard; shards of a row on a device have the same arrays."""
        rows = self._across(self.gather, [stack(own) for stack, own in zip(self.stack, parts, strict=True)])
        return [
            [own[shard % self.group // self.row] for shard in shards]
            for own, shards in zip(rows, self.layout.owned, strict=True)
        ]

    def sums(self, compute: Callable[[int, int], Any]) -> ByShard:
        """Sums over the shards of a row of float32 gradients of its keys and values, which it asks for by device and
        shard: each shard gets those of its own keys and values."""
        trees: list[dict[int, SumTree]] = [{} for _ in self.layout.owned]
        for i, k in self.layout.turns:
            row, place = divmod(self.layout.owned[i][k], self.row)
            trees[i].setdefault(row, SumTree(self.add[i] if self.add else add_sums, place)).put(compute(i, k))
        sums = [[part for tree in own.values() for part in tree.sums()] for own in trees]
        arranged = [arrange(own) for arrange, own in zip(self.arrange, sums, strict=True)]
        del sums
        return [finish(own) for finish, own in zip(self.finish, self._across(self.exchange, arranged), strict=True)]

    def _across(self, program: Any, parts: Sequence[Any]) -> list[Any]:
        """What a program of all devices gives each device of this process, of arrays [1, ...] of each."""
        place, size = NamedSharding(self.mesh, P((ROWS, PIECES))), self.mesh.size
        whole = jax.tree.map(
            lambda *each: jax.make_array_from_single_device_arrays((size, *each[0].shape[1:]), place, list(each)),
            *parts,
        )
        return copies(program(whole), self.layout.devices)


def _filled(x: jax.Array, count: int) -> jax.Array:
    """[N, ...] to [count, ...], the last ones 0."""
    return jnp.pad(x, ((0, count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))
