"""Bad steps: a loss or gradient that is not finite, or a loss far above its running mean; found on the device.

Each step updates a few scalars in the train state, which are fetched with the metrics of the next logged step: looking
costs nothing, and no bad step is missed. The host then ends the run, reports skipped updates, or rewinds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.utils.voice import argument

MEMORY = 100
"""Steps over which the running mean looks back."""
WARM = 20
"""Good steps before a loss can be called a spike: the first ones fall too fast to compare."""
NAMED_ROWS = 3
UNKNOWN = " (its weights may be ruined, as no step after it went well: no checkpoint is known to be good)"
"""What a rewind says of such a checkpoint."""
MOST_SKIPPED = 20
"""Bad steps in a row that are skipped before the run ends: nothing is learned any more."""


class LossMonitorState(NamedTuple):
    """What the monitor remembers of the steps so far. The fields' names are in every checkpoint."""

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

    @classmethod
    def initial(cls, zeros: Callable[..., Any] = jnp.zeros) -> "LossMonitorState":
        """Before the first step; made with `zeros`, jax's or numpy's, which compiles nothing."""
        zero, none = zeros((), jnp.float32), zeros((), jnp.int32)
        return cls(mean=zero, good=none, bad_step=none, bad_loss=zero, bad_norm=zero, skipped=none, in_a_row=none)


def update_monitor(
    health: LossMonitorState,
    step: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    spike_factor: jax.Array,
    *,
    skip: bool,
) -> tuple[LossMonitorState, jax.Array]:
    """(monitor state after a step, bool[] whether the step is bad), of int32[] and float32[] scalars.

    The step counts from 1. A loss l above m + (f - 1) |m| is bad too, with the running mean m and the `spike_factor` f:
    f m for a positive mean, as far above the mean for a negative one; never for f = 0. With `skip`, bad steps are left
    out, so that there may be many, and the latest one is noted.
    """
    highest = health.mean + (spike_factor - 1) * jnp.abs(health.mean)
    spike = (spike_factor > 0) & (health.good >= WARM) & (loss > highest)
    bad = ~jnp.isfinite(loss) | ~jnp.isfinite(grad_norm) | spike
    good = health.good + jnp.where(bad, 0, 1)
    towards = (loss - health.mean) / jnp.minimum(good, MEMORY)
    note = bad & (skip | (health.bad_step == 0))
    after = LossMonitorState(
        mean=jnp.where(bad, health.mean, health.mean + towards),
        good=good,
        bad_step=jnp.where(note, step, health.bad_step),
        bad_loss=jnp.where(note, loss, health.bad_loss),
        bad_norm=jnp.where(note, grad_norm, health.bad_norm),
        skipped=health.skipped + jnp.where(bad & skip, 1, 0),
        in_a_row=jnp.where(bad, health.in_a_row + 1, 0),
    )
    return after, bad


class BadStep(FloatingPointError):
    """A step, counted from 1, whose loss or gradient is no number, or whose loss is far above the ones before."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class BadStepMonitor:
    """Looks at the monitor state that is fetched with each logged step; with `skip`, bad steps were left out."""

    def __init__(self, log: Callable[[str], None], *, skip: bool) -> None:
        self._log, self._skip, self._skipped = log, skip, 0

    def check(self, health: Any, plan: Plan, checkpoints: Callable[[], Sequence[int]]) -> None:
        """Check the (fetched) monitor state after a step; `checkpoints` gives the steps that are saved.

        Raises BadStep where a step was bad and not skipped, or too many were.
        """
        skipped, self._skipped = health.skipped - self._skipped, health.skipped
        ends = health.bad_step and (not self._skip or health.in_a_row >= MOST_SKIPPED)
        if not (ends or skipped):  # a skipped step stays noted: `checkpoints` would wait for the save at each row
            return
        bad = BadStep(health.bad_step, describe(health, plan, checkpoints()))
        if ends:
            raise bad
        self._log(f"{skipped} step(s) were left out. {bad}")


def known_good(bad_step: int, checkpoints: Sequence[int]) -> int | None:
    """The newest checkpoint whose weights are known to be good: the step after it went well. None if there is none.

    The weights of the last step before a bad one have computed nothing but the bad step: its own update may have ruined
    them.
    """
    return max((step for step in checkpoints if step < bad_step - 1), default=None)


def describe(health: LossMonitorState, plan: Plan, checkpoints: Sequence[int]) -> str:
    """The bad step of a (fetched) monitor state, its rows, and the way back; `checkpoints` are the saved steps."""
    step: Any = health.bad_step
    # Where steps are skipped, the one noted is the last of a row: nothing went well since the first.
    first = step - health.in_a_row + 1 if health.skipped and health.in_a_row else step
    rows = plan.rows(step - 1)
    named = [
        f"{plan.datasets[which]} token {offset:,}"
        for which, offset in zip(rows.dataset.tolist()[:NAMED_ROWS], rows.offset.tolist(), strict=False)
    ]
    more = len(rows.offset) - len(named)
    if math.isfinite(health.bad_loss) and not math.isfinite(health.bad_norm):
        what = f"its gradient is not finite (norm {health.bad_norm:g}), although its loss is {health.bad_loss:g}"
    else:
        what = f"its loss is {health.bad_loss:g}, its gradient norm {health.bad_norm:g}"
    return (
        f"step {step} went wrong: {what}; the mean loss before is {health.mean:g}. "
        f"Its rows begin at {', '.join(named)}{f' and {more} more' if more > 0 else ''}. "
        f"{_way_back(first, checkpoints)}, or let on_bad_step skip or rewind deal with such steps; if the data may be "
        f"damaged, `roxxel-dist data verify` looks at every token"
    )


def _way_back(first_bad: int, checkpoints: Sequence[int]) -> str:
    good, last = known_good(first_bad, checkpoints), max(checkpoints, default=None)
    ruined = f"the weights of step {last} may be ruined, because no step after it went well"
    if good is None:
        what = "There is no checkpoint to go back to" if last is None else ruined[0].upper() + ruined[1:]
        return f"{what}: start a new run with a smaller lr"
    if good == last:
        return f"The newest checkpoint is of step {good}, and is known to be good: go on from it with a smaller lr"
    return (
        f"The newest checkpoint that is known to be good is of step {good} ({ruined}): begin a new run there "
        f"with {argument('fork', f'RUN@{good}')} and a smaller lr"
    )
