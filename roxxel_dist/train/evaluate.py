"""Validation: the same held-out batches each time, dropout off."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.units import Units, unit_size
from roxxel_dist.stream import Stream
from roxxel_dist.train.step import TrainState, fetch

SHORTEST = 2


def validation_plan(held_out: Roxxel, batch_size: int, seq_len: int, iters: int) -> Plan:
    """Up to `iters` batches of the held-out text, none read twice.

    Where it holds less than one batch of such windows, the windows are halved until it does.

    Raises:
        ValueError: it has fewer tokens than a batch has rows.
    """
    length = seq_len
    while (fit := _windows(held_out, length) // batch_size) == 0:
        if length == SHORTEST:
            raise ValueError(
                f"{held_out.num_tokens} tokens are held out, too few for a batch of {batch_size} rows: "
                f"use a larger val_fraction, a smaller batch_size or more text, or val_fraction 0 for no validation"
            )
        length = max(SHORTEST, length // 2)
    shape = Shape(steps=min(iters, fit), batch_size=batch_size, seq_len=length)
    return Plan([shape], {"self": held_out.ranges}, seed=0)


def _windows(data: Roxxel, length: int) -> int:
    unit = unit_size(data.ranges, length)
    return Units(data.ranges, unit).count * (unit // length)


class Validation:
    """Mean loss over held-out batches, in the shape of the phase that is being trained.

    Args:
        held_out: what is never trained on.
        eval_step: (state, int32[B, L]) -> loss.
        sharding: of a batch.
        iters: batches to read.
    """

    def __init__(
        self,
        held_out: Roxxel,
        eval_step: Callable[[TrainState, jax.Array], jax.Array],
        sharding: NamedSharding,
        iters: int,
    ) -> None:
        self._held_out, self._eval_step, self._sharding, self._iters = held_out, eval_step, sharding, iters
        self._streams: dict[tuple[int, int], Stream] = {}

    def prepare(self, batch_size: int, seq_len: int) -> Stream:
        """The batches for a phase of this shape."""
        if (batch_size, seq_len) not in self._streams:
            plan = validation_plan(self._held_out, batch_size, seq_len, self._iters)
            self._streams[batch_size, seq_len] = Stream(plan, {"self": self._held_out}, self._sharding)
        return self._streams[batch_size, seq_len]

    def run(self, state: TrainState, batch_size: int, seq_len: int, one_in_flight: bool) -> float:
        """The mean loss; fetched from the device once."""
        stream = self.prepare(batch_size, seq_len)
        losses: list[Any] = []
        for step in range(stream.plan.total_steps):
            losses.append(self._eval_step(state, stream.batch(step)))
            if one_in_flight:
                losses[-1].block_until_ready()
        return sum(fetch(losses)) / len(losses)
