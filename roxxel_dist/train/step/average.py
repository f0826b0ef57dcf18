"""An average of the parameters, which is evaluated and exported in their place; it is kept in the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from roxxel_dist.model.split import Leaves


class Averaged(NamedTuple):
    """The state of an optimizer, with an average beside it. The fields' names are in every checkpoint of such a run."""

    inner: Any
    """The state of the optax transformation."""
    average: Leaves
    """By the names of the parameters, in their shapes and types, placed as they are."""


def inner_state(opt_state: Any) -> Any:
    """The state of the optax transformation, whether there is an average beside it or not."""
    return opt_state.inner if isinstance(opt_state, Averaged) else opt_state


def schedule_free_average(opt_state: Any, params: Leaves) -> Leaves | None:
    """The average x of a schedule-free optimizer (Defazio et al. 2024, arXiv 2405.15682), by the state of its optax
    transformation, which may be part of a chain, and the parameters y; None of another optimizer.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
        if _is_schedule_free(node):
            return schedule_free_eval_params(node, params)
    return None


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState)


def next_average(before: Any, inner: Any, params: Leaves, decay: jax.Array | None, steps: jax.Array) -> Any:
    """The optimizer's state after an update: the `inner` one of the optax transformation, and the average of `params`
    where the state `before` has one; `decay`, None of a schedule-free optimizer, and `steps` as for `update_average`.
    """
    if not isinstance(before, Averaged):
        return inner
    average = schedule_free_average(inner, params)
    if average is None:
        assert decay is not None
        average = update_average(before.average, params, decay, steps)
    return Averaged(inner, average)


def begin_average(params: Leaves) -> Leaves:
    """A copy of the parameters: both are donated, so they must not share memory."""
    return jax.tree.map(jnp.copy, params)


def update_average(average: Leaves, params: Leaves, decay: jax.Array, steps: jax.Array) -> Leaves:
    """The average a of the parameters p after one more update, of the `decay` d, float32[], and so many `steps` n.

    a + (p - a) (1 - d) / (1 - d^n), with n, int32[], counted from 1: the bias correction of Adam (Kingma & Ba 2015,
    arXiv 1412.6980) in one formula. The weight of a_0, the random weights of the beginning, is 0 from the first step
    on, and the weights of p_1 … p_n, in proportion to d^(n - i), sum to 1.
    """
    share = jnp.where(steps <= 1, 1.0, (1 - decay) / -jnp.expm1(steps * jnp.log(decay)))
    return {name: leaf + (params[name] - leaf) * share.astype(leaf.dtype) for name, leaf in average.items()}
