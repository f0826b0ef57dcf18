"""A module as flat leaves: what is trained, what is frozen, and what else it holds.

The model is split once. Its leaves travel as dictionaries from a parameter's name to its array, which cost a fraction
of what NNX states or objects cost at the border of a jitted call, and are merged into a module again while tracing.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.parameter_sharding import Axes
from roxxel_dist.model.lora import LoRAParam, scales_of
from roxxel_dist.model.setting import FULL_PRECISION, Setting

Leaves = dict[str, jax.Array]


@dataclass(frozen=True)
class Part:
    """One kind of a module's variables: the names of its leaves and the tree that they make."""

    names: tuple[str, ...]
    tree: Any
    asked: tuple[P | None, ...]
    """How the module asks each leaf to be partitioned, in names of mesh axes."""
    uncast: frozenset[str]
    """Leaves that compute in the type that they are stored in: those that the module marks `FULL_PRECISION`."""

    def state(self, leaves: Mapping[str, Any]) -> Any:
        """The NNX state made of these leaves; others are left out."""
        return jax.tree.unflatten(self.tree, [leaves[name] for name in self.names])


@dataclass(frozen=True)
class ModelParts:
    """A module taken apart: what does not change while training, in its two modes."""

    training: Any
    """Graph definition with dropout on."""
    evaluating: Any
    """Graph definition with dropout off."""
    params: Part
    """What is trained: of a module with adapters those alone, else all parameters."""
    frozen: Part
    """Of a module with adapters, all other parameters: inputs of every step, among the settings. No moments are kept of
    them, and they are in no checkpoint."""
    rest: Part
    settings: Part
    scales: Mapping[str, float]
    """Of each adapter by its name: what it counts (see `model.lora.merge_adapters`)."""
    axes: Callable[[str], Axes] | None = None
    """The module's own table of the axes that its parameters are cut over, by name: its `parameter_axes`."""

    def merge(
        self,
        params: Mapping[str, Any],
        rest: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        training: bool,
        dtype: Any = None,
    ) -> Any:
        """The module made of these leaves. `settings` may hold more than the model's.

        Args:
            params: what is trained.
            rest: random streams, running statistics.
            settings: inputs of every step: the module's settings, and what is frozen.
            training: whether dropout is on.
            dtype: what floating parameters, frozen ones too, are cast to; None leaves them as they are.
        """
        graphdef = self.training if training else self.evaluating
        weights = {**params, **{name: settings[name] for name in self.frozen.names}}
        weights = cast(weights, dtype, self.params.uncast | self.frozen.uncast)
        states = self.params.state(weights), self.frozen.state(weights)
        return nnx.merge(graphdef, *states, self.settings.state(settings), self.rest.state(rest))

    def of_base(self, params: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that another run's weights may stand in for: the frozen ones, or all where none are."""
        if not self.frozen.names:
            return dict(params)
        return {name: settings[name] for name in self.frozen.names}

    def rest_of(self, model: nnx.Module) -> Leaves:
        """What a merged module holds beside parameters and settings, after it was called.

        Variables that the call added (NNX's intermediates) are left out: the state keeps its shape.
        """
        leaves = named_leaves(_split(model)[-1])[1]
        return {name: leaves[name] for name in self.rest.names}


def take_apart(model: nnx.Module) -> tuple[ModelParts, Leaves, Leaves, Leaves]:
    """(what does not change, parameters, the rest, settings) of a module, each by name; the module is left alone.

    Of a module with adapters they are the parameters, and what is frozen is among the settings.

    Raises:
        ValueError: two leaves have one name.
    """
    twin = nnx.merge(*nnx.split(model))
    twin.eval()
    evaluating = nnx.split(twin)[0]
    twin.train()
    training, *states = _split(twin)
    found = [named_leaves(state) for state in states]
    params, frozen, settings, rest = (part for part, _ in found)
    param_leaves, frozen_leaves, setting_leaves, rest_leaves = (leaves for _, leaves in found)
    axes = getattr(type(model), "parameter_axes", None)
    parts = ModelParts(training, evaluating, params, frozen, rest, settings, scales_of(twin), axes)
    return parts, param_leaves, rest_leaves, frozen_leaves | setting_leaves


def _split(model: nnx.Module) -> Any:
    """(graph definition, what is trained, what is frozen, settings, rest)."""
    graphdef, adapters, others, settings, rest = nnx.split(model, LoRAParam, nnx.Param, Setting, ...)
    trained, frozen = (adapters, others) if jax.tree.leaves(adapters) else (others, adapters)
    return graphdef, trained, frozen, settings, rest


def cast(params: Mapping[str, Any], dtype: Any, uncast: Collection[str] = ()) -> dict[str, Any]:
    """Floating parameters as `dtype`, but for those of `uncast`; all as they are for None."""
    if dtype is None:
        return dict(params)
    return {
        name: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) and name not in uncast else p
        for name, p in params.items()
    }


def named_leaves(state: Any) -> tuple[Part, dict[str, Any]]:
    """The leaves of an NNX state by name, such as "blocks.0.attention.qkv.kernel", in the tree's order."""
    leaves: dict[str, Any] = {}
    asked, uncast = [], set()
    variables, _ = jax.tree.flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, variable in variables:
        for inner, leaf in jax.tree.leaves_with_path(variable):
            inside = inner[1:] if isinstance(variable, nnx.Variable) else inner  # the first is "value"
            name = jax.tree_util.keystr((*path, *inside), simple=True, separator=".")
            if name in leaves:
                raise ValueError(
                    f"two of the module's arrays are called {name}: rename an attribute or a key with a dot"
                )
            leaves[name] = leaf
            asked.append(_asked(variable))
            if isinstance(variable, nnx.Variable) and variable.get_metadata().get(FULL_PRECISION):
                uncast.add(name)
    return Part(tuple(leaves), jax.tree.structure(state), tuple(asked), frozenset(uncast)), leaves


def _asked(variable: Any) -> P | None:
    """The partitioning in a variable's metadata, logical axes resolved by NNX's rules; None where there is none."""
    wanted = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
    if not wanted:
        return None
    return wanted.spec if isinstance(wanted, NamedSharding) else nnx.get_partition_spec(variable).get_value()
