"""A state of which each device keeps slices (`fsdp`): how it is cut, and how it becomes whole for a while."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.parameter_sharding import fsdp_axis
from roxxel_dist.train.exact.layout import Layout, copies
from roxxel_dist.train.step.compile import Compile

COPIES, SLICES = "copies", "slices"
"""The axes of the devices: those that keep the same slices, and those that keep the slices of one copy."""


@dataclass(frozen=True)
class Cut:
    """How the devices share a state: `slices` of each large array, or 1 where each device keeps the whole."""

    layout: Layout
    slices: int

    @classmethod
    def of(cls, layout: Layout, *trees: Any) -> "Cut":
        """That of trees of `jax.ShapeDtypeStruct`s with shardings.

        Raises UserError where a module asks for another axis than that of fsdp.
        """
        axis = fsdp_axis(layout.mesh)
        for path, leaf in jax.tree.leaves_with_path(trees):
            used = {name for entry in _spec(leaf) for name in entry if layout.mesh.shape[name] > 1}
            if used - {axis} or sum(axis in entry for entry in _spec(leaf)) > 1:
                name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
                raise UserError(
                    f"virtual_shards cuts arrays over {axis!r} alone, and {name} is partitioned as "
                    f" {leaf.sharding.spec}: leave its partitioning out, or set virtual_shards to 0"
                )
        is_cut = any(entry for leaf in jax.tree.leaves(trees) for entry in _spec(leaf))
        return cls(layout, layout.mesh.shape[axis] if is_cut else 1)

    @property
    def mesh(self) -> Mesh:
        """The devices, in the order of their shards, as [copies, slices]."""
        line = self.layout.line.devices
        return Mesh(line.reshape(-1, self.slices), (COPIES, SLICES), axis_types=(AxisType.Auto,) * 2)

    def dimensions(self, tree: Any) -> list[int | None]:
        """Of each leaf, a `jax.ShapeDtypeStruct` with sharding, the dimension that it is cut along, if any."""
        if self.slices == 1:
            return [None] * len(jax.tree.leaves(tree))
        return [next((i for i, e in enumerate(_spec(leaf)) if e), None) for leaf in jax.tree.leaves(tree)]

    def sharding(self, dimension: int | None) -> NamedSharding:
        """Of an array that is cut along a dimension."""
        return NamedSharding(self.mesh, P() if dimension is None else P(*[None] * dimension, SLICES))

    def part(self, shape: Sequence[int], dimension: int | None) -> tuple[int, ...]:
        """The shape of a slice."""
        return tuple(size // self.slices if i == dimension else size for i, size in enumerate(shape))

    def numbers(self) -> list[jax.Array]:
        """int32[]: which slice each device of this process keeps."""
        line = list(self.layout.line.devices.flat)
        return [jax.device_put(np.int32(line.index(device) % self.slices), device) for device in self.layout.devices]


def _spec(leaf: Any) -> list[tuple[str, ...]]:
    entries = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


@dataclass(frozen=True)
class Gather:
    """Gives each device the whole of arrays of which it keeps slices: nothing is computed."""

    cut: Cut
    shapes: Sequence[Any]
    """Of the whole arrays."""
    dimensions: Sequence[int | None]
    program: Any
    """None where nothing is cut."""

    @classmethod
    def compiled(cls, cut: Cut, shapes: Sequence[Any], dimensions: Sequence[int | None], compile_one: Compile) -> Any:
        """For arrays of these shapes."""
        if all(dimension is None for dimension in dimensions):
            return cls(cut, shapes, dimensions, None)

        def gather_slices(arrays: list[jax.Array]) -> list[jax.Array]:
            return arrays

        args = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut.sharding(dimension))
            for leaf, dimension in zip(shapes, dimensions, strict=True)
            if dimension is not None
        ]
        whole = jax.jit(gather_slices, out_shardings=NamedSharding(cut.mesh, P()))
        return cls(cut, shapes, dimensions, compile_one(whole, (args,), cut.mesh))

    def run(self, slices: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """The whole arrays, by device of this process, from the slices of each."""
        if self.program is None:
            return slices
        args = [
            jax.make_array_from_single_device_arrays(leaf.shape, self.cut.sharding(dimension), [*parts])
            for leaf, dimension, parts in zip(self.shapes, self.dimensions, zip(*slices, strict=True), strict=True)
            if dimension is not None
        ]
        whole = [iter(own) for own in copies(self.program(args), self.cut.layout.devices)]
        return [
            [part if dimension is None else next(found) for part, dimension in zip(own, self.dimensions, strict=True)]
            for own, found in zip(slices, whole, strict=True)
        ]


@dataclass(frozen=True)
class TreeGather:
    """`Gather` for trees of one structure."""

    gather: Gather

    @classmethod
    def compiled(cls, cut: Cut, like: Any, compile_one: Compile) -> "TreeGather":
        """For trees such as `like`, of `jax.ShapeDtypeStruct`s with shardings."""
        return cls(Gather.compiled(cut, jax.tree.leaves(like), cut.dimensions(like), compile_one))

    def run(self, trees: list[Any]) -> list[Any]:
        """Whole trees, by device of this process, from those of slices."""
        if self.gather.program is None:
            return trees
        treedef = jax.tree.structure(trees[0])
        whole = self.gather.run([jax.tree.leaves(tree) for tree in trees])
        return [jax.tree.unflatten(treedef, leaves) for leaves in whole]
