"""The optimizer and its schedule, from optax."""

from typing import Any

import jax
import optax

from roxxel_dist.train.config import OptimizerConfig

FINAL_FRACTION = 0.01
WARMUP_FRACTION = 0.05


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of each step, from 0: a linear warm-up and a cosine to a hundredth of the peak.

    Raises:
        ValueError: the warm-up leaves no step to decay in.
    """
    warmup = config.warmup_steps if config.warmup_steps is not None else int(total_steps * WARMUP_FRACTION)
    if warmup and warmup >= total_steps:
        raise ValueError(f"warmup_steps is {warmup}: it must be below the run's {total_steps} steps, or left out")
    # The warm-up starts one step in: a first step at rate 0 would be a step for nothing.
    return optax.warmup_cosine_decay_schedule(
        init_value=config.lr / (warmup + 1),
        peak_value=config.lr,
        warmup_steps=warmup,
        decay_steps=total_steps,
        end_value=config.lr * FINAL_FRACTION,
    )


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW after clipping; weight decay on matrices alone."""
    schedule = make_schedule(config, total_steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), adamw) if config.grad_clip else adamw


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)
