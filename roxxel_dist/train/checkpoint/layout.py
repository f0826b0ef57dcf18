"""Checkpoints and weights of layout 1, read as those of layout 2.

In layout 1 the blocks of a Transformer were apart (`blocks.0.attention.qkv.kernel`) or, with `scan_layers`, stacked as
they are now; qkv was [D, (H + 2 G) K], all queries, then all keys, then all values, and is [D, G, H / G + 2, K];
gate_up was [D, 2 F], called `up` where there was no gate, and is [D, 2, F] or [D, 1, F].
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.model.attention import grouped

LAYOUT = 2
_BLOCKS = re.compile(r"(^|[./])blocks\.(?=\D)")
_ONE_BLOCK = re.compile(r"(^|[./])blocks\.\d+\.")
_QKV = re.compile(r"(^|[./])blocks\.attention\.qkv\.(kernel|lora_b)$")


def convert(old: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Arrays of layout 2, of these `shapes`, from those of layout 1; pure.

    Both are by name, of parameters or of the leaves of a whole train state, such as
    "opt_state/1/0/mu/blocks.0.attention.qkv.kernel". Raises ValueError where they are of another model or optimizer.
    """
    arrays = {}
    for name, shape in shapes.items():
        names = sources(name, old)
        if not names:
            raise UserError(f"it has no {name}")
        xp = np if isinstance(old[names[0]], np.ndarray) else jnp
        array = xp.stack([old[layer] for layer in names]) if _ONE_BLOCK.search(names[0]) else old[names[0]]
        param = name.rpartition("/")[2]
        heads = tuple(shapes.get(f"params/{param}", shapes.get(param, ())))[-3:] if _QKV.search(name) else ()
        if heads and array.shape[-1] == prod(heads):  # moments, and sums over the columns of factored ones, too
            array = grouped(array, heads)
        if array.ndim and prod(array.shape) != prod(shape):
            raise UserError(f"{name} is {tuple(array.shape)} in it and {tuple(shape)} here")
        arrays[name] = array.reshape(shape) if array.ndim else xp.broadcast_to(array, shape)
    return arrays


def sources(name: str, old: Collection[str]) -> list[str]:
    """The names in layout 1 of the arrays that make up `name`: one, or one per block; none if there are none."""
    for path in _paths(name):
        for ours in (path, path.replace("feedforward.gate_up", "feedforward.up")):
            if ours in old:
                return [ours]
            layers: list[str] = []
            while _BLOCKS.search(ours) and (layer := _BLOCKS.sub(rf"\g<1>blocks.{len(layers)}.", ours)) in old:
                layers.append(layer)
            if layers:
                return layers
    return []


def _paths(name: str) -> Iterator[str]:
    """With `scan_layers` every optimizer's state was two: of stacked arrays, and of those apart."""
    yield name
    yield re.sub("^(opt_state/1/)(apart|stacked)/", r"\1", name)
    yield name.replace("opt_state/1/", f"opt_state/1/{'stacked' if _BLOCKS.search(name) else 'apart'}/", 1)


def old_tree(saved: Collection[str], like: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What to read of a checkpoint of layout 1, by name: shapes, each cut over the mesh, for it is on its way only.

    `saved` and `shapes` are the names and the shapes of its arrays, `like` shapes, types and shardings to make.
    """
    tree = {}
    for name, leaf in like.items():
        for source in sources(name, saved):
            shape, sharding = tuple(shapes[source]), leaf.sharding
            if isinstance(sharding, NamedSharding):
                mesh = sharding.mesh
                cut = next((i for i, size in enumerate(shape) if size % mesh.size == 0), None)
                sharding = NamedSharding(mesh, P() if cut is None else P(*(None,) * cut, mesh.axis_names))
            tree[source] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return tree
