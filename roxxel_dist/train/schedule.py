"""The learning rate of a step, as a formula of the step and numbers that may be traced.

Optax's schedules keep their numbers as constants of the compiled program. These take them as inputs, so that a sweep
over learning rates or lengths compiles once.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

FINAL_FRACTION = 0.01
"""Of the peak: where cosine, linear and wsd end."""

Settings = Mapping[str, ArrayLike]


def learning_rate(kind: str, settings: Settings, step: ArrayLike) -> jax.Array:
    """float32[]: the rate of a step, counted from 0.

    A linear warm-up to the peak, which is reached at step `warmup_steps`; then "cosine" (Loshchilov & Hutter 2017,
    arXiv 1608.03983) or "linear" decay to a hundredth of it, "constant", or "wsd", stable until the last `decay_steps`,
    which are a cosine (Hu et al. 2024, arXiv 2404.06395). At and after `total_steps` the rate stays at its last value.

    Args:
        kind: one of the four names.
        settings: "lr", "warmup_steps", "total_steps" and "decay_steps" (above 0; the length of the decay, which ends
            with the run), numbers or float32 scalars.
        step: exact up to 2^24.
    """
    peak, warmup, total, decay = (
        jnp.asarray(settings[name], jnp.float32) for name in ("lr", "warmup_steps", "total_steps", "decay_steps")
    )
    now = jnp.asarray(step, jnp.float32)
    # The warm-up starts one step in: a first step at rate 0 would be a step for nothing.
    warming = peak * (now + 1) / (warmup + 1)
    # Counted from the end: 1 minus what has passed would lose the digits of the small rates there.
    left = jnp.clip((total - now) / decay, 0, 1)
    match kind:
        case "constant":
            height = jnp.float32(1)
        case "linear":
            height = left
        case "cosine" | "wsd":
            height = jnp.sin(jnp.pi / 2 * left) ** 2  # (1 + cos(pi x (1 - left))) / 2
        case _:
            raise ValueError(f"lr_schedule is {kind!r}: it must be one of cosine, linear, constant, wsd")
    return jnp.where(now < warmup, warming, peak * ((1 - FINAL_FRACTION) * height + FINAL_FRACTION))


def schedule_change(
    step: int, before: Settings, after: Settings, kind: str = "cosine", kind_before: str | None = None
) -> str:
    """Two lines on what an amendment does to the learning rate: at the next step, and at the end.

    Args:
        step: steps done; the next one, `step + 1` in the log's count, is the first that the amendment concerns.
        before: the settings of the old plan.
        after: the settings of the new one.
        kind: its schedule.
        kind_before: the old plan's schedule, where it was another.
    """
    old, new = kind_before or kind, kind

    def at(name: str, settings: Settings, index: float) -> str:
        return f"{float(learning_rate(name, settings, index)):.3g}"

    last, new_last = (int(jnp.asarray(settings["total_steps"])) for settings in (before, after))
    return (
        f"learning rate of step {step + 1:,}: {at(old, before, step)} before, {at(new, after, step)} now\n"
        f"learning rate of the last step: {at(old, before, last - 1)} at step {last:,} before, "
        f"{at(new, after, new_last - 1)} at step {new_last:,} now"
    )
