"""The parameters of a checkpoint for a model whose blocks are stacked (`scan_layers`) where the run's are not, or the
other way round."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.lora import A
from roxxel_dist.model.scan_layers import is_stacked, stacked, stacked_name, unstacked
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.train_state import Leaves


def restore_params(store: CheckpointStore, step: int, like: Leaves) -> Leaves:
    """What `CheckpointStore.restore_params` gives and raises, the blocks stacked or apart as those of `like`."""
    kept = check_params(store, step, like)
    found = store.restore_params(step, dict(kept))
    if kept is like:
        return found
    places = {name: leaf.sharding for name, leaf in like.items()}
    made = jax.jit(_turned(like)[1], out_shardings=places)(found)
    return {name: made[name] for name in like}


def check_params(store: CheckpointStore, step: int, like: Mapping[str, Any]) -> Mapping[str, Any]:
    """`like` in the form that the checkpoint has; raises what `CheckpointStore.check_params` does."""
    try:
        store.check_params(step, dict(like))
    except ValueError as error:
        turn = _turned(like)[0]
        described = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in like.items()}
        other: Any = jax.eval_shape(turn, described)
        try:
            store.check_params(step, other)
        except ValueError:
            raise error from None
        return {name: _on_the_mesh(leaf, like) for name, leaf in other.items()}
    return like


def adapters(params: Leaves, scales: Mapping[str, float], like: Mapping[str, Any]) -> tuple[Leaves, dict[str, float]]:
    """(adapters, what each of them counts), the blocks stacked or apart as those of the weights `like`."""
    if any(map(is_stacked, like)) == any(map(is_stacked, params)):
        return params, dict(scales)
    turned: Any = jax.jit(_turned(params)[0])(params)
    return turned, scales_by_form(turned, scales)


def scales_by_form(adapters: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, float]:
    """What each adapter counts, by the names that they have now; `scales` has those of one form or the other.

    Raises:
        ValueError: adapters that are one array now count differently.
    """
    found: dict[str, float] = {}
    for name, scale in scales.items():
        whole = stacked_name(name)
        if found.setdefault(whole, scale) != scale:
            raise ValueError(
                f"the adapters of its blocks count differently ({whole}): use the scan_layers that it was trained with"
            )
    names = (name.removesuffix(A) for name in adapters if name.endswith(A))
    return {name: found[stacked_name(name)] for name in names}


def _turned(like: Mapping[str, Any]) -> Any:
    """(from the form of `like` to the other one, and back)."""
    return (unstacked, stacked) if any(map(is_stacked, like)) else (stacked, unstacked)


def _on_the_mesh(leaf: Any, like: Mapping[str, Any]) -> Any:
    """A shape on the devices of `like`, cut along the first dimension that they divide: it is on its way only.

    Where `like` is on none, nor is it.
    """
    if (place := next(iter(like.values())).sharding) is None:
        return leaf
    mesh = place.mesh
    fits = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    spec = P() if fits is None else P(*(None,) * fits, mesh.axis_names)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
