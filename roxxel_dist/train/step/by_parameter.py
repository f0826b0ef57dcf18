"""What of an update goes by the parameter: its decay, the matrices that it is made of, its width, its part in Muon."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from roxxel_dist.model.parametrization import Width
from roxxel_dist.model.split import Matrix

NO_MATRIX = re.compile(r"(^|\.)([^.]*embed[^.]*|head|lm_head|output_head|logits)(\.|$)")
"""Names of embeddings and output heads, which Muon leaves to AdamW."""


def decayed(params: Any) -> Any:
    """Which parameters weight decay concerns: a tree of booleans, False for norms and biases.

    These are arrays of fewer than two dimensions, and, as layers may be stacked, names that end in "bias" or "scale".
    """
    return jax.tree_util.tree_map_with_path(_is_weight, params)


def by_matrix(inner: optax.GradientTransformation, matrices: Mapping[str, Matrix]) -> optax.GradientTransformation:
    """`inner`, which sees the matrices that arrays are made of: each layer by itself, its columns as one axis.

    Parameters are a dictionary by name. The state is a dictionary of two: "apart", and "stacked" with the layers as the
    first axis of each array.
    """

    def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        views = {name: matrices.get(name, Matrix()).view(leaf) for name, leaf in params.items()}
        stacked = {name: leaf for name, leaf in views.items() if matrices.get(name, Matrix()).stacked}
        return {name: leaf for name, leaf in views.items() if name not in stacked}, stacked

    def init(params: Any) -> dict[str, Any]:
        apart, stacked = split(params)
        return {"apart": inner.init(apart), "stacked": jax.vmap(inner.init)(stacked)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        (apart, stacked), (of_apart, of_stacked) = split(updates), split(params)
        new_apart, apart_state = inner.update(apart, state["apart"], of_apart)
        new_stacked, stacked_state = jax.vmap(inner.update)(stacked, state["stacked"], of_stacked)
        views: Any = {**new_apart, **new_stacked}  # pyright: ignore[reportGeneralTypeIssues]
        new = {name: views[name].reshape(leaf.shape) for name, leaf in updates.items()}
        return new, {"apart": apart_state, "stacked": stacked_state}

    return optax.GradientTransformation(init, update)


def by_width(
    kind: str, widths: Mapping[str, Width], matrices: Mapping[str, Matrix], decay: jax.Array
) -> optax.GradientTransformation:
    """Turns the updates of an optimizer into those of mup: multiplies each parameter's learning rate by a factor for
    its width.

    Weight decay follows and has none: a step takes the same share `decay`, float32[], of a weight at every width.
    """

    def rate(path: Any, param: jax.Array) -> float:
        width = widths[_name(path)]
        if kind == "sgd":
            return width.sgd_rate
        is_muon = kind == "muon" and muon_part(matrices, path, param) == "muon"
        return width.muon_rate if is_muon else width.adam_rate

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: Any, change: jax.Array, param: jax.Array) -> jax.Array:
            change = change * rate(path, param)
            return (change - decay * param if _is_weight(path, param) else change).astype(param.dtype)

        return jax.tree_util.tree_map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon_part(matrices: Mapping[str, Matrix], path: Any, param: jax.Array) -> str:
    """The optimizer that a parameter has: "muon" or "adamw"."""
    name = _name(path)
    view = matrices.get(name, Matrix())
    is_matrix = param.ndim == view.stacked + 1 + view.columns
    return "muon" if is_matrix and _is_weight(path, param) and not NO_MATRIX.search(name) else "adamw"


def _is_weight(path: Any, param: jax.Array) -> bool:
    return param.ndim >= 2 and not _name(path).endswith(("bias", "scale"))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
