"""Blocks as one: each of their arrays stacked, and a loop over them.

A compiler sees one block however many there are. With `scan_layers` the array `blocks.0.attention.qkv.kernel` and its
likes are one array `blocks.attention.qkv.kernel`, whose first axis is the block.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.kv_cache import Held, Reading
from roxxel_dist.model.layers import Setting

BLOCKS = "blocks"
"""The attribute of a Transformer, and the beginning of the names of all that is in it."""
_APART = re.compile(rf"{BLOCKS}\.(\d+)\.(.+)")


def is_stacked(name: str) -> bool:
    """Whether an array of that name has the blocks as its first axis."""
    return name.startswith(f"{BLOCKS}.") and not _APART.fullmatch(name)


def stacked_name(name: str) -> str:
    """The name that an array, or a module, has where the blocks are stacked; the same of what is in none."""
    return f"{BLOCKS}.{apart[2]}" if (apart := _APART.fullmatch(name)) else name


def stacked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the names of a Transformer with `scan_layers`, from those of one without; both ways it is pure.

    Names in other places stay, and so does a mapping that is stacked already.
    """
    found: dict[str, Any] = {}
    layers: dict[str, dict[int, Any]] = {}
    for name, leaf in params.items():
        if (apart := _APART.fullmatch(name)) is None:
            found[name] = leaf
        else:
            whole = f"{BLOCKS}.{apart[2]}"
            found.setdefault(whole, None)  # its place among the others
            layers.setdefault(whole, {})[int(apart[1])] = leaf
    return found | {name: jnp.stack([by[i] for i in range(len(by))]) for name, by in layers.items()}


def unstacked(params: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `stacked`: arrays by the names of a Transformer without `scan_layers`."""
    found: dict[str, Any] = {}
    for name, leaf in params.items():
        if not is_stacked(name):
            found[name] = leaf
            continue
        inside = name.removeprefix(f"{BLOCKS}.")
        found |= {f"{BLOCKS}.{i}.{inside}": leaf[i] for i in range(leaf.shape[0])}
    return found


def stack_of(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """One module with the arrays of `count` stacked: those that as many calls of `make` would have, one after another.

    It is traced twice, however many there are. `Setting`s are not stacked.
    """
    graphdef, keys, before = nnx.split(rngs, nnx.RngKey, ...)
    before = jax.tree.map(jnp.asarray, before)  # a copy: what comes of split changes with the streams
    module = make(rngs)  # the first tells the tree, and how many keys one takes
    after = nnx.split(rngs, nnx.RngKey, ...)[2]

    def moved(i: Any) -> Any:
        return jax.tree.map(lambda first, second: first + jnp.uint32(i) * (second - first), before, after)

    def leaves(i: jax.Array) -> Any:
        return _taken(make(nnx.merge(graphdef, keys, moved(i), copy=True)))

    nnx.update(module, jax.vmap(leaves)(jnp.arange(count)))
    nnx.update(rngs, moved(count))
    return module


def _taken(module: nnx.Module) -> Any:
    """The state of a module without its settings."""
    return nnx.split(module, Setting, ...)[2]


def run_stack(
    blocks: Any, x_BxLxD: jax.Array, reading: Reading, held: Held | None, *, remat: bool
) -> tuple[jax.Array, jax.Array, Held | None]:
    """All blocks one after another: what `Block` returns, with balances added up and `held` stacked.

    Args:
        blocks: from `stack_of`; its random streams go on as the call goes.
        x_BxLxD: what the first one reads.
        reading: what all of them read.
        held: what a cache holds for them, stacked.
        remat: compute each block again in the backward pass.
    """
    graphdef, shared, params, rest = nnx.split(blocks, Setting, nnx.Param, ...)

    def layer(carry: tuple[jax.Array, jax.Array], each: Any) -> Any:
        (x_BxLxD, balance), (params, rest, held) = carry, each
        # A copy: NNX objects do not cross jax's trace levels.
        block: Any = nnx.merge(graphdef, shared, params, rest, copy=True)
        x_BxLxD, of_block, held = block(x_BxLxD, reading, held)
        return (x_BxLxD, balance + of_block), (nnx.split(block, Setting, nnx.Param, ...)[3], held)

    start = x_BxLxD, jnp.zeros((), jnp.float32)
    # In a loop there is nothing that XLA could merge the second computation with.
    run = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    (x_BxLxD, balance), (rest, held) = jax.lax.scan(run, start, (params, rest, held))
    if not blocks.deterministic:
        nnx.update(blocks, rest)
    return x_BxLxD, balance, held
