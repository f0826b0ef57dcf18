"""The update of a step, which each device computes for the whole state; with fsdp it keeps its slices of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.exact.piece_programs import Model
from roxxel_dist.train.exact.reduction import Exchange, Programs
from roxxel_dist.train.exact.slices import Cut, Gather, is_cut
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics

Finish = Callable[[Any, TrainState, Hparams, Leaves], tuple[TrainState, Metrics]]
"""(sums of all shards, state, hparams, counts of random streams) -> (the state after a step, its metrics)."""


@dataclass(frozen=True)
class Update:
    """(states, models, totals, counts) -> (states, metrics), by device of this process."""

    gather: Gather
    """Of the optimizer's state."""
    programs: Programs
    cut: Cut

    @classmethod
    def compiled(
        cls,
        finish: Finish,
        state: TrainState,
        hparams: Hparams,
        counts: Leaves,
        exchange: Exchange,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "Update":
        """For such (abstract) arguments, with shardings, and totals as `exchange` gives them."""

        def update(state: TrainState, hparams: Hparams, total: Packed, counts: Leaves) -> tuple[TrainState, Metrics]:
            return finish(exchange.unpack(total), state, hparams, counts)

        args = shapes_of(state), shapes_of(hparams), exchange.kept, counts
        return cls(
            gather=Gather.compiled(exchange.layout, state.opt_state, compile_one),
            programs=for_each(jax.jit(update, donate_argnums=0), args, exchange.layout.devices),
            cut=Cut.compiled(exchange.layout, state, for_each),
        )

    def run(
        self, parts: Sequence[TrainState], models: Sequence[Model], totals: list[Packed], counts: Sequence[Leaves]
    ) -> tuple[list[TrainState], Metrics]:
        """The states are donated. Metrics are those of the first device: all have the same."""
        moments = self.gather.run([part.opt_state for part in parts])
        wholes = [
            part._replace(params=model.params, rest=model.rest, opt_state=own)
            for part, model, own in zip(parts, models, moments, strict=True)
        ]
        self._delete(parts)
        hparams = [model.hparams for model in models]
        done = [update(*args) for update, *args in zip(self.programs, wholes, hparams, totals, counts, strict=True)]
        return self.cut.run([state for state, _ in done]), done[0][1]

    def _delete(self, parts: Sequence[TrainState]) -> None:
        """Give the memory of old slices back, as soon as they are gathered."""
        for part in parts if self.cut.programs else ():
            for leaf, like in zip(jax.tree.leaves(part), self.cut.like, strict=True):
                if is_cut(like):
                    leaf.delete()


def shapes_of(tree: Any) -> Any:
    """Shapes and types of a tree, without places: a program of one device has none."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
