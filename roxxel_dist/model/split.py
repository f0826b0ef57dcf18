"""A module split once into named leaves: what a run trains, keeps beside it, and may change by hyperparameters.

Leaves travel as dictionaries from a parameter's name to its array, which cost a fraction of what NNX states or objects
cost at the border of a jitted call, and are merged into a module again while tracing. Decision 8.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.parameter_sharding import MESH_AXES, Axes
from roxxel_dist.cluster.step_parts import CASTS
from roxxel_dist.model.layers import COLUMN_AXES, FULL_PRECISION, STACKED, DynamicScalar
from roxxel_dist.model.lora import LoRAParam, scales_of
from roxxel_dist.process.exit_codes import UserError

Leaves = dict[str, jax.Array]


class Matrix(NamedTuple):
    """How an optimizer that looks at whole matrices sees an array."""

    stacked: int = 0
    """How many of the first axes number matrices: 1 for a layer, 2 for the experts of a layer."""
    columns: int = 1
    """How many of the last axes are together the columns."""

    def view(self, array: Any) -> Any:
        """The array with its columns as one axis."""
        return array.reshape(*array.shape[: array.ndim - self.columns], -1) if self.columns > 1 else array

    def count(self, array: Any) -> int:
        """How many matrices the array is made of; 0 for vectors, and for arrays with axes of another meaning."""
        is_matrix = array.ndim == self.stacked + 1 + self.columns
        return math.prod(array.shape[: self.stacked]) if is_matrix else 0


@dataclass(frozen=True)
class Part:
    """One kind of a module's variables: the names of its leaves and the tree that they make."""

    names: tuple[str, ...]
    tree: Any
    partition_spec: tuple[P | None, ...]
    """How the module asks each leaf to be partitioned, in names of mesh axes."""
    axes: tuple[Axes | None, ...]
    """The mesh axes that each leaf prefers, by its metadata `MESH_AXES`."""
    matrices: Mapping[str, Matrix]
    """How an optimizer sees each leaf whose metadata says so, as those of a Transformer's blocks do."""
    uncast: frozenset[str]
    """Leaves that compute in the type that they are stored in: those that the module marks `FULL_PRECISION`."""
    streams: frozenset[str]
    """Leaves of random streams: keys and counts of `nnx.Rngs`."""

    def state(self, leaves: Mapping[str, Any]) -> Any:
        """The NNX state made of these leaves; others are left out."""
        return jax.tree.unflatten(self.tree, [leaves[name] for name in self.names])


@dataclass(frozen=True)
class ModuleSplit:
    """The constant part of a module while training: its graph definitions, and the names of its leaves by kind."""

    training: Any
    """Graph definition with dropout on."""
    evaluating: Any
    """Graph definition with dropout off."""
    params: Part
    """What is trained: of a module with adapters those alone, else all parameters."""
    frozen: Part
    """Of a module with adapters, all other parameters: inputs of every step, among the hparams. No moments are kept of
    them, and they are in no checkpoint."""
    rest: Part
    """Neither parameters nor hparams: random streams, running statistics."""
    hparams: Part
    """Numbers that a sweep may change, inputs of every step: the module's `DynamicScalar`s."""
    scales: Mapping[str, float]
    """Of each adapter by its name: what it counts (see `model.lora.merge_adapters`)."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """What a trained model needs beside its parameters, such as running statistics: the rest but random streams."""
        return tuple(name for name in self.rest.names if name not in self.rest.streams)

    def merge(
        self,
        params: Mapping[str, Any],
        rest: Mapping[str, Any],
        hparams: Mapping[str, Any],
        *,
        training: bool,
        dtype: Any = None,
    ) -> Any:
        """The module made of these leaves, floating parameters cast to `dtype`; `training` has dropout on.

        `hparams` are the inputs of every step: the module's hparams, what is frozen, and perhaps more.
        """
        graphdef = self.training if training else self.evaluating
        weights = {**params, **{name: hparams[name] for name in self.frozen.names}}
        weights = cast(weights, dtype, self.params.uncast | self.frozen.uncast)
        states = self.params.state(weights), self.frozen.state(weights)
        return nnx.merge(graphdef, *states, self.hparams.state(hparams), self.rest.state(rest))

    def of_base(self, params: Mapping[str, Any], hparams: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that another run's weights may stand in for: the frozen ones, or all where none are."""
        if not self.frozen.names:
            return dict(params)
        return {name: hparams[name] for name in self.frozen.names}

    def rest_of(self, model: nnx.Module) -> Leaves:
        """What a merged module holds beside parameters and hparams, after it was called.

        Variables that the call added (NNX's intermediates) are left out: the state keeps its shape.
        """
        leaves = named_leaves(_split(model)[-1])[1]
        return {name: leaves[name] for name in self.rest.names}


def split_module(model: nnx.Module) -> tuple[ModuleSplit, Leaves, Leaves, Leaves]:
    """(what does not change, parameters, the rest, hparams) of a module, each by name; the module is left alone.

    Of a module with adapters they are the parameters, and what is frozen is among the hparams. Raises ValueError where
    two leaves have one name.
    """
    twin = nnx.merge(*nnx.split(model))
    twin.eval()
    evaluating = nnx.split(twin)[0]
    twin.train()
    training, *states = _split(twin)
    (params, trained), (frozen, fixed), (hparams, numbers), (rest, others) = map(named_leaves, states)
    split = ModuleSplit(training, evaluating, params, frozen, rest, hparams, scales_of(twin))
    return split, trained, others, fixed | numbers


@dataclass(frozen=True, eq=False)
class TracedModule:
    """A module that a function makes, traced once: nothing of it is computed until `compute` is called."""

    split: ModuleSplit
    shapes: dict[str, Any]
    """Every leaf by name, as shape and type; weak types as in the trace."""
    jaxpr: ClosedJaxpr
    """Gives the leaves in the order of `shapes`."""

    def compute(self, names: Sequence[str]) -> Leaves:
        """The leaves with these names; to be called under `jax.jit`, which leaves out what others take."""
        leaves = dict(zip(self.shapes, jaxpr_as_fun(self.jaxpr)(), strict=True))
        return {name: leaves[name] for name in names}


def trace_module(build: Callable[[], nnx.Module], mesh: Mesh) -> TracedModule:
    """The module that `build` makes, traced: the one way in which every command meets a model that is yet to be made.

    The `mesh` is set meanwhile: the module may use its axes. Raises TypeError where `build` gives no
    module, and what it raises passes.
    """

    def split_state() -> Any:
        try:
            model = build()
        except TraceContextError as error:
            error.add_note("a callable that makes the model is traced: it must make its nnx.Rngs itself")
            raise
        if not isinstance(model, nnx.Module):
            raise TypeError(f"model is a callable that returned a {type(model).__name__}: it must return an nnx.Module")
        return nnx.split(model)

    # NNX would place each variable as it is made, and fail at logical axes.
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        closed, (graphdef, state) = jax.make_jaxpr(split_state, return_shape=True)()
    return TracedModule(split_module(nnx.merge(graphdef, state))[0], named_leaves(state)[1], closed)


def _split(model: nnx.Module) -> Any:
    """(graph definition, what is trained, what is frozen, hparams, rest)."""
    graphdef, adapters, others, hparams, rest = nnx.split(model, LoRAParam, nnx.Param, DynamicScalar, ...)
    trained, frozen = (adapters, others) if jax.tree.leaves(adapters) else (others, adapters)
    return graphdef, trained, frozen, hparams, rest


@jax.named_scope(CASTS)
def cast(params: Mapping[str, Any], dtype: Any, uncast: Collection[str] = ()) -> dict[str, Any]:
    """Floating parameters as `dtype`, but for those of `uncast`; all as they are for None."""
    if dtype is None:
        return dict(params)
    return {
        name: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) and name not in uncast else p
        for name, p in params.items()
    }


def named_leaves(state: Any) -> tuple[Part, dict[str, Any]]:
    """The leaves of an NNX state by name, such as "blocks.attention.qkv.kernel", in the tree's order."""
    leaves: dict[str, Any] = {}
    specs, axes, matrices, uncast, streams = [], [], {}, set(), set()
    variables, _ = jax.tree.flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, variable in variables:
        for inner, leaf in jax.tree.leaves_with_path(variable):
            inside = inner[1:] if isinstance(variable, nnx.Variable) else inner  # the first is "value"
            name = jax.tree_util.keystr((*path, *inside), simple=True, separator=".")
            if name in leaves:
                raise UserError(
                    f"two of the module's arrays are called {name}: rename an attribute or a key with a dot"
                )
            leaves[name] = leaf
            metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
            specs.append(_partition_spec(variable))
            axes.append(metadata.get(MESH_AXES))
            if STACKED in metadata or COLUMN_AXES in metadata:
                matrices[name] = Matrix(metadata.get(STACKED, 0), metadata.get(COLUMN_AXES, 1))
            if metadata.get(FULL_PRECISION):
                uncast.add(name)
            if isinstance(variable, nnx.RngState):
                streams.add(name)
    tree = jax.tree.structure(state)
    return Part(tuple(leaves), tree, tuple(specs), tuple(axes), matrices, frozenset(uncast), frozenset(streams)), leaves


def _partition_spec(variable: Any) -> P | None:
    """The partitioning in a variable's metadata, logical axes resolved by NNX's rules; None where there is none."""
    sharding = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
    if not sharding:
        return None
    return sharding.spec if isinstance(sharding, NamedSharding) else nnx.get_partition_spec(variable).get_value()


def count_by_module(params: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of each attribute of a module, with all layers of a list together, such as {"embedding": 131072,
    "blocks": 786432}, from arrays by name, in that order."""
    parts: dict[str, int] = {}
    for name, leaf in params.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + leaf.size
    return parts
