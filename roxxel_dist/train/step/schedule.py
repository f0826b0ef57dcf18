"""The learning rate of a step, as a formula of the step and numbers that may be traced.

Optax's schedules keep their numbers as constants of the compiled program. These take them as inputs, so that a sweep
over learning rates or lengths compiles once. Decision 15.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.settings.training import OptimizerConfig

FINAL_FRACTION = 0.01
"""Of the peak: where cosine, linear and wsd end."""
BATCH_TOKENS = "batch_tokens"
"""Among the settings: the tokens of the batch whose rate is lr."""

Settings = Mapping[str, ArrayLike]


def learning_rate(kind: str, settings: Settings, step: ArrayLike) -> jax.Array:
    """float32[]: the rate of a step, counted from 0 (exact up to 2^24).

    A linear warm-up to the peak, which is reached at step `warmup_steps`; then "cosine" (Loshchilov & Hutter 2017,
    arXiv 1608.03983) or "linear" decay to a hundredth of it, "constant", or "wsd", stable until the last `decay_steps`,
    which are a cosine (Hu et al. 2024, arXiv 2404.06395). At and after `total_steps` the rate stays at its last value.

    The settings are "lr", "warmup_steps", "total_steps" and "decay_steps" (above 0; the length of the decay, which ends
    with the run), numbers or float32 scalars.
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
            raise UserError(f"lr_schedule is {kind!r}: it must be one of cosine, linear, constant, wsd")
    return jnp.where(now < warmup, warming, peak * ((1 - FINAL_FRACTION) * height + FINAL_FRACTION))


def schedule_change(
    step: int, before: Settings, after: Settings, kind: str = "cosine", kind_before: str | None = None
) -> str:
    """Two lines on what an amendment after `step` steps does to the learning rate: at the next step, and at the end;
    a third one if it is the rate of another batch (see `lr_factor`).

    `before` and `after` are the settings of the old plan and the new one; their schedules are `kind_before`, where it
    was another, and `kind`.
    """
    old, new = kind_before or kind, kind

    def at(name: str, settings: Settings, index: float) -> str:
        return f"{float(learning_rate(name, settings, index)):.3g}"

    reference = ""
    if before.get(BATCH_TOKENS) != after.get(BATCH_TOKENS):
        of = (f"{int(jnp.asarray(each.get(BATCH_TOKENS, 0))):,} tokens" for each in (before, after))
        reference = "\nlr is the rate of a batch of {} before, of {} now (0: of any)".format(*of)
    last, new_last = (int(jnp.asarray(settings["total_steps"])) for settings in (before, after))
    return (
        f"learning rate of step {step + 1:,}: {at(old, before, step)} before, {at(new, after, step)} now\n"
        f"learning rate of the last step: {at(old, before, last - 1)} at step {last:,} before, "
        f"{at(new, after, new_last - 1)} at step {new_last:,} now{reference}"
    )


def lr_factor(scaling: str, tokens: int, largest: ArrayLike) -> jax.Array:
    """float32[]: the factor of the learning rate of a batch of so many tokens, 1 for that of the `largest` one.

    "linear" (Goyal et al. 2017, arXiv 1706.02677) keeps the sum of updates over an epoch, as suits sgd; "sqrt" (Malladi
    et al. 2022, arXiv 2205.10287) keeps their noise, as suits optimizers that divide by the size of the gradient.
    """
    share = tokens / jnp.asarray(largest, jnp.float32)
    return share if scaling == "linear" else jnp.sqrt(share)


def scaling_note(config: OptimizerConfig, shapes: Sequence[Shape]) -> str:
    """What `lr_scaling` does to the rate in each phase, in a line; empty where it does nothing."""
    if config.lr_scaling == "none":
        return ""
    tokens = [shape.batch_size * shape.seq_len for shape in shapes]
    factors = [float(lr_factor(config.lr_scaling, each, max(tokens))) for each in tokens]
    listed = ", ".join(f"phase {i} x {factor:.3g}" for i, factor in enumerate(factors, 1))
    return f"learning rate ({config.lr_scaling} of the tokens in a batch, x 1 for {max(tokens):,}): {listed}"
