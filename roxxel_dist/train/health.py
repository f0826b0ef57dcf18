"""Steps that went wrong, found on the device: a loss or gradient that is no number, or a loss far above its mean.

A few scalars in the train state are brought up to date by every step and read with the metrics of the next logged one,
so looking costs nothing and no step is missed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MEMORY = 100
"""Steps over which the running mean looks back."""
WARM = 20
"""Good steps before a loss can be called a spike: the first ones fall too fast to compare."""


class Health(NamedTuple):
    """What is remembered of the steps so far."""

    mean: jax.Array
    """float32[]: running mean of the loss, nats, over good steps."""
    good: jax.Array
    """int32[]: good steps."""
    bad_step: jax.Array
    """int32[]: the first bad step, counted from 1, and 0 for none; the latest one where bad steps are skipped."""
    bad_loss: jax.Array
    """float32[]: its loss."""
    bad_norm: jax.Array
    """float32[]: the norm of its gradient."""
    skipped: jax.Array
    """int32[]: steps whose update was not applied."""
    in_a_row: jax.Array
    """int32[]: bad steps without a good one between, up to now."""


def healthy() -> Health:
    """Before the first step."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return Health(mean=zero, good=none, bad_step=none, bad_loss=zero, bad_norm=zero, skipped=none, in_a_row=none)


def observe(
    health: Health, step: jax.Array, loss: jax.Array, grad_norm: jax.Array, spike_factor: jax.Array, *, skip: bool
) -> tuple[Health, jax.Array]:
    """(health after a step, bool[] whether the step is bad).

    Args:
        health: until now.
        step: int32[], counted from 1.
        loss: float32[].
        grad_norm: float32[].
        spike_factor: float32[]: a loss above so many times the running mean is bad; 0 for never.
        skip: whether bad steps are left out, so that there may be many.
    """
    spike = (spike_factor > 0) & (health.good >= WARM) & (loss > spike_factor * health.mean)
    bad = ~jnp.isfinite(loss) | ~jnp.isfinite(grad_norm) | spike
    good = health.good + jnp.where(bad, 0, 1)
    towards = (loss - health.mean) / jnp.minimum(good, MEMORY)
    note = bad & (skip | (health.bad_step == 0))
    after = Health(
        mean=jnp.where(bad, health.mean, health.mean + towards),
        good=good,
        bad_step=jnp.where(note, step, health.bad_step),
        bad_loss=jnp.where(note, loss, health.bad_loss),
        bad_norm=jnp.where(note, grad_norm, health.bad_norm),
        skipped=health.skipped + jnp.where(bad & skip, 1, 0),
        in_a_row=jnp.where(bad, health.in_a_row + 1, 0),
    )
    return after, bad
