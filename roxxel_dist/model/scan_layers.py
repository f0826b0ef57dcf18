"""All blocks as one module: each array is stacked, with the block as its first axis, and a loop runs over them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.step_parts import CASTS
from roxxel_dist.model.attention.kv_cache import AttentionMetadata, LayerCache
from roxxel_dist.model.attention.mask import RESIDUALS
from roxxel_dist.model.config import GradientCheckpointing
from roxxel_dist.model.layers import STACKED, DynamicScalar
from roxxel_dist.model.mlp import Balance


def stack_of(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """One module with the stacked arrays of `count` modules, the same as from `count` calls of `make` in a row.

    `make` is traced twice for any `count`. `DynamicScalar`s are not stacked.
    """
    graphdef, keys, before = nnx.split(rngs, nnx.RngKey, ...)
    before = jax.tree.map(jnp.asarray, before)  # a copy: the result of split changes with the streams
    module = make(rngs)  # the first module gives the tree, and the number of keys that each uses
    after = nnx.split(rngs, nnx.RngKey, ...)[2]

    def streams_at(i: Any) -> Any:
        return jax.tree.map(lambda first, second: first + jnp.uint32(i) * (second - first), before, after)

    def leaves(i: jax.Array) -> Any:
        return nnx.split(make(nnx.merge(graphdef, keys, streams_at(i), copy=True)), DynamicScalar, ...)[2]

    nnx.update(module, jax.vmap(leaves)(jnp.arange(count)))
    nnx.update(rngs, streams_at(count))
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node.set_metadata(STACKED, node.get_metadata().get(STACKED, 0) + 1)
    return module


def run_stack(
    blocks: Any,
    x_BxLxD: jax.Array,
    metadata: AttentionMetadata,
    caches: tuple[LayerCache, ...] | None,
    *,
    scan: bool,
    remat: GradientCheckpointing,
    period: int = 1,
) -> tuple[jax.Array, Balance, tuple[LayerCache, ...] | None]:
    """Run all blocks, of `stack_of`, in order: [B, L, dim], the balance of their experts, and the cache of each. The
    call advances their random streams.

    With `scan` one block is compiled for all; with a cache the loop is unrolled, so that each entry is updated in
    place. `period`: so many layers differ, then they come again; a block learns its number from the metadata. `remat`:
    compute each block again in the backward pass, but for the kernel of attention; "products": and but for products
    with weights.
    """
    graphdef, shared, params, streams = nnx.split(blocks, DynamicScalar, nnx.Param, ...)

    def layer(i: int, x_BxLxD: jax.Array, params: Any, streams: Any, cache: LayerCache | None) -> Any:
        # A copy: NNX objects cannot cross jax's trace levels.
        block: Any = nnx.merge(graphdef, shared, params, streams, copy=True)
        own = dataclasses.replace(metadata.layer, number=metadata.layer.number + i)
        x_BxLxD, balance, cache = block(x_BxLxD, metadata._replace(layer=own), cache)
        return x_BxLxD, balance, nnx.split(block, DynamicScalar, nnx.Param, ...)[3], cache

    # In a loop XLA cannot merge the second computation with the first.
    keep = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
    if remat == "products":
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        keep = jax.checkpoint_policies.save_from_both_policies(keep, products)

    def run(i: int, *args: Any) -> Any:
        of_kind = partial(layer, i)
        return (jax.checkpoint(of_kind, prevent_cse=not scan, policy=keep) if remat else of_kind)(*args)

    count = len(jax.tree.leaves(params)[0])
    if scan and caches is None and period == 1:

        def step(x_BxLxD: jax.Array, leaves: Any) -> Any:
            params, streams = leaves
            x_BxLxD, *rest, _ = run(0, x_BxLxD, params, streams, None)
            return x_BxLxD, rest

        x_BxLxD, (balances, streams) = jax.lax.scan(step, x_BxLxD, (params, streams))
        balance = balances._replace(loss=balances.loss.sum())
    elif scan and caches is None and count >= 2 * period:
        x_BxLxD, balance, streams = _scan_periods(run, x_BxLxD, (params, streams), count, period)
    else:
        results = []
        for i, leaves in enumerate(zip(_unstacked(params, count), _unstacked(streams, count), strict=True)):
            x_BxLxD, *rest = run(i, x_BxLxD, *leaves, None if caches is None else caches[i])
            results.append(rest)
        balances, after, updated = zip(*results, strict=True)
        balance, streams = _of_stack(balances), jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)
        caches = None if caches is None else updated
    if not blocks.deterministic:
        nnx.update(blocks, streams)
    return x_BxLxD, balance, caches


def _scan_periods(
    run: Callable[..., Any], x_BxLxD: jax.Array, leaves: Any, count: int, period: int
) -> tuple[jax.Array, Balance, Any]:
    """(the output, the balance of all experts, the stacked streams) of layers that come again after a period: a loop
    over whole periods, and then the layers that are left."""
    whole = count // period

    def layers(x_BxLxD: jax.Array, each: list[Any]) -> Any:
        results = []
        for i, (params, streams) in enumerate(each):
            x_BxLxD, *rest, _ = run(i, x_BxLxD, params, streams, None)
            results.append(rest)
        balances, after = zip(*results, strict=True)
        return x_BxLxD, (_of_stack(balances), jax.tree.map(lambda *each: jnp.stack(each), *after))

    def step(x_BxLxD: jax.Array, leaves: Any) -> Any:
        return layers(x_BxLxD, _unstacked(leaves, period))

    def in_periods(leaf: jax.Array) -> jax.Array:
        return leaf[: whole * period].reshape(whole, period, *leaf.shape[1:])

    x_BxLxD, found = jax.lax.scan(step, x_BxLxD, jax.tree.map(in_periods, leaves))
    (loss_P, *of_layers), streams = found  # of each period the loss, and what its layers have
    of_layers, streams = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (of_layers, streams))
    loss = loss_P.sum()
    if left := count - whole * period:
        last = jax.tree.map(lambda leaf: leaf[whole * period :], leaves)
        x_BxLxD, ((more, *others), after) = layers(x_BxLxD, _unstacked(last, left))
        loss += more
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), (of_layers, streams), (others, after))
        of_layers, streams = joined
    return x_BxLxD, Balance(loss, *of_layers), streams


def _of_stack(layers: Sequence[Balance]) -> Balance:
    losses, *others = zip(*layers, strict=True)
    return Balance(jnp.asarray(sum(losses)), *(jax.tree.map(lambda *each: jnp.stack(each), *other) for other in others))


def layer_of(blocks: Any, index: int) -> Any:
    """A stack of one layer: that of `blocks` with this index."""
    graphdef, shared, layers = nnx.split(blocks, DynamicScalar, ...)
    return nnx.merge(graphdef, shared, jax.tree.map(lambda leaf: leaf[index : index + 1], layers), copy=True)


@jax.named_scope(CASTS)
def _unstacked(state: Any, count: int) -> list[Any]:
    """The state of each layer."""
    leaves, tree = jax.tree.flatten(state)

    def each(leaf: jax.Array) -> list[jax.Array]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return [leaf[i] for i in range(count)]
        # Not by index: the gradient of each layer would be an array for all layers, mostly zeros, to sum.
        return [piece.squeeze(0) for piece in jax.lax.split(leaf, (1,) * count)]

    pieces = list(map(each, leaves))
    return [jax.tree.unflatten(tree, [piece[i] for piece in pieces]) for i in range(count)]
