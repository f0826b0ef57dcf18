"""Copies of keys and values, and sums of their gradients, between the virtual shards of a row that is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.train.exact.blocks.block_update import copies
from roxxel_dist.train.exact.compiled_step import SumTree, add_sums
from roxxel_dist.train.exact.layout import Programs, ShardLayout
from roxxel_dist.train.step.compile import Compile, CompileForEach

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
    def compile_moves(
        cls, layout: ShardLayout, cut: RowCut, like: Any, compile_one: Compile, for_each: CompileForEach
    ) -> "KeyMoves":
        """For (keys, values) of a shard such as `like`."""
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
            gather = compile_one(jax.jit(mapped), (whole,), mesh)
            whole = sized(cut.row_blocks * size, jnp.float32, sharding=cut_over)
            mapped = jax.shard_map(scatter_sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            scatter = compile_one(jax.jit(mapped), (whole,), mesh)
        return cls(
            layout=layout,
            here=here,
            join=for_each(jax.jit(join_keys), ([like] * here,), devices),
            gather=gather,
            add=for_each(jax.jit(add_sums, donate_argnums=0), (sums, sums), devices) if here > 1 else (),
            scatter=scatter,
            split=for_each(jax.jit(split_sums), (sized(cut.row_blocks // share, jnp.float32),), devices),
            mesh=mesh,
        )

    def keys_of_rows(self, parts: ByShard) -> ByShard:
        """Those of the whole row of each shard; shards of a row on a device have the same arrays."""
        found: ByShard = [[] for _ in parts]
        for first in range(0, self.layout.most, self.here):
            rows = [self.join[i](own[first : first + self.here]) for i, own in enumerate(parts)]
            rows = rows if self.gather is None else copies(self.gather(self._along(rows)), self.layout.devices)
            for i, row in enumerate(rows):
                found[i] += [row] * self.here
        return found

    def sums(self, compute: Callable[[int, int], Any]) -> ByShard:
        """Of float32 gradients of keys and values of whole rows, which it asks for by device and shard, the sums over
        the shards of a row: each shard gets those of its own keys and values."""
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
