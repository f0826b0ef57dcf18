"""A tree of arrays as one long array a type, so that few arrays are added up and sent."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

TILE = 1024
"""Numbers of a piece are a multiple of this. A TPU lays long arrays out in such tiles, and its compiler makes a sum of
the gather of other pieces: twice the bytes, and -0.0 + 0.0 is 0.0."""
Packed = dict[str, jax.Array]
"""A type's name to [1, N]; the first axis is for the devices, along which such arrays become a global one."""


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


def pieces(packed: Packed, devices: int) -> Packed:
    """[devices, M]: packed arrays in a piece for each device that adds one up, the last ones filled with zeros."""
    return {
        name: jnp.pad(array[0], (0, -array.shape[1] % (devices * TILE))).reshape(devices, -1)
        for name, array in packed.items()
    }
