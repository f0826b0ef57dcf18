"""A module as flat leaves, and the state of a run made of them, straight into its shards.

The model is split once. Its leaves travel as dictionaries from a parameter's name to its array, which cost a fraction
of what NNX states or objects cost at the border of a jitted call, and are merged into a module again while tracing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.sharding import Axes, parameter_sharding
from roxxel_dist.model.setting import Setting
from roxxel_dist.train.health import Health, healthy

Leaves = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that a step changes."""

    step: jax.Array
    """int32[]: optimizer steps done."""
    params: Leaves
    rest: Leaves
    """What is neither parameter nor setting: random streams, running statistics."""
    opt_state: Any
    health: Health
    """What is known of bad steps."""


@dataclass(frozen=True)
class Part:
    """One kind of a module's variables: the names of its leaves and the tree that they make."""

    names: tuple[str, ...]
    tree: Any
    asked: tuple[P | None, ...]
    """How the module asks each leaf to be partitioned, in names of mesh axes."""

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
    rest: Part
    settings: Part
    axes: Callable[[str], Axes] | None = None
    """The module's own table of the axes that its parameters are cut over, by name: its `parameter_axes`."""

    def merge(
        self, params: Mapping[str, Any], rest: Mapping[str, Any], settings: Mapping[str, Any], *, training: bool
    ) -> Any:
        """The module made of these leaves. `settings` may hold more than the model's."""
        graphdef = self.training if training else self.evaluating
        return nnx.merge(graphdef, self.params.state(params), self.settings.state(settings), self.rest.state(rest))

    def rest_of(self, model: nnx.Module) -> Leaves:
        """What a merged module holds beside parameters and settings, after it was called.

        Variables that the call added (NNX's intermediates) are left out: the state keeps its shape.
        """
        leaves = _named(_split(model)[3])[1]
        return {name: leaves[name] for name in self.rest.names}


def take_apart(model: nnx.Module) -> tuple[ModelParts, Leaves, Leaves, Leaves]:
    """(what does not change, parameters, the rest, settings) of a module, each by name; the module is left alone.

    Raises:
        ValueError: two leaves have one name.
    """
    twin = nnx.merge(*nnx.split(model))
    twin.eval()
    evaluating = nnx.split(twin)[0]
    twin.train()
    training, *states = _split(twin)
    (params, param_leaves), (settings, setting_leaves), (rest, rest_leaves) = (_named(state) for state in states)
    axes = getattr(type(model), "parameter_axes", None)
    return ModelParts(training, evaluating, params, rest, settings, axes), param_leaves, rest_leaves, setting_leaves


def _split(model: nnx.Module) -> Any:
    """(graph definition, parameters, settings, rest)."""
    return nnx.split(model, nnx.Param, Setting, ...)


def _named(state: Any) -> tuple[Part, dict[str, Any]]:
    """The leaves of an NNX state by name, such as "blocks.0.attention.qkv.kernel", in the tree's order."""
    leaves: dict[str, Any] = {}
    asked = []
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
    return Part(tuple(leaves), jax.tree.structure(state), tuple(asked)), leaves


def _asked(variable: Any) -> P | None:
    """The partitioning in a variable's metadata, logical axes resolved by NNX's rules; None where there is none."""
    wanted = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
    if not wanted:
        return None
    return wanted.spec if isinstance(wanted, NamedSharding) else nnx.get_partition_spec(variable).get_value()


def init_state(
    model: nnx.Module | Callable[[], nnx.Module],
    init_optimizer: Callable[[Leaves], Any],
    mesh: Mesh,
    *,
    fsdp: bool = False,
    dtype: Any = None,
    restored: bool = False,
    load: Callable[[Leaves], Leaves] | None = None,
) -> tuple[ModelParts, TrainState, Leaves]:
    """The state before the first step, on the mesh.

    Args:
        model: a module, the same on every process, whose arrays are copied; or a callable that makes one, with random
            streams of its own, which is traced and computed straight into its shards.
        init_optimizer: parameters to the optimizer's state, as an optax transformation's `init`.
        mesh: devices of all processes.
        fsdp: cut large parameters over the mesh's "fsdp", or its first axis where it has none. What a module asks for
            itself (`nnx.with_partitioning`) holds in any case.
        dtype: of all floating parameters, and so of the moments; None leaves them as they are.
        restored: the state will be read from a checkpoint: of a callable's parameters, and of all moments, nothing is
            computed; `jax.ShapeDtypeStruct`s with shardings stand for them.
        load: gives the parameters, placed as those that it is shown, instead of the ones the module begins with.

    Returns:
        What does not change, the state, and the module's settings: float32[] scalars by name, inputs of every step.

    Raises:
        ValueError: a module asks for a mesh axis that is not there, or that does not divide.
        TypeError: the callable returns no module.
    """
    if isinstance(model, nnx.Module):
        parts, params, rest, settings = take_apart(model)
        places = _places(parts, params | settings | rest, mesh, fsdp)
        leaves = {name: _spread(_cast(leaf), places[name]) for name, leaf in (settings | rest).items()}
        leaves |= {name: _spread(_cast(leaf, dtype), places[name]) for name, leaf in params.items()}
    else:
        parts, shapes, programs = _trace(model, mesh, dtype)
        places, leaves = _places(parts, shapes, mesh, fsdp), {}
        with jax.set_mesh(mesh):
            for program in programs(places, restored or load is not None):
                leaves |= program()
        for name in set(parts.params.names) - set(leaves):
            leaves[name] = _described(shapes[name], places[name], dtype)
    params, settings, rest = (
        {name: leaves[name] for name in part.names} for part in (parts.params, parts.settings, parts.rest)
    )
    if load is not None:
        params = load(params)
    program = _optimizer_program(init_optimizer, params, mesh)
    opt_state = program.eval_shape(params) if restored else program(params)
    everywhere = NamedSharding(mesh, P())
    step, health = jax.tree.map(lambda leaf: _spread(leaf, everywhere), (jnp.zeros((), jnp.int32), healthy()))
    return parts, TrainState(step, params, rest, opt_state, health), settings


def abstract_state(
    model: Callable[[], nnx.Module], init_optimizer: Callable[[Leaves], Any], mesh: Mesh, *, fsdp: bool, dtype: Any
) -> tuple[ModelParts, TrainState, Leaves]:
    """What `init_state` gives, as `jax.ShapeDtypeStruct`s with shardings: nothing is computed. It raises the same."""
    parts, shapes, _ = _trace(model, mesh, dtype)
    places = _places(parts, shapes, mesh, fsdp)
    params, settings, rest = (
        {name: _described(shapes[name], places[name], dtype if part is parts.params else None) for name in part.names}
        for part in (parts.params, parts.settings, parts.rest)
    )
    opt_state = _optimizer_program(init_optimizer, params, mesh).eval_shape(params)
    everywhere = NamedSharding(mesh, P())
    step, health = jax.tree.map(lambda x: _described(x, everywhere), (jnp.zeros((), jnp.int32), healthy()))
    return parts, TrainState(step, params, rest, opt_state, health), settings


def _described(leaf: Any, place: NamedSharding, dtype: Any = None) -> Any:
    shape = jax.eval_shape(partial(_cast, dtype=dtype), leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _trace(
    build: Callable[[], nnx.Module], mesh: Mesh, dtype: Any
) -> tuple[ModelParts, dict[str, Any], Callable[..., list[Callable[[], Leaves]]]]:
    """(what does not change, shapes by name, places to the programs that fill them) of a module yet to be made.

    The module is traced once, and nothing of it is computed.
    """

    def split() -> Any:
        try:
            model = build()
        except TraceContextError as error:
            error.add_note("a callable that makes the model is traced: it must make its nnx.Rngs itself")
            raise
        if not isinstance(model, nnx.Module):
            raise TypeError(f"model is a callable that returned a {type(model).__name__}: it must return an nnx.Module")
        return nnx.split(model)

    # NNX would place each variable as it is made, and fail at logical axes. The mesh is there for the module's own use.
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        closed, (graphdef, state) = jax.make_jaxpr(split, return_shape=True)()
    parts = take_apart(nnx.merge(graphdef, state))[0]
    shapes = _named(state)[1]

    def make(chosen: Sequence[str]) -> Leaves:
        values = dict(zip(shapes, jaxpr_as_fun(closed)(), strict=True))
        return {name: _cast(values[name], dtype if name in parts.params.names else None) for name in chosen}

    # XLA for CPU schedules for parallel work unless told otherwise, with scratch memory for many random arrays at once.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu else None

    # Settings by a program of their own: they are constants in it, and the large one is then the same for all rates.
    def programs(places: Mapping[str, NamedSharding], restored: bool = False) -> list[Callable[[], Leaves]]:
        return [
            jax.jit(
                partial(make, chosen), out_shardings={name: places[name] for name in chosen}, compiler_options=options
            )
            for chosen in (parts.settings.names, (() if restored else parts.params.names) + parts.rest.names)
            if chosen
        ]

    return parts, shapes, programs


def _cast(leaf: Any, dtype: Any = None) -> jax.Array:
    """A leaf as an array, a floating one as `dtype` where given; never weakly typed, as a restored one is not."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jnp.asarray(leaf, dtype if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)


def _places(parts: ModelParts, shapes: Mapping[str, Any], mesh: Mesh, fsdp: bool) -> dict[str, NamedSharding]:
    """Where each leaf lies, by name; the table and the rule for parameters are for no others."""
    return {
        name: parameter_sharding(name, jnp.shape(shapes[name]), mesh, asked, fsdp and part is parts.params, axes)
        for part in (parts.params, parts.settings, parts.rest)
        for name, asked in zip(part.names, part.asked, strict=True)
        for axes in [parts.axes(name) if parts.axes and part is parts.params else None]
    }


def _optimizer_program(init: Callable[[Leaves], Any], params: Mapping[str, Any], mesh: Mesh) -> Any:
    """The jitted `init`: what has a parameter's name and shape, as moments have, lies as the parameter does.

    The rest, counts and the sums over rows and columns of a factored moment, is small: a whole copy everywhere.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for key in reversed(path):
            param = params.get(str(getattr(key, "key", "")))
            if param is not None and param.shape == leaf.shape:
                return param.sharding
        return NamedSharding(mesh, P())

    return jax.jit(init, out_shardings=jax.tree.map_with_path(place, jax.eval_shape(init, params)))


def _spread(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A copy of `leaf` on a mesh that other processes share; all have the same value already."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _spread(jax.random.key_data(leaf), sharding)
        wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))
        return jax.jit(wrap, out_shardings=sharding)(data)
    if not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    value = np.array(leaf)  # a copy: the state is donated, and the caller's arrays must survive that
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
