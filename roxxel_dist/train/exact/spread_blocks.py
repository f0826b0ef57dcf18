"""The update by blocks where the slices of devices are no blocks, as on 3 devices: each device gets one block after the
other, updates it as all others do, and puts what it keeps of it into its slices.

A block is sent as a sum of integers: of each element all devices but one have 0, and the bits of that one are what is
added. So a device has one block whole at a time, and -0.0 stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_update import BlockNumbers, Inputs, copies, line_array
from roxxel_dist.train.exact.blocks import Ownership, Selection
from roxxel_dist.train.exact.layout import SHARDS, Programs, ShardLayout
from roxxel_dist.train.step.compile import Compiler


@dataclass(frozen=True)
class Slice:
    """The place of an array: what a device keeps of it, and its blocks."""

    like: Any
    """As a shape, with sharding."""
    cut: int
    """The dimension of the blocks."""
    size: int
    """Of a block along that."""

    def axes(self, dimension: int) -> tuple[str, ...]:
        """The axes of the mesh that a dimension is cut over."""
        spec = self.like.sharding.spec
        entry = spec[dimension] if dimension < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in names if self.like.sharding.mesh.shape[name] > 1)

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of a block."""
        return tuple(self.size if i == self.cut else size for i, size in enumerate(self.like.shape))

    def _begin(self, own: jax.Array, dimension: int) -> Any:
        """int32[]: where this device's part of a dimension begins."""
        axes = self.axes(dimension)
        return jax.lax.axis_index(axes) * own.shape[dimension] if axes else jnp.int32(0)

    def _others(self) -> list[int]:
        return [i for i in range(len(self.like.shape)) if i != self.cut and self.axes(i)]

    def fetch(self, own: jax.Array, index: jax.Array) -> jax.Array:
        """A block, by its number, of which each device has the part that lies in its slice."""
        at = index * self.size + jnp.arange(self.size) - self._begin(own, self.cut)
        part = jnp.take(own, at, axis=self.cut, mode="clip")
        is_here = (at >= 0) & (at < own.shape[self.cut])
        bits = jnp.where(_in_dimension(is_here, self.cut, own.ndim), _as_bits(part), 0)
        places = [jnp.int32(0)] * own.ndim
        for dimension in (others := self._others()):
            places[dimension] = self._begin(own, dimension)
        if others:
            bits = jax.lax.dynamic_update_slice(jnp.zeros(self.block, bits.dtype), bits, places)
        axes = sum((self.axes(dimension) for dimension in (self.cut, *others)), ())
        bits = jax.lax.psum(bits, axes) if axes else bits
        return jax.lax.bitcast_convert_type(bits, own.dtype)

    def put(self, own: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
        """The slice of a device, with its part of a block."""
        for dimension in self._others():
            begin = self._begin(own, dimension)
            block = jax.lax.dynamic_slice_in_dim(block, begin, own.shape[dimension], dimension)
        width = min(self.size, own.shape[self.cut])
        begin = index * self.size - self._begin(own, self.cut)
        first = jnp.clip(begin, 0, own.shape[self.cut] - width)
        at = first - begin + jnp.arange(width)
        old = jax.lax.dynamic_slice_in_dim(own, first, width, self.cut)
        new = jnp.take(block, at, axis=self.cut, mode="clip")
        new = jnp.where(_in_dimension((at >= 0) & (at < self.size), self.cut, own.ndim), new, old)
        return jax.lax.dynamic_update_slice_in_dim(own, new, first, self.cut)


def _in_dimension(x: jax.Array, dimension: int, count: int) -> jax.Array:
    return x.reshape(*(-1 if i == dimension else 1 for i in range(count)))


def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


@dataclass(frozen=True)
class SpreadArrays:
    """Gives each device blocks of arrays, and takes them back."""

    layout: ShardLayout
    like: Sequence[Any]
    """As shapes, with shardings."""
    fetch: Any
    put: Any

    @classmethod
    def compile_spread(
        cls, layout: ShardLayout, like: Sequence[Any], cuts: Sequence[int], count: int, compiler: Compiler
    ) -> "SpreadArrays":
        """The programs for arrays, with the dimensions along which each is cut into so many blocks."""
        slices = [Slice(leaf, cut, leaf.shape[cut] // count) for leaf, cut in zip(like, cuts, strict=True)]

        def fetch_block(own: list[jax.Array], index: jax.Array) -> list[jax.Array]:
            return [each.fetch(leaf, index) for each, leaf in zip(slices, own, strict=True)]

        def put_block(own: list[jax.Array], block: list[jax.Array], index: jax.Array) -> list[jax.Array]:
            return [each.put(leaf, part, index) for each, leaf, part in zip(slices, own, block, strict=True)]

        specs, whole = [leaf.sharding.spec for leaf in like], NamedSharding(layout.mesh, P())
        blocks = [jax.ShapeDtypeStruct(each.block, each.like.dtype, sharding=whole) for each in slices]
        index = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        fetch = jax.jit(_mapped(fetch_block, layout.mesh, (specs, P()), P()))
        put = jax.jit(_mapped(put_block, layout.mesh, (specs, P(), P()), specs), donate_argnums=0)
        return cls(
            layout=layout,
            like=like,
            fetch=compiler.one(fetch, (list(like), index), layout.mesh),
            put=compiler.one(put, (list(like), blocks, index), layout.mesh),
        )


def _global_array(shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts), dtype=parts[0].dtype)


def _mapped(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def fetch_gradients(owner: Ownership, chunks: Sequence[Any], compiler: Compiler) -> Any:
    """The program that gives each device a block, by its number, of each chunk of gradients, of which a device has
    added up its share."""
    layout, most = owner.layout, owner.most
    begins, ends = (np.array([getattr(share, end) for share in owner.shares]) for end in ("start", "stop"))

    def fetch_gradient(own: list[jax.Array], index: jax.Array) -> list[jax.Array]:
        device = jax.lax.axis_index(SHARDS)
        at = index - jnp.array(begins)[device]
        is_here = (at >= 0) & (index < jnp.array(ends)[device])

        def block(chunk: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(chunk.reshape(most, -1), jnp.clip(at, 0, most - 1))
            return jax.lax.bitcast_convert_type(jax.lax.psum(jnp.where(is_here, _as_bits(row), 0), SHARDS), chunk.dtype)

        return [block(chunk) for chunk in own]

    like = [
        jax.ShapeDtypeStruct((layout.line.size, *chunk.shape[1:]), chunk.dtype, sharding=layout.cut) for chunk in chunks
    ]
    index = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(layout.line, P()))
    mapped = _mapped(fetch_gradient, layout.line, (P(SHARDS), P()), P())
    return compiler.one(jax.jit(mapped), (like, index), layout.line)


@dataclass(frozen=True)
class SpreadGroup:
    """Parameters that every device updates block by block; see `block_update.BlockGroup`."""

    selection: Selection
    params: Leaves
    """As shapes with shardings."""
    arrays: SpreadArrays
    gradients: Any
    update: Programs
    squares: BlockNumbers
    count: int
    """Of all blocks."""

    @cached_property
    def numbers(self) -> list[tuple[jax.Array, jax.Array]]:
        """int32[] of each block on all devices, on the mesh and on the line."""
        layout = self.arrays.layout
        on = [[jax.device_put(np.int32(k), device) for device in layout.devices] for k in range(self.count)]
        mesh, line = (NamedSharding(each, P()) for each in (layout.mesh, layout.line))
        return [(_global_array((), mesh, each), _global_array((), line, each)) for each in on]

    def run(
        self,
        own: list[list[jax.Array]],
        common: list[list[jax.Array]],
        chunks: list[list[jax.Array]],
        grads: list[list[list[jax.Array]]],
        inputs: Inputs,
    ) -> tuple[list[Any], jax.Array]:
        """(the arrays as they are kept, by device; float32[1, count] the squares of the changes).

        It takes what `BlockGroup.run` does.
        """
        layout = self.arrays.layout
        grads.clear()
        slices, whole = zip(self.arrays.like, *own, strict=True), NamedSharding(layout.mesh, P())
        arrays = [_global_array(leaf.shape, leaf.sharding, each) for leaf, *each in slices]
        sums = [line_array(layout, each) for each in zip(*chunks, strict=True)]
        chunks.clear()
        squares: list[list[jax.Array]] = [[] for _ in own]
        for on_mesh, on_line in self.numbers:
            blocks = copies(self.arrays.fetch(arrays, on_mesh), layout.devices)
            found = copies(self.gradients(sums, on_line), layout.devices)
            done = [
                update(block, numbers, grad, *given)
                for update, block, numbers, grad, given in zip(self.update, blocks, common, found, inputs, strict=True)
            ]
            new = zip(*(block for block, _, _ in done), strict=True)
            arrays = self.arrays.put(arrays, [_global_array(each[0].shape, whole, each) for each in new], on_mesh)
            for each, (_, _, square) in zip(squares, done, strict=True):
                each.append(square)
        return copies(arrays, layout.devices), self.squares.run(squares)[0]
