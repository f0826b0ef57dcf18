"""The learning rate of a step, as a formula of the step and numbers that may be traced.

Optax's schedules keep their numbers as constants of the compiled program. These take them as inputs, so that a sweep
over learning rates or lengths compiles once. Decision 15.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.process.exit_codes import UserError

FINAL_FRACTION = 0.01
"""Of the peak: where cosine, linear and wsd end."""
BATCH_TOKENS = "batch_tokens"
"""Among the settings: the tokens of the batch whose rate is lr."""

Settings = Mapping[str, ArrayLike]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """The learning rate of a run, as its checkpoints record it."""

    kind: str
    """A name of `learning_rate`."""
    scaling: str
    """"none", "sqrt" or "linear": what `lr_factor` does with the tokens of a batch."""
    settings: Mapping[str, float]
    """Those of `learning_rate`; with scaling also `BATCH_TOKENS`."""

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "LrSchedule | None":
        """The schedule that a checkpoint records; None if it records none."""
        return cls(**saved) if saved else None

    def to_dict(self) -> dict[str, Any]:
        """The schedule for JSON."""
        return {"kind": self.kind, "scaling": self.scaling, "settings": dict(self.settings)}

    @property
    def rates(self) -> tuple[Any, ...]:
        """The numbers that the rate of a step follows from."""
        names = ("lr", "warmup_steps", "total_steps", "decay_steps", BATCH_TOKENS)
        return self.kind, self.scaling, *(self.settings.get(name) for name in names)

    def rate(self, step: int, shape: Shape) -> float:
        """The learning rate of a step, counted from 0, whose batch has this shape."""
        factor = 1.0
        if self.scaling != "none":
            factor = float(lr_factor(self.scaling, shape.tokens, self.settings[BATCH_TOKENS]))
        return float(learning_rate(self.kind, self.settings, step)) * factor

    def changes_from(self, before: "LrSchedule") -> str:
        """What differs from a schedule before, in words."""
        was, now = ({"kind": one.kind, "scaling": one.scaling, **one.settings} for one in (before, self))
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return ", ".join(f"{name} {was.get(name, 'none')}, now {now.get(name, 'none')}" for name in names)

    @property
    def reference(self) -> str:
        """The batch whose rate is lr, in words."""
        return "any batch" if self.scaling == "none" else f"a batch of {int(self.settings[BATCH_TOKENS]):,} tokens"


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


def schedule_change(step: int, before: LrSchedule, after: LrSchedule, plan_before: Plan, plan: Plan) -> str:
    """Two lines on what a change after `step` steps does to the learning rate: of the next step, and at the end of the
    phases; a third one if lr is the rate of another batch (see `lr_factor`).

    `before` and `plan_before` are the schedule and the plan until now, `after` and `plan` those from here on. The rates
    are those that train: with the factor of the phase.
    """

    def at(schedule: LrSchedule, phases: Plan, index: int) -> str:
        return f"{schedule.rate(index, phases.shape_at(index)):.3g}" if index < phases.total_steps else "none"

    reference = ""
    if before.reference != after.reference:
        reference = f"\nlr is the rate of {before.reference} before, of {after.reference} now"
    last, new_last = plan_before.total_steps, plan.total_steps
    return (
        f"learning rate of step {step + 1:,}: {at(before, plan_before, step)} before, {at(after, plan, step)} now\n"
        f"learning rate of the last step: {at(before, plan_before, last - 1)} at step {last:,} before, "
        f"{at(after, plan, new_last - 1)} at step {new_last:,} now{reference}"
    )


def lr_factor(scaling: str, tokens: int, largest: ArrayLike) -> jax.Array:
    """float32[]: the factor of the learning rate of a batch of so many tokens, 1 for that of the `largest` one.

    "linear" (Goyal et al. 2017, arXiv 1706.02677) keeps the sum of updates over an epoch, as suits sgd; "sqrt" (Malladi
    et al. 2022, arXiv 2205.10287) keeps their noise, as suits optimizers that divide by the size of the gradient.
    """
    share = tokens / jnp.asarray(largest, jnp.float32)
    return share if scaling == "linear" else jnp.sqrt(share)


def scaling_note(schedule: LrSchedule | None, shapes: Sequence[Shape]) -> str:
    """What `lr_scaling` does to the rate in each phase, in a line; empty where it does nothing."""
    if schedule is None or schedule.scaling == "none":
        return ""
    reference = schedule.settings[BATCH_TOKENS]
    factors = [float(lr_factor(schedule.scaling, shape.tokens, reference)) for shape in shapes]
    listed = ", ".join(f"phase {i} x {factor:.3g}" for i, factor in enumerate(factors, 1))
    return f"learning rate ({schedule.scaling} of the tokens in a batch, x 1 for {int(reference):,}): {listed}"
