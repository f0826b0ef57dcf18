"""The state of a model before the first step, in one call."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.train.step.state import StateBuilder, TrainState


def init_state(
    model: Any,
    init_optimizer: Callable[[Leaves], Any],
    mesh: Mesh,
    *,
    fsdp: bool = False,
    dtype: Any = None,
    restored: bool = False,
    load: Any = None,
) -> tuple[ModuleSplit, TrainState, Leaves]:
    """(what does not change, the state, the inputs of every step) of a `StateBuilder`."""
    builder = StateBuilder.of_model(model, init_optimizer, mesh, fsdp=fsdp, dtype=dtype)
    return builder.split, *builder.build(restored=restored, load=load)
