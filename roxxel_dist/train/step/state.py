"""The state of a run: the leaves of its module and optimizer, made straight into shards, and the view for users."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, is_primary, process_index
from roxxel_dist.cluster.parameter_sharding import fsdp_axis, parameter_sharding
from roxxel_dist.cluster.xla_flags import SAVE_MEMORY
from roxxel_dist.model.split import Leaves, ModuleSplit, TracedModule, split_module, trace_module
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.average import Averaged, inner_state
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.optimizer import InitialState
from roxxel_dist.train.step.throughput import device_bytes, free_device_bytes

MEMORY_CHECK_ENV = "ROXXEL_MEMORY_CHECK"
"""Set to off, a model is tried that is larger than the memory that is free."""
SLOW_S = 2.0


class TrainState(NamedTuple):
    """What a step changes. The fields' names are in every checkpoint."""

    step: jax.Array
    """int32[]: optimizer steps done."""
    params: Leaves
    rest: Leaves
    """What is neither parameter nor hparam: random streams, running statistics."""
    opt_state: Any
    health: LossMonitorState
    """Bad steps so far."""

    @property
    def evaluated(self) -> Leaves:
        """The parameters that are validated and exported: their average, where the run keeps one."""
        return self.opt_state.average if isinstance(self.opt_state, Averaged) else self.params


@dataclass(frozen=True, eq=False, kw_only=True)
class StateBuilder:
    """The state of a model before the first step: its shapes at once, and its arrays when they are asked for."""

    split: ModuleSplit
    source: TracedModule | Leaves
    """What gives the leaves: the trace of a callable, or the arrays of a module."""
    init_optimizer: Callable[[Leaves], Any]
    mesh: Mesh
    fsdp: bool = False
    dtype: Any = None

    @classmethod
    def of_model(
        cls,
        model: nnx.Module | Callable[[], nnx.Module],
        init_optimizer: Callable[[Leaves], Any],
        mesh: Mesh,
        *,
        fsdp: bool = False,
        dtype: Any = None,
    ) -> "StateBuilder":
        """Split a module, the same on every process, or trace what makes one with random streams of its own; nothing is
        computed.

        `init_optimizer` makes the optimizer's state of parameters, as an optax transformation's `init`. With `fsdp`
        large parameters are cut over the mesh's "fsdp", or its first axis where it has none; what a module asks for
        itself (`nnx.with_partitioning`) holds in any case. `dtype` is of all floating parameters, and so of the
        moments; None leaves them as they are. Raises TypeError where the callable returns no module.
        """
        if isinstance(model, nnx.Module):
            split, *parts = split_module(model)
            source: TracedModule | Leaves = {name: leaf for part in parts for name, leaf in part.items()}
        else:
            source = trace_module(model, mesh)
            split = source.split
        return cls(split=split, source=source, init_optimizer=init_optimizer, mesh=mesh, fsdp=fsdp, dtype=dtype)

    def on_mesh(self, mesh: Mesh, *, fsdp: bool = False) -> "StateBuilder":
        """The builder on another mesh; the model is not traced again."""
        return replace(self, mesh=mesh, fsdp=fsdp)

    @cached_property
    def _like(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = self.source.shapes if isinstance(self.source, TracedModule) else self.source
        return _placed(self.split, shapes, self.mesh, self.fsdp, self.dtype)

    @cached_property
    def shapes(self) -> tuple[TrainState, Leaves]:
        """What `build` gives, as `jax.ShapeDtypeStruct`s with shardings.

        Raises ValueError where the mesh has no axis that a parameter asks for, or it does not divide.
        """
        return _assemble(self.split, self._like, self.init_optimizer, self.mesh, shapes=True)

    def build(
        self, *, restored: bool = False, load: Callable[[Leaves, Leaves], Leaves] | None = None
    ) -> tuple[TrainState, Leaves]:
        """(the state before the first step, the inputs of every step by name), on the mesh.

        The inputs of every step are the module's hparams, float32[] scalars, and what is frozen of its parameters. The
        arrays of a module are copied; those of a callable are computed straight into their shards.

        Args:
            restored: the state will be read from a checkpoint: `jax.ShapeDtypeStruct`s with shardings stand for a
                callable's parameters, the moments, the step and the monitor.
            load: (parameters, state beside them) to those of a trained model, placed alike, by name in one dictionary.
                Of a module with adapters the parameters are the frozen ones. It is called for a state that is restored
                too if there are frozen ones, and then with no state: the checkpoint has it.

        Raises:
            ValueError: a device has no room for the state.
        """
        split, like, source = self.split, self._like, self.source
        leaves: dict[str, Any]
        if isinstance(source, TracedModule):
            _check_room(*self.shapes, self.mesh)
            given = {*(split.params.names if restored else ()), *(_loaded(split) if load is not None else ())}
            size = sum(like[name].size for name in {*split.params.names, *split.frozen.names} - given)
            leaves = {name: like[name] for name in given}
            with jax.set_mesh(self.mesh), _logged_if_slow(f"initialising {size:,} parameters"):
                for program in _init_programs(split, source, like, self.mesh, given):
                    leaves |= jax.block_until_ready(program())
        else:
            leaves = {
                name: _spread(_cast(leaf, like[name].dtype), like[name].sharding) for name, leaf in source.items()
            }
        if load is not None and (split.frozen.names or not restored):
            state = () if restored else split.state_names
            leaves |= load(*({name: leaves[name] for name in names} for names in (_loaded(split), state)))
        return _assemble(split, leaves, self.init_optimizer, self.mesh, shapes=restored)


def placed_state(
    split: ModuleSplit,
    state: TrainState,
    hparams: Leaves,
    init_optimizer: Callable[[Leaves], Any],
    mesh: Mesh,
    cut: Mapping[str, int],
) -> tuple[TrainState, Leaves]:
    """How a `StateBuilder` with fsdp would place these arrays, or shapes, on a mesh: as shapes with shardings.

    Parameters in `cut` are cut over the axis of fsdp along that dimension.
    """
    like = _placed(split, state.params | state.rest | hparams, mesh, fsdp=True, dtype=None)
    for name, dimension in cut.items():
        place = NamedSharding(mesh, P(*[None] * dimension, fsdp_axis(mesh)))
        like[name] = jax.ShapeDtypeStruct(like[name].shape, like[name].dtype, sharding=place)
    return _assemble(split, like, init_optimizer, mesh, shapes=True)


def _assemble(
    split: ModuleSplit, leaves: Mapping[str, Any], init_optimizer: Callable[[Leaves], Any], mesh: Mesh, *, shapes: bool
) -> tuple[TrainState, Leaves]:
    """The state made of all leaves of a module, and its hparams; with `shapes` nothing more is computed."""
    names = split.params.names, split.rest.names, split.frozen.names + split.hparams.names
    params, rest, hparams = ({name: leaves[name] for name in some} for some in names)
    if isinstance(init_optimizer, InitialState):  # one of our optimizers: it needs the parameters as matrices
        init_optimizer = init_optimizer.for_model(split.params.matrices)
    program, everywhere = _optimizer_program(init_optimizer, params, mesh), NamedSharding(mesh, P())
    opt_state = program.eval_shape(params) if shapes else program(params)
    place = _shape_of if shapes else _spread
    step, health = jax.tree.map(
        lambda leaf: place(leaf, everywhere), (np.zeros((), np.int32), LossMonitorState.initial(np.zeros))
    )
    return TrainState(step, params, rest, opt_state, health), hparams


def _check_room(state: TrainState, hparams: Leaves, mesh: Mesh) -> None:
    """Raises ValueError where the (abstract) state and its gradients are larger than what a device has free."""
    if os.environ.get(MEMORY_CHECK_ENV) == "off":
        return
    sizes = [device_bytes(tree) for tree in ((state.params, state.rest, hparams), state.opt_state, state.params)]
    # Processes on CPU share the memory of their host.
    free = free_device_bytes() / (_ranks_here() if mesh.devices.flat[0].platform == "cpu" else 1)
    if sum(sizes) > free:
        model, optimizer, gradients = (f"{size / 1e9:,.1f} GB" for size in sizes)
        raise UserError(
            f"the model does not fit: each device needs {sum(sizes) / 1e9:,.1f} GB (model {model}, optimizer "
            f"{optimizer}, gradients {gradients}) beside activations, and {free / 1e9:,.1f} GB are free. Use a smaller "
            f"model, use_bf16, or fsdp on more devices, or set {MEMORY_CHECK_ENV}=off to skip this check"
        )


def _ranks_here() -> int:
    """How many processes of the run are on this host."""
    host = socket.gethostname()
    hosts = broadcast_from_primary("hosts of the ranks", "\n".join(gather_to_primary("hosts of the ranks", host)))
    return hosts.split("\n").count(host) or 1


@contextlib.contextmanager
def _logged_if_slow(text: str) -> Iterator[None]:
    """Print a line where what is done within takes longer than a person waits for without asking.

    It goes to stderr: stdout may be a table or JSON that a program reads.
    """
    timer = threading.Timer(SLOW_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if is_primary():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _loaded(split: ModuleSplit) -> tuple[str, ...]:
    """The names of what another run's weights stand in for."""
    return split.frozen.names or split.params.names


def _init_programs(
    split: ModuleSplit,
    traced: TracedModule,
    like: Mapping[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    given: Collection[str] = (),
) -> list[Any]:
    """The jitted programs that compute all leaves but the `given` ones, cast and placed as `like`.

    Hparams have a program of their own: they are constants in it, and the large one is then the same for all rates. So
    has the rest: it is all that a restored run computes, which then compiles nothing that its beginning did not.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = SAVE_MEMORY if on_cpu else None  # for the scratch memory of many random arrays at once

    def program(names: Sequence[str]) -> Any:
        def make() -> Leaves:
            return {name: _cast(leaf, like[name].dtype) for name, leaf in traced.compute(names).items()}

        return jax.jit(make, out_shardings={name: like[name].sharding for name in names}, compiler_options=options)

    weights = [name for name in split.params.names + split.frozen.names if name not in given]
    return [program(names) for names in (split.hparams.names, weights, split.rest.names) if names]


def _cast(leaf: Any, dtype: Any = None) -> jax.Array:
    """A leaf as an array, a floating one as `dtype` where given; never weakly typed, as a restored one is not."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jnp.asarray(leaf, dtype if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)


def _shape_of(leaf: Any, sharding: NamedSharding, dtype: Any = None) -> jax.ShapeDtypeStruct:
    known = isinstance(leaf, jax.ShapeDtypeStruct) and dtype in (None, leaf.dtype)
    shape = leaf if known else jax.eval_shape(partial(_cast, dtype=dtype), leaf)  # a trace of each takes a millisecond
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _placed(
    split: ModuleSplit, leaves: Mapping[str, Any], mesh: Mesh, fsdp: bool, dtype: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, type and sharding of each leaf by name; parameters as `dtype`, and `fsdp` is for no others."""
    placed = {}
    for part in (split.params, split.frozen, split.hparams, split.rest):
        is_weight = part in (split.params, split.frozen)
        for name, spec, axes in zip(part.names, part.partition_spec, part.axes, strict=True):
            place = parameter_sharding(name, jnp.shape(leaves[name]), mesh, spec, fsdp and is_weight, axes)
            placed[name] = _shape_of(leaves[name], place, dtype if is_weight else None)
    return placed


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


def _spread(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A copy of `leaf`, of jax or numpy, on a mesh that other processes share; all have the same value already."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _spread(jax.random.key_data(leaf), sharding)
        wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))
        return jax.jit(wrap, out_shardings=sharding)(data)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    value = np.array(leaf)  # a copy: the state is donated, and the caller's arrays must survive that
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


ROOM = 0.9
"""Share of a device's free memory that one more copy of the model may take; programs need some beside it."""


class TrainView:
    """The model, the optimizer's state and the step, as `eval_fn` and callers of `Trainer.run` see them.

    It shows the arrays of the step that it was taken after: the next step takes their memory, so use it at once and
    copy what shall be kept.
    """

    def __init__(self, split: ModuleSplit, state: TrainState, hparams: dict[str, jax.Array]) -> None:
        self._split, self._state, self._hparams = split, state, hparams

    def __repr__(self) -> str:
        """The step, and the number of parameters."""
        trained = sum(leaf.size for leaf in self.params.values())
        frozen = sum(leaf.size for leaf in self.frozen.values())
        more = f" and {frozen:,} frozen" if frozen else ""
        return f"<state after step {int(self.step)}: {trained:,} parameters{more}>"

    @property
    def step(self) -> jax.Array:
        """int32[]: steps done; `int(state.step)` and `state.step[...]` read it."""
        return self._state.step

    @property
    def model(self) -> Any:
        """The module with dropout off, with the average of the parameters where the run keeps one; its arrays lie on
        the mesh, so on several processes all must compute with it.
        """
        return self._split.merge(self._state.evaluated, self._state.rest, self._hparams, training=False)

    @property
    def optimizer(self) -> Any:
        """The state of the optax transformation."""
        return inner_state(self._state.opt_state)

    @property
    def params(self) -> dict[str, jax.Array]:
        """Parameters by name; of a model with adapters, the adapters."""
        return self._state.params

    @property
    def evaluated(self) -> dict[str, jax.Array]:
        """The parameters that are evaluated, by name: their average, where the run keeps one."""
        return self._state.evaluated

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """Parameters that are not trained, by name; none without adapters."""
        return {name: self._hparams[name] for name in self._split.frozen.names}

    def flops_per_token(self) -> Callable[[int], float]:
        """(inputs a row) -> floating-point operations of a step for one, as the module says, or 6 a parameter."""
        usual = 6.0 * sum(leaf.size for leaf in self.params.values())
        usual += 4.0 * sum(leaf.size for leaf in self.frozen.values())  # there is no gradient of them
        # Asked for at every row, and a module may walk through all of its parameters to answer.
        return cache(getattr(self.model, "flops_per_token", lambda length: usual))

    def copy_to(self, model: nnx.Module, optimizer: nnx.Optimizer[Any] | None) -> None:
        """Give the module of which this state was made, and its optimizer if any, these arrays; they are not copied.

        An array that the module had on one device is given from that device, if each device has the whole of it.
        """
        split, kinds = self._split, (self.params, self.frozen, self._state.rest)
        for part, leaves in zip((split.params, split.frozen, split.rest), kinds, strict=True):
            nnx.update(model, part.state(jax.tree.map(_on_one_device, leaves)))
        if optimizer is None:
            return
        names = set(split.params.names)

        def of_parameters(tree: Any) -> bool:
            return isinstance(tree, dict) and set(tree) == names

        as_states = jax.tree.map(
            lambda tree: split.params.state(tree) if of_parameters(tree) else tree,
            self.optimizer,
            is_leaf=of_parameters,
        )
        leaves = [_on_one_device(leaf) for leaf in jax.tree.leaves(as_states)]
        theirs, tree = jax.tree.flatten(nnx.state(optimizer.opt_state))
        if [leaf.shape for leaf in leaves] == [leaf.shape for leaf in theirs]:  # else it was made for other parameters
            nnx.update(optimizer.opt_state, jax.tree.unflatten(tree, leaves))
            optimizer.step[...] = jnp.asarray(int(self.step), optimizer.step[...].dtype)

    def local_model(self) -> Any:
        """`model` on this process's first device alone; what `local_leaves` says holds."""
        return self._split.merge(*self.local_leaves(self.evaluated), training=False)

    def local_leaves(self, params: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """(`params`, the rest, the inputs of every step) on this process's first device. Every process must ask for it.

        `params` are this view's own, or those that are evaluated. Raises MemoryError, on every process, where a device
        of one of them has no room for the whole model beside what it holds.
        """
        leaves, tree = jax.tree.flatten((params, self._state.rest, self._hparams))
        cut = {i: leaf for i, leaf in enumerate(leaves) if not leaf.sharding.is_fully_replicated}
        if cut:
            _check_room_for_model(sum(leaf.size * leaf.dtype.itemsize for leaf in cut.values()))
            everywhere = NamedSharding(next(iter(cut.values())).sharding.mesh, P())
            whole = jax.jit(lambda cut: cut, out_shardings=everywhere)(cut)
            leaves = [whole.get(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, [leaf.addressable_data(0) for leaf in leaves])


def _on_one_device(leaf: jax.Array) -> jax.Array:
    """The first device's copy of an array that all devices have the whole of."""
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def _check_room_for_model(size: int) -> None:
    """Raises MemoryError, on all processes alike, where so many bytes more do not fit on each device of this one."""
    free = free_device_bytes()
    problem = f"{size / 1e9:.1f} GB do not fit in the {free / 1e9:.1f} GB free on a device of rank {process_index()}"
    problems = gather_to_primary("room for the whole model", problem if size > ROOM * free else "")
    if problem := broadcast_from_primary("room for the whole model", next(filter(None, problems), "")):
        raise MemoryError(f"the whole model on one device: {problem}")
