"""The training step: one jitted program a batch shape.

The model's leaves travel as dictionaries from a parameter's name to its array (see `train_state.py`), and are merged
into a module again while tracing. Numbers that a sweep may change are inputs of the program (`hparams`), not constants.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding, micro_batches
from roxxel_dist.cluster.parameter_sharding import constrain_tokens, on_phase_mesh
from roxxel_dist.cluster.step_parts import OPTIMIZER
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.loss import DROPPED, END_NATS, LOAD, minimized_losses, next_token_loss, token_losses
from roxxel_dist.model.split import Leaves, ModuleSplit, cast
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.step.average import inner_state, next_average
from roxxel_dist.train.step.bad_steps import LossMonitorState, update_monitor
from roxxel_dist.train.step.local_sums import LocalSums, accumulation
from roxxel_dist.train.step.optimizer import Optimizer, for_model, global_norm, updates_of
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.utils.voice import argument

LossFn = Callable[[Any, Any], Any]
Hparams = dict[str, jax.Array]
SPIKE_FACTOR = "spike_factor"
EMA = "ema"
"""Among the hparams: the decay of the average of the parameters, where the state has one."""
BALANCE = "balance_loss"
"""A loss function's name for a further loss, added for the gradient and logged apart: it keeps the experts of a model
equally busy."""
WEIGHT = "loss_weight"
"""A loss function's name for the weight of its mean loss and of its other numbers, if that differs between batches: the
number of tokens that it is a mean of, or anything in proportion to it."""


def loop_numbers(options: LoopOptions) -> dict[str, float]:
    """The options that are inputs of every step, by name."""
    return {SPIKE_FACTOR: options.spike_factor} | ({EMA: options.ema} if options.ema else {})


class Metrics(NamedTuple):
    """The numbers of a step, on the device until they are fetched."""

    scalars: dict[str, jax.Array]
    """float32[]: "loss" and what else the loss function returned, "grad_norm", "update_norm", "lr" if it is known."""
    row_loss: jax.Array | None
    """float32[B]: the loss of each row, where the loss function returned "row_loss"."""
    row_weight: jax.Array | None
    """float32[B]: how much each row counts in a mean of `row_loss`; None where all count the same."""
    health: LossMonitorState
    load: jax.Array | None = None
    """float32[layers, experts]: the tokens' choices of each expert, in any unit; None without experts."""
    digest: jax.Array | None = None
    """uint32[4], see `digest_chain.py`: added by the loop, not by the step."""


class Loss(NamedTuple):
    """The result of a loss function, taken apart."""

    loss: jax.Array
    """Without the balance loss."""
    scalars: dict[str, jax.Array]
    row_loss: jax.Array | None
    weight: jax.Array | None = None
    """float32[]: how much the loss and the scalars count beside those of other micro-batches: the tokens that the loss
    is a mean of, or any share of them; None where all micro-batches count the same."""
    row_weight: jax.Array | None = None
    """float32[B]: the same of each row of `row_loss`."""
    load: jax.Array | None = None
    """float32[layers, experts]: see `Metrics`; where it is of several micro-batches, the sum."""

    @property
    def minimized(self) -> jax.Array:
        """float32[]: what the gradient is of: the loss, and the balance loss if there is one."""
        loss = jnp.float32(self.loss)
        return loss + jnp.float32(self.scalars[BALANCE]) if BALANCE in self.scalars else loss


def measure(loss_fn: LossFn, model: Any, batch: Any, end: int | None = None) -> Loss:
    """The result of a loss function for a batch, taken apart; `end` is that of `token_losses`, for a built-in loss."""
    if loss_fn is token_losses:  # which cuts what it computes on, a token less than a row
        return unpack_loss(minimized_losses(model, batch, end=end))
    if loss_fn is not next_token_loss:
        return unpack_loss(loss_fn(model, jax.tree.map(lambda array: constrain_tokens(array)[0], batch)))
    # The same number, and its weight, which one number has no place for.
    losses = minimized_losses(model, batch, end=end)
    scalars = {name: losses[name] for name in (END_NATS, DROPPED) if name in losses}
    return Loss(losses["loss"] + losses.get(BALANCE, 0.0), scalars, None, losses.get(WEIGHT), load=losses.get(LOAD))


def unpack_loss(result: Any) -> Loss:
    """Take apart a scalar, (loss, aux) or a dict with "loss": the loss, every scalar to log, and "loss_weight",
    "row_loss" [B], "row_weight" [B] and "expert_load" [layers, experts] if given.

    Raises UserError where it is none of these, or the loss or its weight is not a scalar.
    """
    loss, aux = result, dict[Any, Any]()
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise UserError(
                f'the loss function returned a dict without "loss": its keys are {", ".join(map(str, result))}'
            )
        loss, aux = result["loss"], {k: v for k, v in result.items() if k != "loss"}
    elif isinstance(result, tuple | list):
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(
                f"the loss function returned a {type(result).__name__} of {len(result)}: return a scalar, a tuple "
                f'(loss, aux), or a dict with "loss"'
            )
        loss, aux = result
        aux = aux if isinstance(aux, Mapping) else {"aux": aux}
    if loss is None:
        raise UserError("the loss function returned None: end it with `return loss`")
    for name, value in {"loss": loss, **aux}.items():
        if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
            raise UserError(
                f"the loss function returned {value!r} as {str(name)!r}: each value must be a number or an array, so "
                f"leave out what is none"
            )
    if jnp.shape(loss) != ():
        raise UserError(
            f"the loss function returned an array of shape {jnp.shape(loss)}: take its mean, a loss is one number"
        )
    scalars = {str(k): v for k, v in aux.items() if jnp.shape(v) == () and k != WEIGHT}
    if (weight := aux.get(WEIGHT)) is not None:
        if jnp.shape(weight) != ():
            raise UserError(
                f"{WEIGHT} of the loss function is an array of shape {jnp.shape(weight)}: take its sum, a weight is "
                f"one number for each batch"
            )
        weight = jnp.float32(weight)
    return Loss(loss, scalars, aux.get("row_loss"), weight, aux.get("row_weight"), aux.get(LOAD))


def make_step(
    split: ModuleSplit,
    loss_fn: LossFn,
    optimizer: Optimizer,
    like: TrainState,
    sharding: NamedSharding,
    *,
    grad_accum: int = 1,
    compute_dtype: Any = None,
    skip_bad: bool = False,
) -> Callable[[TrainState, Hparams, Any], tuple[TrainState, Metrics]]:
    """A jitted (state, hparams, batch) -> (state, metrics); the state passed in is donated, and keeps its shardings.

    `loss_fn` is (model, batch) to what `unpack_loss` takes; a "balance_loss" is minimised too. `like` is the state, or
    its shapes and shardings; `sharding` is that of a (rows, tokens) batch, int32[B, L], or a tuple of such arrays.
    `grad_accum` micro-batches divide a B that is larger (`micro_batches`); `compute_dtype` is that of parameters in the
    forward and backward pass, while the optimizer keeps them in their own; `skip_bad` leaves a bad step's update out
    (`bad_steps.py`).
    """

    def loss_of(params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> tuple[jax.Array, Any]:
        model = split.merge(params, rest, hparams, training=True, dtype=compute_dtype)
        loss = measure(loss_fn, model, batch)
        return loss.minimized, (split.rest_of(model), loss)

    gradient, optimizer = jax.grad(loss_of, has_aux=True), for_model(optimizer, split.params.matrices)

    def step(state: TrainState, hparams: Hparams, batch: Any) -> tuple[TrainState, Metrics]:
        state, hparams = on_phase_mesh((state, hparams))
        shape = jax.tree.leaves(batch)[0].shape
        count = micro_batches(grad_accum, shape[0])
        if count == 1:
            grads, (rest, loss) = gradient(state.params, state.rest, hparams, batch)
            grads, loss = zero_if_unweighted(grads, loss)
        else:
            how = accumulation(split, loss_fn, like, hparams, sharding, shape, grad_accum, compute_dtype)
            params = state.params
            if how.whole:
                narrow = cast(params, compute_dtype, split.params.uncast)
                params = jax.lax.with_sharding_constraint(narrow, dict(how.whole))
            grads, rest, loss = accumulate(gradient, params, state.rest, hparams, batch, count, sharding, how.local)
            grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        hparams = optimizer.for_batch(hparams, batch)
        return apply_gradient(optimizer, state, hparams, grads, rest, loss, skip_bad=skip_bad)

    kept = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(step, donate_argnums=0, out_shardings=(kept, NamedSharding(sharding.mesh, P())))


@jax.named_scope(OPTIMIZER)
def apply_gradient(
    optimizer: Optimizer,
    state: TrainState,
    hparams: Hparams,
    grads: Leaves,
    rest: Leaves,
    loss: Loss,
    *,
    skip_bad: bool,
) -> tuple[TrainState, Metrics]:
    """(the state after a step, its metrics), from the gradient, the loss, and the rest: no parameter and no hparam.

    `optimizer` is the result of its `for_model`.
    """
    args = hparams, state.step, grads, state.params, state.opt_state
    updates, params, opt_state = update_parameters(optimizer, *args, loss.minimized)
    norms = {"grad_norm": global_norm(grads), "update_norm": global_norm(updates)}
    metrics, bad = step_metrics(optimizer, hparams, state.step, state.health, loss, norms, skip_bad=skip_bad)
    opt_state = next_average(state.opt_state, opt_state, params, hparams.get(EMA), metrics.health.good)
    if skip_bad:
        old, new = (state.params, state.rest, state.opt_state), (params, rest, opt_state)
        params, rest, opt_state = jax.tree.map(partial(jnp.where, bad), old, new)
    return TrainState(state.step + 1, params, rest, opt_state, metrics.health), metrics


def update_parameters(
    optimizer: Optimizer,
    hparams: Hparams,
    step: jax.Array,
    grads: Any,
    params: Any,
    opt_state: Any,
    loss: jax.Array,
    norm: jax.Array | None = None,
) -> tuple[Any, Any, Any]:
    """(the changes, the parameters after them, the state of the optax transformation) of a step, counted from 0.

    The `norm` of the whole gradient is given where these parameters are some of all, or a part of each.
    """
    rule = optimizer.build(hparams, step, norm)
    changes, inner = updates_of(rule, grads, inner_state(opt_state), params, loss)
    return changes, optax.apply_updates(params, changes), inner


def step_metrics(
    optimizer: Optimizer,
    hparams: Hparams,
    step: jax.Array,
    health: LossMonitorState,
    loss: Loss,
    norms: dict[str, jax.Array],
    *,
    skip_bad: bool,
) -> tuple[Metrics, jax.Array]:
    """(the metrics of a step, counted from 0, bool[] whether it is bad); `norms` has "grad_norm", of the gradient."""
    scalars = {**loss.scalars, "loss": loss.loss, **norms}
    if (rate := optimizer.rate(hparams, step)) is not None:
        scalars["lr"] = rate
    scalars = jax.tree.map(jnp.float32, scalars)
    health, bad = update_monitor(
        health, step + 1, scalars["loss"], scalars["grad_norm"], hparams[SPIKE_FACTOR], skip=skip_bad
    )
    row_loss, row_weight = jax.tree.map(jnp.float32, (loss.row_loss, loss.row_weight))
    return Metrics(scalars, row_loss, row_weight, health, loss.load), bad


def accumulate(
    gradient: Callable[..., Any],
    params: Leaves,
    rest: Leaves,
    hparams: Hparams,
    batch: Any,
    count: int,
    sharding: NamedSharding,
    local: LocalSums | None = None,
) -> tuple[Leaves, Leaves, Loss]:
    """Mean gradients, in float32 at least, and metrics over `count` micro-batches, one after another in a scan.

    With the weights w_i of the micro-batches (all 1 where the loss function returns none), the gradient, the loss and
    every scalar x are sum(w_i x_i) / sum(w_i): so a mean over tokens, of which each micro-batch counts others, is that
    of the whole batch. With `local` sums each device has micro-batches of its own; there is no rest then.

    Micro-batch i takes every count-th row from i: each device then finds its part among the rows that it holds already.
    """
    parts = count * (local.devices if local else 1)

    def pieces(array: jax.Array) -> jax.Array:
        rows, length = array.shape
        micro = array.reshape(rows // count, count, length).swapaxes(0, 1)
        if local:
            return micro
        fitted = fit_sharding(sharding, (rows // count, length))
        return jax.lax.with_sharding_constraint(micro, NamedSharding(fitted.mesh, P(None, *fitted.spec)))

    def means(params: Leaves, hparams: Hparams, batch: Any) -> tuple[Leaves, tuple[Any, Leaves, Any], Any]:
        """(the gradient, (the loss and every scalar, the rest, the load), the losses and weights of rows)."""

        def add(carry: Any, piece: Any) -> tuple[Any, Any]:
            total, rest = carry
            grads, (rest, loss) = gradient(params, rest, hparams, piece)
            grads = jax.tree.map(lambda t, g: g.astype(t.dtype), total, grads)
            if loss.weight is None:
                return (jax.tree.map(lambda t, g: t + g / parts, total, grads), rest), loss
            return (jax.tree.map(lambda t, g: t + weigh(g, loss.weight), total, grads), rest), loss

        # Sums of bfloat16 lose what is small: they are kept in float32.
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        (total, after), losses = jax.lax.scan(add, (zeros, rest), jax.tree.map(pieces, batch))
        across = local.sum if local else lambda number: number
        counted = parts if losses.weight is None else divisor(across(losses.weight.sum()))
        # A mean in bfloat16 has three digits.
        numbers = jax.tree.map(jnp.float32, {"loss": losses.loss, **losses.scalars})
        numbers = {name: across(weigh(values, losses.weight).sum(0)) / counted for name, values in numbers.items()}
        if losses.weight is not None:
            total = jax.tree.map(lambda t: t / counted, total)
        of_rows = losses.row_loss, losses.row_weight
        of_rows = jax.tree.map(lambda values: values.swapaxes(0, 1).reshape(-1), of_rows)
        load = jax.tree.map(lambda values: across(values.sum(0)), losses.load)
        return local.gradient(total) if local else total, (numbers, after, load), of_rows

    found = local.run(means, params, hparams, batch) if local else means(params, hparams, batch)
    grads, (numbers, rest, load), (row_loss, row_weight) = found
    return grads, rest, Loss(numbers.pop("loss"), numbers, row_loss, row_weight=row_weight, load=load)


def zero_if_unweighted(grads: Leaves, loss: Loss) -> tuple[Leaves, Loss]:
    """The gradient and the loss of a whole batch; 0 where its weight is 0: it predicts nothing, and its mean is NaN."""
    if loss.weight is None:
        return grads, loss
    nothing = loss.weight == 0
    grads, numbers, scalars = jax.tree.map(lambda x: jnp.where(nothing, 0, x), (grads, loss.loss, loss.scalars))
    return grads, loss._replace(loss=numbers, scalars=scalars)


def weigh(value: jax.Array, weight: jax.Array | None) -> jax.Array:
    """A value times its weight, if there is one; 0 for a weight of 0, also of a NaN (the mean of no tokens)."""
    return value if weight is None else jnp.where(weight == 0, 0, value * weight)


def divisor(weight: jax.Array) -> jax.Array:
    """A sum of weights to divide by: 1 where nothing counts, so that the mean is 0."""
    return jnp.where(weight == 0, 1, weight)


def count_predicted(batch: Any) -> int:
    """How many tokens a batch of B rows of L tokens predicts where its loss function does not say: B (L - 1)."""
    rows, length = jax.tree.leaves(batch)[0].shape
    return rows * (length - 1)


def make_eval_step(
    split: ModuleSplit, loss_fn: LossFn, compute_dtype: Any = None, end: int | None = None
) -> Callable[[Leaves, Leaves, Hparams, Any], dict[str, jax.Array]]:
    """A jitted (params, rest, hparams, batch) -> float32[] "loss", "loss_weight", each scalar of the loss function, and
    with `end` the sum `END_NATS`, see `token_losses`.

    Dropout is off, and nothing is donated.
    """

    def evaluate(params: Leaves, rest: Leaves, hparams: Hparams, batch: Any) -> dict[str, jax.Array]:
        params, rest, hparams = on_phase_mesh((params, rest, hparams))
        model = split.merge(params, rest, hparams, training=False, dtype=compute_dtype)
        loss = measure(loss_fn, model, batch, end)
        weight = jnp.float32(count_predicted(batch) if loss.weight is None else loss.weight)
        return jax.tree.map(jnp.float32, {**loss.scalars, "loss": loss.loss, WEIGHT: weight})

    return jax.jit(evaluate)


def check_vocabulary(
    split: ModuleSplit,
    loss_fn: LossFn,
    like: TrainState,
    hparams: Hparams,
    mesh: Mesh,
    shape: Shape,
    datasets: Mapping[str, Roxxel],
) -> None:
    """Raises ValueError where the data has tokens that the model has no logits for; nothing is computed.

    A model that is not called with tokens alone is left to its loss. With a loss of the user's own, so is one that
    gives something else than an array for each token.
    """
    name, size = max(((name, data.vocab_size or 0) for name, data in datasets.items()), key=lambda item: item[1])

    def logits_of(state: TrainState, hparams: Hparams, tokens: Any) -> Any:
        return split.merge(state.params, state.rest, hparams, training=False)(tokens)

    tokens = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len - 1), jnp.int32)
    try:
        with jax.set_mesh(mesh):
            logits = jax.eval_shape(logits_of, like, hparams, tokens)
    except Exception:  # of whatever kind: the loss may know how to call this model
        return
    own_loss = loss_fn not in (token_losses, next_token_loss)
    form = getattr(logits, "shape", None)
    if form is None or form[:-1] != tokens.shape:
        if own_loss:
            return
        what = f"a {type(logits).__name__}" if form is None else f"an array of shape {form}"
        raise UserError(
            f"the model returns {what} for tokens of shape {tokens.shape}: it must return logits of shape "
            f"{(*tokens.shape, size)}, or needs a loss of your own"
        )
    if form[-1] >= size:
        return
    # What an own loss makes of its model may be no logits yet: then the weights of those are a parameter.
    weights = (axis for leaf in jax.tree.leaves(like.params) for axis in leaf.shape)
    if own_loss and any(size <= n <= 1.1 * size + 64 for n in weights):
        return
    raise UserError(
        f"the model gives {form[-1]} logits per token, and the data {name!r} has {size} tokens: make it with "
        f"{argument('vocab_size', size)}, or train on data that was made with the model's tokenizer"
    )


def fetch(values: Any) -> Any:
    """The one place where numbers come from the device: a tree of floats, and of numpy arrays. Waits for them."""
    return jax.tree.map(lambda v: v.item() if v.ndim == 0 else v, jax.device_get(values))
