"""The update of a step: of the whole state on each device, or of the slices that it keeps."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.layout import Layout
from roxxel_dist.train.exact.packing import Owners, Packed, wide
from roxxel_dist.train.exact.reduction import Exchange, Programs
from roxxel_dist.train.exact.sliced_update import SlicedFunction, plan_of
from roxxel_dist.train.exact.slices import Cut
from roxxel_dist.train.step.average import inner_state
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.optimizer import LONG, NamedOptimizer, Optimizer, updates_of
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics

Finish = Callable[[Any, TrainState, Hparams, Leaves], tuple[TrainState, Metrics]]
"""(sums of all shards, state, hparams, counts of random streams) -> (the state after a step, its metrics)."""


def owners_of(cut: Cut, sums: Any, params: Mapping[str, Any]) -> Owners:
    """Who keeps what of the sums of all shards: of the gradients of parameters slices, as of these."""
    dimensions = dict(zip(params, cut.dimensions(params), strict=True))

    def dimension(path: Any, leaf: Any) -> int | None:
        param = params.get(str(getattr(path[-1], "key", "")))
        return None if param is None or param.shape != leaf.shape else dimensions[str(path[-1].key)]

    cuts = [dimension(path, leaf) for path, leaf in jax.tree.leaves_with_path(sums)]
    return Owners(sums, cuts, cut.slices, cut.layout.line.size)


@dataclass(frozen=True)
class Update:
    """(states, hparams, totals, counts) of each device -> its (state, metrics); the states are donated."""

    programs: Programs
    """Of the whole; or what takes the totals apart."""
    sliced: SlicedFunction | None

    @classmethod
    def compiled(
        cls,
        finish: Finish,
        state: TrainState,
        hparams: Hparams,
        counts: Leaves,
        cut: Cut,
        exchange: Exchange,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "Update":
        """For such (abstract) arguments; the state's have shardings."""
        owners, devices = exchange.owners, cut.layout.devices
        dimensions = cut.dimensions(state)
        state = shapes_of(state)
        if cut.slices > 1:
            programs = for_each(jax.jit(owners.unpack), (exchange.kept,), devices)
            wide_sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype)), owners.like)
            args = state, wide_sums, shapes_of(hparams), counts
            others = [None] * len(jax.tree.leaves(args[2:]))

            def of_sums(state: TrainState, sums: Any, hparams: Hparams, counts: Leaves) -> tuple[TrainState, Metrics]:
                return finish(sums, state, hparams, counts)

            def result_cuts(result: Any) -> list[int | None]:
                return [*dimensions, *[None] * len(jax.tree.leaves(result[1]))]

            cuts = [*dimensions, *owners.cuts, *others]
            return cls(programs, SlicedFunction.compiled(of_sums, args, cuts, result_cuts, cut, compile_one, for_each))

        def update(state: TrainState, hparams: Hparams, total: Packed, counts: Leaves) -> tuple[TrainState, Metrics]:
            return finish(owners.unpack(total), state, hparams, counts)

        args = state, shapes_of(hparams), exchange.kept, counts
        return cls(for_each(jax.jit(update, donate_argnums=0), args, devices), None)

    def run(
        self, states: list[TrainState], hparams: list[Hparams], totals: list[Packed], counts: list[Leaves]
    ) -> list[tuple[TrainState, Metrics]]:
        """One update."""
        if self.sliced is None:
            return [update(*args) for update, *args in zip(self.programs, states, hparams, totals, counts, strict=True)]
        sums = [unpack(total) for unpack, total in zip(self.programs, totals, strict=True)]
        totals.clear()
        args = list(zip(states, sums, hparams, counts, strict=True))
        sums.clear()
        return self.sliced.run(args)


def check_slices(optimizer: Optimizer, like: TrainState, layout: Layout) -> None:
    """Raises UserError where devices keep slices of such a state, of `jax.ShapeDtypeStruct`s with shardings, and its
    update is not known to have the same bits then: that of an optimizer of the user's that computes more of whole
    arrays than their norms."""
    cut = Cut.of(layout, like)
    if cut.slices == 1:
        return
    if isinstance(optimizer, NamedOptimizer) and optimizer.own is None:
        if optimizer.config.optimizer == "adafactor" and any(
            leaf.dtype == jnp.bfloat16 for leaf in like.params.values()
        ):
            raise UserError(
                "virtual_shards with fsdp, use_bf16 is true and optimizer is adafactor: the last bits of update_norm "
                "would depend on the devices. Use bf16_compute, another optimizer, or leave fsdp out"
            )
        return

    def update(params: Any, opt_state: Any, grads: Any, number: jax.Array) -> Any:
        transformation = optimizer.build(dict.fromkeys(optimizer.settings(LONG), number), number)
        return updates_of(transformation, grads, opt_state, params, number)

    opt_state = inner_state(like.opt_state)
    args = *shapes_of((like.params, opt_state, like.params)), jax.ShapeDtypeStruct((), jnp.float32)
    dimensions = [cut.dimensions(tree) for tree in (like.params, opt_state, like.params)]
    plan, _ = plan_of(
        update, args, [*itertools.chain(*dimensions), None], lambda result: [*dimensions[0], *dimensions[1]]
    )
    if name := plan.first_of_whole():
        raise UserError(
            f"virtual_shards with fsdp: the optimizer takes {name} of whole arrays, and the last bits of that may "
            f"depend on what XLA computes with it. Use an optimizer that computes element by element (norms may be "
            f"taken), one of ours such as muon or adafactor, or leave fsdp out"
        )


def shapes_of(tree: Any) -> Any:
    """Shapes and types of a tree, without places: a program of one device has none."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
