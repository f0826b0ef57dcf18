"""The state of a run, made of a module's leaves (see `parts.py`) straight into its shards."""

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, is_primary
from roxxel_dist.cluster.parameter_sharding import parameter_sharding
from roxxel_dist.train.hardware import device_bytes, free_device_bytes
from roxxel_dist.train.health import Health, healthy
from roxxel_dist.train.parts import Leaves, ModelParts, named_leaves, take_apart

MEMORY_CHECK_ENV = "ROXXEL_MEMORY_CHECK"
"""Set to off, a model is tried that is larger than the memory that is free."""
SLOW_S = 2.0


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
        load: gives the parameters, placed as those that it is shown, instead of the ones the module begins with. Of a
            module with adapters it gives what is frozen, for a state that is restored too.

    Returns:
        What does not change, the state, and the inputs of every step by name: the module's settings, float32[] scalars,
        and what is frozen of its parameters.

    Raises:
        ValueError: a module asks for a mesh axis that is not there, or that does not divide; or what a callable makes,
            its optimizer's state and its gradients are more than a device has free.
        TypeError: the callable returns no module.
    """
    if isinstance(model, nnx.Module):
        parts, params, rest, settings = take_apart(model)
        places = _places(parts, params | settings | rest, mesh, fsdp)
        weights = _weights(parts)
        leaves = {
            name: _spread(_cast(leaf, dtype if name in weights else None), places[name])
            for name, leaf in (params | settings | rest).items()
        }
    else:
        parts, shapes, programs = _trace(model, mesh, dtype)
        places, leaves = _places(parts, shapes, mesh, fsdp), {}
        _check_room(parts, shapes, places, init_optimizer, mesh, dtype)
        given = set(parts.params.names) if restored else set()
        given |= set(_loaded(parts)) if load is not None else set()
        size = sum(math.prod(shapes[name].shape) for name in _weights(parts) - given)
        with jax.set_mesh(mesh), _said_if_slow(f"initialising {size:,} parameters"):
            for program in programs(places, given):
                leaves |= program()
            jax.block_until_ready(leaves)
        leaves |= {name: _described(shapes[name], places[name], dtype) for name in given}
    if load is not None and (parts.frozen.names or not restored):
        leaves |= load({name: leaves[name] for name in _loaded(parts)})
    params, rest, settings = _sorted(parts, leaves)
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
    weights = _weights(parts)
    leaves = {name: _described(shapes[name], places[name], dtype if name in weights else None) for name in shapes}
    params, rest, settings = _sorted(parts, leaves)
    opt_state = _optimizer_program(init_optimizer, params, mesh).eval_shape(params)
    everywhere = NamedSharding(mesh, P())
    step, health = jax.tree.map(lambda x: _described(x, everywhere), (jnp.zeros((), jnp.int32), healthy()))
    return parts, TrainState(step, params, rest, opt_state, health), settings


def _check_room(
    parts: ModelParts, shapes: Mapping[str, Any], places: Mapping[str, NamedSharding], init_optimizer: Any, mesh: Mesh,
    dtype: Any,
) -> None:  # fmt: skip
    """Raises ValueError where the state and the gradients of a model are larger than what a device has free."""
    if os.environ.get(MEMORY_CHECK_ENV) == "off":
        return
    weights = _weights(parts)
    leaves = {name: _described(shapes[name], places[name], dtype if name in weights else None) for name in shapes}
    params, rest, settings = _sorted(parts, leaves)
    opt_state = _optimizer_program(init_optimizer, params, mesh).eval_shape(params)
    sizes = [device_bytes(tree) for tree in ((params, rest, settings), opt_state, params)]
    # Processes on CPU share the memory of their host.
    free = free_device_bytes() / (_ranks_here() if mesh.devices.flat[0].platform == "cpu" else 1)
    if sum(sizes) > free:
        model, optimizer, gradients = (f"{size / 1e9:,.1f} GB" for size in sizes)
        raise ValueError(
            f"the model does not fit: each device needs {sum(sizes) / 1e9:,.1f} GB (model {model}, optimizer "
            f"{optimizer}, gradients {gradients}) beside activations, and {free / 1e9:,.1f} GB are free: use a smaller "
            f"model, use_bf16, fsdp on more devices, or set {MEMORY_CHECK_ENV}=off to try all the same"
        )


def _ranks_here() -> int:
    """How many processes of the run are on this host."""
    host = socket.gethostname()
    hosts = broadcast_from_primary("hosts of the ranks", "\n".join(gather_to_primary("hosts of the ranks", host)))
    return hosts.split("\n").count(host) or 1


@contextlib.contextmanager
def _said_if_slow(text: str) -> Iterator[None]:
    """Print a line where what is done within takes longer than a person waits for without asking."""
    timer = threading.Timer(SLOW_S, lambda: print(text, flush=True))
    timer.daemon = True
    if is_primary():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _weights(parts: ModelParts) -> frozenset[str]:
    """The names of all parameters."""
    return frozenset(parts.params.names + parts.frozen.names)


def _loaded(parts: ModelParts) -> tuple[str, ...]:
    """The names of what another run's weights stand in for."""
    return parts.frozen.names or parts.params.names


def _sorted(parts: ModelParts, leaves: Mapping[str, Any]) -> tuple[Leaves, Leaves, Leaves]:
    """(parameters, the rest, inputs of every step) of all leaves."""
    names = parts.params.names, parts.rest.names, parts.frozen.names + parts.settings.names
    params, rest, settings = ({name: leaves[name] for name in some} for some in names)
    return params, rest, settings


def _described(leaf: Any, place: NamedSharding, dtype: Any = None) -> Any:
    shape = jax.eval_shape(partial(_cast, dtype=dtype), leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _trace(
    build: Callable[[], nnx.Module], mesh: Mesh, dtype: Any
) -> tuple[ModelParts, dict[str, Any], Callable[..., list[Callable[[], Leaves]]]]:
    """(what does not change, shapes by name, places to the programs that fill them) of a module yet to be made.

    The module is traced once, and nothing of it is computed. The programs leave out what is given.
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
    weights = _weights(parts)
    shapes = named_leaves(state)[1]

    def make(chosen: Sequence[str]) -> Leaves:
        values = dict(zip(shapes, jaxpr_as_fun(closed)(), strict=True))
        return {name: _cast(values[name], dtype if name in weights else None) for name in chosen}

    # XLA for CPU schedules for parallel work unless told otherwise, with scratch memory for many random arrays at once.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu else None

    # Settings by a program of their own: they are constants in it, and the large one is then the same for all rates.
    def programs(places: Mapping[str, NamedSharding], given: Collection[str] = ()) -> list[Callable[[], Leaves]]:
        computed = (*parts.params.names, *parts.frozen.names, *parts.rest.names)
        return [
            jax.jit(
                partial(make, chosen), out_shardings={name: places[name] for name in chosen}, compiler_options=options
            )
            for chosen in (parts.settings.names, tuple(name for name in computed if name not in given))
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
    weights = _weights(parts)
    return {
        name: parameter_sharding(name, jnp.shape(shapes[name]), mesh, asked, fsdp and name in weights, axes)
        for part in (parts.params, parts.frozen, parts.settings, parts.rest)
        for name, asked in zip(part.names, part.asked, strict=True)
        for axes in [parts.axes(name) if parts.axes and name in weights else None]
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
