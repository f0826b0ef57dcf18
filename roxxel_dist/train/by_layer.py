"""An optimizer for stacked layers: each is treated as if it were alone."""

from typing import Any

import jax
import optax

from roxxel_dist.model.stack import is_stacked


def by_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, for which each layer of a stacked array (`model.stack.is_stacked`) is an array of its own.

    What looks at a whole array (a norm, rows and columns, the number of dimensions) so sees what it would see without
    stacking. Parameters are a dictionary by name. The state is a dictionary of two: "apart", and "stacked" with the
    layers as the first axis of each array.
    """

    def init(params: Any) -> dict[str, Any]:
        apart, stacked = _split(params)
        return {"apart": inner.init(apart), "stacked": jax.vmap(inner.init)(stacked)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        (apart, stacked), (of_apart, of_stacked) = _split(updates), _split(params)
        new_apart, apart_state = inner.update(apart, state["apart"], of_apart)
        new_stacked, stacked_state = jax.vmap(inner.update)(stacked, state["stacked"], of_stacked)
        found: Any = {**new_apart, **new_stacked}  # pyright: ignore[reportGeneralTypeIssues]
        return {name: found[name] for name in updates}, {"apart": apart_state, "stacked": stacked_state}

    return optax.GradientTransformation(init, update)


def _split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {name: leaf for name, leaf in params.items() if not is_stacked(name)},
        {name: leaf for name, leaf in params.items() if is_stacked(name)},
    )
