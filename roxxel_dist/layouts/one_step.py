"""One step in one layout: the very programs of training, with an optimizer that keeps the gradient and changes nothing.

What comes out is read from every device, so that copies of an array which differ are seen.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import device_type, fit_sharding
from roxxel_dist.cluster.xla_flags import RUN_ONCE
from roxxel_dist.layouts.layout import Layout, devices_of, place_whole
from roxxel_dist.layouts.noise import count_draws, counted_keys, is_key, other_kinds, reset_draws, switch_on, wrap
from roxxel_dist.model.loss import token_losses
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.exact.layout import DeviceStates
from roxxel_dist.train.step.compile import Compiler, abstract
from roxxel_dist.train.step.optimizer import FixedOptimizer
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import SPIKE_FACTOR, LossFn
from roxxel_dist.train.steps import StepOptions, Steps, make_steps

Arrays = dict[str, np.ndarray]
LOSS, SCALAR, ROWS, GRADIENT, STATE = "loss", "scalar ", "loss of each row", "gradient of ", "state "
"""Beginnings of the names of what a step gives: "gradient of blocks.mlp.out.kernel"."""
OF_STEP = ("loss", "grad_norm", "update_norm", "lr")
"""Scalars of a step that are not of the loss function, or have a name of their own here."""
JITTER = 0.05
"""Standard deviation of the noise that is added to a parameter whose elements are all the same, as those of norms and
biases, and the zeros of an output projection, are at first: with them whole gradients would be 0, and equal for no
good reason."""
_COMPILER = ThreadPoolExecutor(2, "roxxel-compile-layouts")
"""While it compiles, which is most of the time, the next program is traced."""


def _keep_gradient() -> FixedOptimizer:
    def keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), updates

    return FixedOptimizer(optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), keep))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The state before the step, on the host."""

    params: Arrays
    rest: Arrays
    """Random keys as their data."""
    hparams: Arrays
    keys: frozenset[str]
    """Which of the rest are random keys."""
    streams: frozenset[str]
    """Which of the rest are random keys, or count what was drawn by them."""
    other_kinds: tuple[str, ...]
    """The kinds of random numbers that threefry's stand for in the step, such as "rbg"."""
    axes: frozenset[str]
    """The axes of a mesh that parameters name."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step in one layout gives."""

    values: Arrays
    """By name: the loss, its scalars, the loss of each row, all gradients, the state that is no parameter."""
    copies: dict[str, list[np.ndarray]]
    """Results that are not the same on all devices: each different copy."""
    drawn: dict[str, int]
    """Of each random stream: elements drawn by different keys."""


def initial_weights(model: nnx.Module | Callable[[], nnx.Module], layout: Layout) -> Weights:
    """The weights before the step; raises UserError where they do not fit one device.

    A parameter whose elements are all the same gets some noise (`JITTER`).
    """
    with devices_of(layout.mesh):
        steps = _steps(model, token_losses, layout)
        state, hparams = steps.init()
    rng, params = np.random.default_rng(0), {}
    for name, leaf in state.params.items():
        value = np.array(leaf, np.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)
        if not np.issubdtype(value.dtype, np.floating):
            raise UserError(
                f"the parameter {name!r} is of {value.dtype}, which has no gradient: make it an nnx.Variable of "
                f"another kind than nnx.Param"
            )
        if value.size and (value == value.flat[0]).all():
            value += JITTER * rng.standard_normal(value.shape).astype(np.float32)
        params[name] = value
    keys = counted_keys(state.rest)
    rest = {name: keys[name] if name in keys else np.array(leaf) for name, leaf in state.rest.items()}
    numbers = {name: np.array(leaf) for name, leaf in hparams.items()}
    asked = steps.split.params
    streams = steps.split.rest.streams | frozenset(keys)
    return Weights(
        params=params,
        rest=rest,
        hparams=numbers,
        keys=frozenset(keys),
        streams=streams,
        other_kinds=tuple(other_kinds(state.rest)),
        axes=frozenset(str(axis) for axes in (*asked.axes, *asked.partition_spec) for axis in axes or ()),
    )


@dataclass(frozen=True)
class StepProgram:
    """A step in a layout, compiled or being so."""

    layout: Layout
    state: TrainState
    """Shapes and shardings."""
    hparams: Mapping[str, Any]
    """Likewise."""
    batch: Any
    program: Any
    weights: Weights

    @classmethod
    def compile_program(
        cls, model: Any, loss_fn: LossFn, layout: Layout, weights: Weights, batch: Any, *, wide: bool = False
    ) -> "StepProgram":
        """The program for a model, or what builds it, and a batch of int32[B, L] numpy arrays, one or a `Packed`;
        `wide`: in float64, which must be enabled.

        What the model or the loss raises passes; what the compiler raises comes from `run`.
        """
        dtype = jnp.float64 if wide else jnp.float32
        placed = jax.tree.map(
            lambda array: jax.device_put(array, fit_sharding(layout.sharding, array.shape, layout.grad_accum)), batch
        )
        with devices_of(layout.mesh):
            steps = _steps(model, loss_fn, layout, dtype)
            state, hparams = _as_given(steps.state, layout, weights, wide=wide)
            program = compile_step(steps.train, (state, hparams, abstract(placed)), layout.mesh)
        return cls(layout, state, hparams, placed, program, weights)

    @property
    def scalars(self) -> frozenset[str]:
        """Names of the numbers that a step gives, where it is one program."""
        return frozenset(self.program.results[1].scalars)

    @property
    def divides_parameters(self) -> bool:
        """Whether a parameter is cut over devices."""
        return not all(leaf.sharding.is_fully_replicated for leaf in self.state.params.values())

    def run(self, params: Mapping[str, np.ndarray] | None = None, *, noise: Collection[str] = ()) -> Outcome:
        """One step, from other parameters if they are given; `noise` names the random streams that draw theirs."""
        values: dict[str, Any] = {**self.weights.rest, **(params or self.weights.params)}
        values |= {name: switch_on(self.weights.rest[name]) for name in noise}

        def place(name: str, like: Any) -> jax.Array:
            if is_key(like):
                return jax.device_put(wrap(values[name]), like.sharding)
            return jax.device_put(np.asarray(values[name], like.dtype), like.sharding)

        leaves = [
            {name: place(name, like) for name, like in part.items()} for part in (self.state.params, self.state.rest)
        ]
        empty: Any = jax.tree.map(
            lambda like: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding),
            (self.state.step, self.state.opt_state, self.state.health),
        )
        hparams = {
            name: jax.device_put(np.asarray(self.weights.hparams[name], like.dtype), like.sharding)
            for name, like in self.hparams.items()
        }
        reset_draws()
        before = TrainState(empty[0], leaves[0], leaves[1], empty[1], empty[2])
        state, metrics = self.program(before, hparams, self.batch)
        state, metrics = jax.block_until_ready((state.whole if isinstance(state, DeviceStates) else state, metrics))
        return _outcome(state, metrics, self.weights)


def _as_given(
    state: TrainState, layout: Layout, weights: Weights, *, wide: bool
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The abstract state with counted keys and, with `wide`, floating state in float64; and the abstract hparams."""

    def own(name: str, like: Any) -> Any:
        if name in weights.keys:
            dtype = jax.eval_shape(wrap, weights.rest[name]).dtype
            return jax.ShapeDtypeStruct(like.shape, dtype, sharding=like.sharding)
        if wide and jnp.issubdtype(like.dtype, jnp.floating):
            return jax.ShapeDtypeStruct(like.shape, jnp.float64, sharding=like.sharding)
        return like

    whole = place_whole(layout.mesh)
    numbers = {
        name: own(name, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=whole))
        for name, value in weights.hparams.items()
    }
    return state._replace(rest={name: own(name, like) for name, like in state.rest.items()}), numbers


def _steps(model: Any, loss_fn: LossFn, layout: Layout, dtype: Any = None) -> Steps:
    options = StepOptions(
        grad_accum=layout.grad_accum, fsdp=layout.fsdp, dtype=dtype, virtual_shards=layout.virtual_shards
    )
    return make_steps(model, loss_fn, _keep_gradient(), layout.sharding, options, {SPIKE_FACTOR: 0.0})


class Compiling:
    """A program that is compiled in the background; a call waits for it, and raises what the compiler raised."""

    def __init__(self, jitted: Any, args: Sequence[Any], mesh: Mesh | None) -> None:
        """Traces it in this thread, which alone sees that float64 is enabled."""
        assert mesh is not None
        options = RUN_ONCE if device_type(mesh).platform == "cpu" else None
        with jax.set_mesh(mesh):
            lowered = jitted.lower(*args)
        self.results: Any = lowered.out_info
        """Shapes and types."""
        self._program = _COMPILER.submit(lowered.compile, compiler_options=options)

    def __call__(self, *args: Any) -> Any:
        """The results of the program."""
        return self._program.result()(*args)


def compile_step(jitted: Any, args: tuple[Any, ...], mesh: Mesh) -> Any:
    """The program of a jitted step, or of one that has parts, for such abstract arguments."""
    return Compiler.by_device(Compiling, mesh).step(jitted, args, mesh)


def _outcome(state: TrainState, metrics: Any, weights: Weights) -> Outcome:
    found: dict[str, Any] = {LOSS: metrics.scalars["loss"]}
    found |= {SCALAR + name: value for name, value in metrics.scalars.items() if name not in OF_STEP}
    if metrics.row_loss is not None:
        found[ROWS] = metrics.row_loss
    found |= {GRADIENT + name: grad for name, grad in state.opt_state.items()}
    for name, leaf in state.rest.items():
        found[STATE + name] = jax.random.key_data(leaf) if is_key(leaf) else leaf
    values, copies = {}, {}
    for name, array in found.items():
        each = copies_of(array)
        values[name] = each[0]
        if len(each) > 1:
            copies[name] = each
    return Outcome(values=values, copies=copies, drawn=count_draws(weights.keys))


def copies_of(array: jax.Array) -> list[np.ndarray]:
    """The whole array as the first copy of each part has it, and then each other way to put it together that differs.

    The n-th copies of all parts make up the n-th whole; one that is equal to the first to the bit is left out.
    """
    parts: dict[int, list[Any]] = {}
    for shard in array.addressable_shards:
        parts.setdefault(shard.replica_id, []).append(shard)
    wholes: list[np.ndarray] = []
    for number in sorted(parts):
        whole = np.empty(array.shape, array.dtype)
        for shard in parts[number]:
            whole[shard.index] = np.asarray(shard.data)
        if not wholes or not np.array_equal(wholes[0], whole, equal_nan=np.issubdtype(whole.dtype, np.floating)):
            wholes.append(whole)
    return wholes
