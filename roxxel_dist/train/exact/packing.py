"""A tree of arrays as one long array a type, so that few arrays are added up and sent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Packed = dict[str, jax.Array]
"""A type's name to [1, N]; the first axis is for the devices, along which such arrays become a global one."""
CUT = " cut"
"""Ends the names of packed arrays whose parts lie in slices."""


def wide(dtype: Any) -> Any:
    """The type that numbers are added up in: a sum of bfloat16 loses what is small."""
    return jnp.promote_types(dtype, jnp.float32)


def pack(tree: Any) -> Packed:
    """All leaves of a tree, flat and behind each other, by their types for sums."""
    by_type: dict[str, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        kind = wide(leaf.dtype)
        by_type.setdefault(kind.name, []).append(leaf.astype(kind).reshape(-1))
    return {name: jnp.concatenate(leaves)[None] for name, leaves in by_type.items()}


def unpack(packed: Mapping[str, jax.Array], like: Any) -> Any:
    """The tree of which `pack` made these, leaves in their types for sums; `like` has its shapes and types."""
    leaves, treedef = jax.tree.flatten(like)
    places, out = dict.fromkeys(packed, 0), []
    for leaf in leaves:
        name = wide(leaf.dtype).name
        start, stop = places[name], places[name] + leaf.size
        out.append(packed[name][0, start:stop].reshape(leaf.shape))
        places[name] = stop
    return jax.tree.unflatten(treedef, out)


@dataclass(frozen=True)
class Owners:
    """Which device adds up which part of a tree: each has one of its pieces, and keeps slices of some leaves.

    Devices are in the order [copies, slices]: those along "slices" keep a slice each, those along "copies" the same.
    """

    like: Any
    """The tree's shapes and types."""
    cuts: Sequence[int | None]
    """Of each of its leaves, the dimension that its slices are cut along; None where all devices keep the whole."""
    slices: int
    devices: int

    def copies(self, name: str) -> int:
        """How many devices keep the same part of the packed array of this name."""
        return self.devices // (self.slices if name.endswith(CUT) else 1)

    def pieces(self, packed: Packed) -> Packed:
        """[devices, M]: the parts of a packed tree by the device that adds them, the last ones filled with zeros."""
        whole, cut = self._divided(unpack(packed, self.like), self.slices)
        out = {name: _pieces(leaf[None], self.devices) for name, leaf in whole.items()}
        return out | {name + CUT: _pieces(leaf, self.devices) for name, leaf in cut.items()}

    def unpack(self, total: Packed) -> Any:
        """What a device keeps of the tree, from {name: [1, M]}: leaves whole, or its slices of them."""
        leaves, treedef = jax.tree.flatten(self.like)
        places, out = dict.fromkeys(total, 0), []
        for leaf, cut in zip(leaves, self.cuts, strict=True):
            shape = list(leaf.shape)
            if cut is not None:
                shape[cut] //= self.slices
            name = wide(leaf.dtype).name + ("" if cut is None else CUT)
            start, stop = places[name], places[name] + math.prod(shape)
            out.append(total[name][0, start:stop].reshape(shape))
            places[name] = stop
        return jax.tree.unflatten(treedef, out)

    def _divided(self, tree: Any, slices: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """(whole leaves, [M] by type; those in slices, [slices, M] by type)."""
        whole: dict[str, list[jax.Array]] = {}
        sliced: dict[str, list[jax.Array]] = {}
        for leaf, cut in zip(jax.tree.leaves(tree), self.cuts, strict=True):
            if cut is None:
                whole.setdefault(leaf.dtype.name, []).append(leaf.reshape(-1))
            else:
                shape = (*leaf.shape[:cut], slices, leaf.shape[cut] // slices, *leaf.shape[cut + 1 :])
                in_front = jnp.moveaxis(leaf.reshape(shape), cut, 0)
                sliced.setdefault(leaf.dtype.name, []).append(in_front.reshape(slices, -1))
        return (
            {name: jnp.concatenate(leaves) for name, leaves in whole.items()},
            {name: jnp.concatenate(leaves, 1) for name, leaves in sliced.items()},
        )


def _pieces(of_slices: jax.Array, devices: int) -> jax.Array:
    """[slices, M] to [devices, M']: each slice in as many pieces as there are copies of it, which are in front."""
    slices, size = of_slices.shape
    copies = devices // slices
    filled = jnp.pad(of_slices, ((0, 0), (0, -size % copies)))
    return filled.reshape(slices, copies, -1).swapaxes(0, 1).reshape(devices, -1)
