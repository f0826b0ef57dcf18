"""The training step: an NNX model as flat leaves, one jitted program a batch shape.

The model is split once. Its leaves travel as dictionaries from a parameter's name to its array, which cost a fraction
of what NNX states or objects cost at the border of a jitted call, and are merged into a module again while tracing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding

Leaves = dict[str, jax.Array]
LossFn = Callable[[Any, jax.Array], Any]


class TrainState(NamedTuple):
    """All that a step changes."""

    step: jax.Array
    """int32[]: optimizer steps done."""
    params: Leaves
    rest: Leaves
    """What is no parameter: random streams, running statistics."""
    opt_state: Any


@dataclass(frozen=True)
class ModelParts:
    """A module taken apart: what does not change while training, in its two modes."""

    training: Any
    """Graph definition with dropout on."""
    evaluating: Any
    """Graph definition with dropout off."""
    param_names: tuple[str, ...]
    param_tree: Any
    rest_names: tuple[str, ...]
    rest_tree: Any

    def merge(self, params: Leaves, rest: Leaves, *, training: bool) -> Any:
        """The module made of these leaves."""
        graphdef = self.training if training else self.evaluating
        return nnx.merge(
            graphdef,
            jax.tree.unflatten(self.param_tree, [params[name] for name in self.param_names]),
            jax.tree.unflatten(self.rest_tree, [rest[name] for name in self.rest_names]),
        )


def take_apart(model: nnx.Module) -> tuple[ModelParts, Leaves, Leaves]:
    """(what does not change, parameters by name, everything else by name) of a module."""
    model.eval()
    evaluating, _, _ = nnx.split(model, nnx.Param, ...)
    model.train()
    training, params, rest = nnx.split(model, nnx.Param, ...)
    param_leaves, param_tree = _named_leaves(params)
    rest_leaves, rest_tree = _named_leaves(rest)
    return (
        ModelParts(training, evaluating, tuple(param_leaves), param_tree, tuple(rest_leaves), rest_tree),
        param_leaves,
        rest_leaves,
    )


def _named_leaves(state: Any) -> tuple[Leaves, Any]:
    """{"blocks.0.attention.qkv.kernel": array, …} in the tree's order, and the tree."""
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    named = {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in paths
    }
    return named, tree


def init_state(params: Leaves, rest: Leaves, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step, a whole copy on every device of the mesh."""
    everywhere = NamedSharding(mesh, P())
    params, rest = ({name: _spread(leaf, everywhere) for name, leaf in leaves.items()} for leaves in (params, rest))
    opt_state = jax.jit(tx.init, out_shardings=everywhere)(params)
    return TrainState(_spread(jnp.zeros((), jnp.int32), everywhere), params, rest, opt_state)


def _spread(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A copy of `leaf` on every device of a mesh that other processes share; all have the same value already."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _spread(jax.random.key_data(leaf), sharding)
        return jax.jit(lambda d: jax.random.wrap_key_data(d, impl=jax.random.key_impl(leaf)), out_shardings=sharding)(
            data
        )
    value = np.array(leaf)  # a copy: the state is donated, and the caller's arrays must survive that
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def unpack_loss(result: Any) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """(loss, every scalar to log) from what a loss function returned: a scalar, (loss, aux) or a dict with "loss".

    Raises:
        ValueError: it is none of these, or the loss is not a scalar.
    """
    loss, aux = result, {}
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise ValueError(
                f'the loss function returned a dict without "loss": its keys are {", ".join(map(str, result))}'
            )
        loss, aux = result["loss"], {k: v for k, v in result.items() if k != "loss"}
    elif isinstance(result, tuple):
        loss, aux = result[0], result[1]
        aux = aux if isinstance(aux, Mapping) else {"aux": aux}
    if jnp.shape(loss) != ():
        raise ValueError(
            f"the loss function returned an array of shape {jnp.shape(loss)}: take its mean, a loss is one number"
        )
    return loss, {str(k): v for k, v in aux.items() if jnp.shape(v) == ()}


def make_step(
    parts: ModelParts,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    grad_accum: int = 1,
    sharding: NamedSharding | None = None,
    schedule: optax.Schedule | None = None,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """A jitted (state, int32[B, L]) -> (state, metrics); the state passed in is donated.

    Metrics are float32 scalars: "loss" and what the loss function adds, the mean over micro-batches, "grad_norm", and
    "lr" where the schedule is given.
    """

    def loss_of(params: Leaves, rest: Leaves, batch: jax.Array) -> tuple[jax.Array, tuple[Leaves, Any]]:
        model = parts.merge(params, rest, training=True)
        loss, metrics = unpack_loss(loss_fn(model, batch))
        new_rest, _ = _named_leaves(nnx.split(model, nnx.Param, ...)[2])
        return loss, (new_rest, {"loss": loss, **metrics})

    gradient = jax.grad(loss_of, has_aux=True)

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        if grad_accum == 1:
            grads, (rest, metrics) = gradient(state.params, state.rest, batch)
        else:
            grads, rest, metrics = accumulate(gradient, state.params, state.rest, batch, grad_accum, sharding)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {**metrics, "grad_norm": optax.tree.norm(grads)}
        if schedule is not None:
            metrics["lr"] = schedule(state.step)
        return TrainState(state.step + 1, params, rest, opt_state), jax.tree.map(jnp.float32, metrics)

    return jax.jit(step, donate_argnums=0)


def accumulate(
    gradient: Callable[..., Any],
    params: Leaves,
    rest: Leaves,
    batch: jax.Array,
    count: int,
    sharding: NamedSharding | None,
) -> tuple[Leaves, Leaves, Any]:
    """Mean gradients and metrics over `count` micro-batches of int32[B, L], one after another in a scan.

    Micro-batch i takes every count-th row from i: each device then finds its part among the rows that it holds already.
    """
    rows, length = batch.shape
    micro = batch.reshape(rows // count, count, length).swapaxes(0, 1)
    if sharding is not None:
        fitting = fit_sharding(sharding, (rows // count, length))
        micro = jax.lax.with_sharding_constraint(micro, NamedSharding(sharding.mesh, P(None, *fitting.spec)))

    def add(carry: Any, piece: jax.Array) -> tuple[Any, Any]:
        total, rest = carry
        grads, (rest, metrics) = gradient(params, rest, piece)
        return (jax.tree.map(lambda t, g: t + g / count, total, grads), rest), metrics

    zeros = jax.tree.map(jnp.zeros_like, params)
    (grads, rest), metrics = jax.lax.scan(add, (zeros, rest), micro)
    return grads, rest, jax.tree.map(lambda m: m.mean(0), metrics)


def make_eval_step(parts: ModelParts, loss_fn: LossFn) -> Callable[[TrainState, jax.Array], jax.Array]:
    """A jitted (state, int32[B, L]) -> float32 loss with dropout off; nothing is donated."""

    def evaluate(params: Leaves, rest: Leaves, batch: jax.Array) -> jax.Array:
        return jnp.float32(unpack_loss(loss_fn(parts.merge(params, rest, training=False), batch))[0])

    jitted = jax.jit(evaluate)
    return lambda state, batch: jitted(state.params, state.rest, batch)


def fetch(values: Any) -> Any:
    """The one place where numbers come from the device: scalars of a tree as Python floats. Waits for them."""
    return jax.tree.map(float, jax.device_get(values))
