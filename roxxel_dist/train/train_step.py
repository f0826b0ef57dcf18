"""The training step: one jitted program a batch shape.

The model's leaves travel as dictionaries from a parameter's name to its array (see `state.py`), and are merged into a
module again while tracing. Numbers that a sweep may change are inputs of the program (`settings`), not constants in it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding
from roxxel_dist.train.bad_steps import Health, observe
from roxxel_dist.train.optimizer import Optimizer, global_norm
from roxxel_dist.train.train_state import Leaves, ModelParts, TrainState

LossFn = Callable[[Any, Any], Any]
Settings = dict[str, jax.Array]
SPIKE_FACTOR = "spike_factor"
BALANCE = "balance_loss"
"""What a loss function calls a loss that the gradient is of too, and that is logged apart: that of a model with
experts, which keeps them equally busy."""


WEIGHT = "loss_weight"
"""What a loss function calls the number of tokens that its loss is the mean of, where that differs between batches."""


class Metrics(NamedTuple):
    """What a step tells, on the device until it is fetched."""

    scalars: dict[str, jax.Array]
    """float32[]: "loss" and what else the loss function returned, "grad_norm", "update_norm", "lr" if it is known."""
    row_loss: jax.Array | None
    """float32[B]: the loss of each row, where the loss function returned "row_loss"."""
    health: Health


class Loss(NamedTuple):
    """What a loss function returned, taken apart."""

    loss: jax.Array
    """Without the balance loss."""
    scalars: dict[str, jax.Array]
    row_loss: jax.Array | None
    weight: jax.Array | None = None
    """float32[]: what the loss is the mean of, such as tokens; None where all micro-batches count the same."""

    @property
    def minimized(self) -> jax.Array:
        """float32[]: what the gradient is of: the loss, and the balance loss if there is one."""
        loss = jnp.float32(self.loss)
        return loss + jnp.float32(self.scalars[BALANCE]) if BALANCE in self.scalars else loss


def unpack_loss(result: Any) -> Loss:
    """From a scalar, (loss, aux) or a dict with "loss": the loss, every scalar to log, "row_loss" [B] and "loss_weight"
    if given.

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
    elif isinstance(result, tuple | list):
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"the loss function returned a {type(result).__name__} of {len(result)}: return a scalar, a tuple "
                f'(loss, aux), or a dict with "loss"'
            )
        loss, aux = result
        aux = aux if isinstance(aux, Mapping) else {"aux": aux}
    if jnp.shape(loss) != ():
        raise ValueError(
            f"the loss function returned an array of shape {jnp.shape(loss)}: take its mean, a loss is one number"
        )
    scalars = {str(k): v for k, v in aux.items() if jnp.shape(v) == () and k != WEIGHT}
    return Loss(loss, scalars, aux.get("row_loss"), aux.get(WEIGHT))


def make_step(
    parts: ModelParts,
    loss_fn: LossFn,
    optimizer: Optimizer,
    like: TrainState,
    sharding: NamedSharding,
    *,
    grad_accum: int = 1,
    compute_dtype: Any = None,
    skip_bad: bool = False,
) -> Callable[[TrainState, Settings, Any], tuple[TrainState, Metrics]]:
    """A jitted (state, settings, batch) -> (state, metrics); the state passed in is donated, and keeps its shardings.

    Args:
        parts: the model.
        loss_fn: (model, batch) to what `unpack_loss` takes. Minimised is the loss and, where it tells one, the
            "balance_loss" with it.
        optimizer: see `optimizer.py`.
        like: the state, or its shapes and shardings.
        sharding: of a (rows, tokens) batch: int32[B, L], or a tuple of such arrays.
        grad_accum: micro-batches, see `micro_batches`; divides a B that is larger.
        compute_dtype: the type that parameters are cast to for the forward and backward pass, while the optimizer
            keeps them in their own; None for their own.
        skip_bad: leave a bad step's update out (see `health.py`).
    """

    def loss_of(params: Leaves, rest: Leaves, settings: Settings, batch: Any) -> tuple[jax.Array, Any]:
        model = parts.merge(params, rest, settings, training=True, dtype=compute_dtype)
        found = unpack_loss(loss_fn(model, batch))
        return found.minimized, (parts.rest_of(model), found)

    gradient = jax.grad(loss_of, has_aux=True)

    def step(state: TrainState, settings: Settings, batch: Any) -> tuple[TrainState, Metrics]:
        count = micro_batches(grad_accum, jax.tree.leaves(batch)[0].shape[0])
        if count == 1:
            grads, (rest, found) = gradient(state.params, state.rest, settings, batch)
        else:
            grads, rest, found = accumulate(gradient, state, settings, batch, count, sharding)
        transformation = optimizer.build(settings, state.step)
        updates, opt_state = transformation.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        grad_norm = global_norm(grads)
        scalars = {**found.scalars, "loss": found.loss, "grad_norm": grad_norm, "update_norm": global_norm(updates)}
        rate = optimizer.rate(settings, state.step)
        scalars |= {} if rate is None else {"lr": rate}
        health, bad = observe(
            state.health, state.step + 1, jnp.float32(found.loss), jnp.float32(grad_norm), settings[SPIKE_FACTOR],
            skip=skip_bad,
        )  # fmt: skip
        if skip_bad:
            old, new = (state.params, state.rest, state.opt_state), (params, rest, opt_state)
            params, rest, opt_state = jax.tree.map(partial(jnp.where, bad), old, new)
        row_loss = None if found.row_loss is None else jnp.float32(found.row_loss)
        return TrainState(state.step + 1, params, rest, opt_state, health), Metrics(
            jax.tree.map(jnp.float32, scalars), row_loss, health
        )

    kept = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(step, donate_argnums=0, out_shardings=(kept, NamedSharding(sharding.mesh, P())))


def micro_batches(grad_accum: int, rows: int) -> int:
    """Into how many micro-batches a batch of so many rows is cut: each has a row at least."""
    return min(grad_accum, rows)


def accumulate(
    gradient: Callable[..., Any], state: TrainState, settings: Settings, batch: Any, count: int, sharding: NamedSharding
) -> tuple[Leaves, Leaves, Loss]:
    """Mean gradients and metrics over `count` micro-batches, one after another in a scan.

    Where they tell the weights of their losses, gradients and losses are weighed by these: so the loss of packed
    documents, a mean over tokens of which each micro-batch counts others, is that of the whole batch.

    Micro-batch i takes every count-th row from i: each device then finds its part among the rows that it holds already.
    """

    def pieces(array: jax.Array) -> jax.Array:
        rows, length = array.shape
        micro = array.reshape(rows // count, count, length).swapaxes(0, 1)
        spec = fit_sharding(sharding, (rows // count, length)).spec
        return jax.lax.with_sharding_constraint(micro, NamedSharding(sharding.mesh, P(None, *spec)))

    def add(carry: Any, piece: Any) -> tuple[Any, Any]:
        total, rest = carry
        grads, (rest, found) = gradient(state.params, rest, settings, piece)
        if found.weight is None:
            return (jax.tree.map(lambda t, g: t + g / count, total, grads), rest), found
        return (jax.tree.map(lambda t, g: t + g * found.weight, total, grads), rest), found

    # Sums of bfloat16 lose what is small: they are kept in float32.
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), state.params)
    (total, rest), found = jax.lax.scan(add, (zeros, state.rest), jax.tree.map(pieces, batch))
    loss, row_loss = found.loss.mean(), found.row_loss
    if found.weight is not None:
        counted = jnp.maximum(found.weight.sum(), 1)
        loss = (found.loss * found.weight).sum() / counted
        total = jax.tree.map(lambda t: t / counted, total)
    grads = jax.tree.map(lambda t, p: t.astype(p.dtype), total, state.params)
    row_loss = None if row_loss is None else row_loss.swapaxes(0, 1).reshape(-1)
    return grads, rest, Loss(loss, {k: v.mean(0) for k, v in found.scalars.items()}, row_loss)


def make_eval_step(
    parts: ModelParts, loss_fn: LossFn, compute_dtype: Any = None
) -> Callable[[Leaves, Leaves, Settings, Any], dict[str, jax.Array]]:
    """A jitted (params, rest, settings, batch) -> float32[] "loss", and "balance_loss" where there is one.

    Dropout is off, and nothing is donated.
    """

    def evaluate(params: Leaves, rest: Leaves, settings: Settings, batch: Any) -> dict[str, jax.Array]:
        model = parts.merge(params, rest, settings, training=False, dtype=compute_dtype)
        found = unpack_loss(loss_fn(model, batch))
        told = {"loss": found.loss, **{name: v for name, v in found.scalars.items() if name == BALANCE}}
        return jax.tree.map(jnp.float32, told)

    return jax.jit(evaluate)


def fetch(values: Any) -> Any:
    """The one place where numbers come from the device: a tree of floats, and of numpy arrays. Waits for them."""
    return jax.tree.map(lambda v: v.item() if v.ndim == 0 else v, jax.device_get(values))
