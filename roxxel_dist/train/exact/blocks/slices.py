"""Arrays of which each device keeps a slice (`fsdp`), whole on every device for a while: numbers are only moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.train.exact.layout import ShardLayout, copies
from roxxel_dist.train.exact.reduction import Programs
from roxxel_dist.train.step.compile import Compile, CompileForEach


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
    def compile_gather(cls, layout: ShardLayout, like: Any, compile_one: Compile) -> "Gather":
        """For trees such as `like`."""
        leaves = jax.tree.leaves(like)

        def gather_slices(slices: list[jax.Array]) -> list[jax.Array]:
            return slices

        if not (cut := [leaf for leaf in leaves if is_cut(leaf)]):
            return cls(layout, leaves, None)
        whole = jax.jit(gather_slices, out_shardings=NamedSharding(layout.mesh, P()))
        return cls(layout, leaves, compile_one(whole, (cut,), layout.mesh))

    def run(self, parts: list[Any]) -> list[Any]:
        """By device of this process."""
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
                treedef,
                [next(whole) if is_cut(leaf) else part for leaf, part in zip(self.like, own, strict=True)],
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
    def compile_cut(cls, layout: ShardLayout, like: Any, for_each: CompileForEach) -> "Cut":
        """For trees such as `like`."""
        leaves = jax.tree.leaves(like)
        if not (cut := [leaf for leaf in leaves if is_cut(leaf)]):
            return cls(leaves, ())
        return cls(leaves, [for_each(_taking(cut, device), (cut,), [device])[0] for device in layout.devices])

    def run(self, wholes: list[Any]) -> list[Any]:
        """By device of this process."""
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
