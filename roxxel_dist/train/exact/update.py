"""The update of a step, which each device computes for the whole state."""

from collections.abc import Callable
from typing import Any

import jax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.reduction import Exchange, Programs
from roxxel_dist.train.step.compile import CompileForEach
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics

Finish = Callable[[Any, TrainState, Hparams, Leaves], tuple[TrainState, Metrics]]
"""(sums of all shards, state, hparams, counts of random streams) -> (the state after a step, its metrics)."""


def compiled_update(
    finish: Finish, state: TrainState, hparams: Hparams, counts: Leaves, exchange: Exchange, for_each: CompileForEach
) -> Programs:
    """(state, hparams, total, counts) -> (state, metrics) on each device, for such (abstract) arguments.

    The total is what `exchange` gives; the state is donated.
    """

    def update(state: TrainState, hparams: Hparams, total: Packed, counts: Leaves) -> tuple[TrainState, Metrics]:
        return finish(exchange.unpack(total), state, hparams, counts)

    args = shapes_of(state), shapes_of(hparams), exchange.kept, counts
    return for_each(jax.jit(update, donate_argnums=0), args, exchange.layout.devices)


def shapes_of(tree: Any) -> Any:
    """Shapes and types of a tree, without places: a program of one device has none."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
