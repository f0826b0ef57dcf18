"""What of an update goes by the parameter: its decay, the matrices that it is made of, its width, its part in Muon."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from roxxel_dist.model.parametrization import Width
from roxxel_dist.model.split import Matrix
from roxxel_dist.model.user_code import is_function

NO_MATRIX = re.compile(r"(^|\.)([^.]*embed[^.]*|head|lm_head|output_head|logits)(\.|$)")
"""Names of embeddings and output heads, which Muon leaves to AdamW."""


def decay_mask(params: Any, matrices: Mapping[str, Matrix] | None = None) -> Any:
    """Which parameters weight decay concerns: a tree of booleans, False for norms and biases.

    These are vectors, also where several are stacked or have their columns along several axes, as `matrices` says by
    name, and names that end in "bias" or "scale".
    """
    return jax.tree_util.tree_map_with_path(partial(_is_weight, matrices or {}), params)


def map_matrices(inner: optax.GradientTransformation, matrices: Mapping[str, Matrix]) -> optax.GradientTransformation:
    """`inner`, which sees the matrices that arrays are made of: each layer, and each expert of a layer, by itself, its
    columns as one axis.

    Parameters are a dictionary by name. The state is a dictionary: "apart" of arrays that are one matrix, "stacked" of
    those that have a leading axis of matrices, "stacked_2" of those that have two, and so on; these axes stay the first
    ones of its arrays.
    """

    def split(params: Any) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {0: {}}
        for name, leaf in params.items():
            matrix = matrices.get(name, Matrix())
            found.setdefault(matrix.stacked, {})[name] = matrix.view(leaf)
        return dict(sorted(found.items()))

    def each(function: Any, depth: int) -> Any:
        for _ in range(depth):
            function = jax.vmap(function)
        return function

    def key(depth: int) -> str:
        return ("apart", "stacked")[depth] if depth < 2 else f"stacked_{depth}"

    def init(params: Any) -> dict[str, Any]:
        return {key(depth): each(inner.init, depth)(views) for depth, views in split(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        new: dict[str, Any] = {}
        states, of_params = {}, split(params)
        for depth, views in split(updates).items():
            changes, states[key(depth)] = each(inner.update, depth)(views, state[key(depth)], of_params[depth])
            new |= changes
        return {name: new[name].reshape(leaf.shape) for name, leaf in updates.items()}, states

    return optax.GradientTransformation(init, update)


def scale_by_width(
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
            return (change - decay * param if _is_weight(matrices, path, param) else change).astype(param.dtype)

        return jax.tree_util.tree_map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon_part(matrices: Mapping[str, Matrix], path: Any, param: jax.Array) -> str:
    """The optimizer that a parameter has: "muon" or "adamw"."""
    name = _name(path)
    is_matrix = matrices.get(name, Matrix()).count(param) > 0
    return "muon" if is_matrix and _is_weight(matrices, path, param) and not NO_MATRIX.search(name) else "adamw"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are updated alike."""

    optimizer: str
    """The optimizer that updates them; "none" for frozen ones."""
    weight_decay: bool | None
    """Whether it decays them; None where that is not known, as of an optimizer of the user's own."""
    arrays: tuple[str, ...]
    """Their names."""
    matrices: int
    """How many matrices they are, each of which muon and adafactor take by itself; 0 for vectors and other arrays."""
    parameters: int


def groups_of(
    optimizer: str, params: Mapping[str, Any], matrices: Mapping[str, Matrix], frozen: Mapping[str, Any]
) -> tuple[ParameterGroup, ...]:
    """Which optimizer updates which parameters, of arrays by name that may be abstract; `frozen` are updated by none.

    `optimizer` is a name of `OPTIMIZERS`, or a function of the user's.
    """
    found: dict[tuple[str, bool | None, bool], list[str]] = {}
    for name, leaf in params.items():
        path = (jax.tree_util.DictKey(name),)
        part = muon_part(matrices, path, leaf) if optimizer == "muon" else optimizer
        is_weight = _is_weight(matrices, path, leaf)  # a bias with several axes, as of attention in Flax, is no matrix
        key = part, is_weight, is_weight and matrices.get(name, Matrix()).count(leaf) > 0
        # An optimizer of the user's gets arrays as they are.
        found.setdefault((part, None, False) if is_function(optimizer) else key, []).append(name)
    if frozen:
        found["none", False, False] = list(frozen)
    leaves, groups = {**frozen, **params}, list[ParameterGroup]()
    for (part, weight, is_matrix), names in sorted(found.items(), key=lambda item: (item[0][0] != "muon", str(item))):
        counts = (matrices.get(name, Matrix()).count(leaves[name]) for name in names) if is_matrix else ()
        size = sum(leaves[name].size for name in names)
        group = ParameterGroup(
            optimizer=part, weight_decay=weight, arrays=tuple(names), matrices=sum(counts), parameters=size
        )
        groups.append(group)
    return tuple(groups)


def _is_weight(matrices: Mapping[str, Matrix], path: Any, param: jax.Array) -> bool:
    name = _name(path)
    view = matrices.get(name, Matrix())
    return param.ndim >= view.stacked + view.columns + 1 and not name.endswith(("bias", "scale"))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
