"""What one device computes in an update by blocks and groups (see `blocks.py`). Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.blocks import BlockSums, Parts, Selection
from roxxel_dist.train.exact.gradient import Packed, ShardPrograms, Sums
from roxxel_dist.train.exact.piece_programs import Model
from roxxel_dist.train.step.average import Averaged, inner_state, schedule_free_average, update_average
from roxxel_dist.train.step.bad_steps import LossMonitorState, update_monitor
from roxxel_dist.train.step.optimizer import Optimizer, for_model, global_norm, updates_of
from roxxel_dist.train.step.step import EMA, SPIKE_FACTOR, Hparams, Loss, Metrics, divisor

Join = Callable[[Any, Model, Leaves], tuple[Sums, Leaves]]
"""(sums of all shards as they were added up, model, counts of random streams) -> (the same as `Sums`, the counts)."""


class Numbers(NamedTuple):
    """What the update of each parameter takes beside its own arrays."""

    weight: jax.Array
    """float32[]: what the sums are divided by."""
    norm: jax.Array
    """float32[]: of the whole gradient."""
    loss: jax.Array
    """float32[]: what is minimized."""
    step: jax.Array
    """int32[]: steps done before."""
    good: jax.Array
    """int32[]: good steps, with this one."""
    bad: jax.Array
    """bool[]: whether the step is bad."""


Inputs = Sequence[tuple[Numbers, Hparams]]
"""(what updates take, the numbers among the inputs of a step), by device of this process."""


class Rest(NamedTuple):
    """The state after a step but for parameters and what the optimizer keeps."""

    step: jax.Array
    rest: Leaves
    health: LossMonitorState


@dataclass(frozen=True)
class BlockPrograms:
    """The functions of one device, to be jitted."""

    programs: ShardPrograms
    sums: BlockSums
    join: Join
    weight: Callable[[Any], jax.Array]
    """Of the sums of all shards: what they are divided by."""
    batch: Any
    """Its shapes."""

    @property
    def optimizer(self) -> Optimizer:
        """For the model."""
        return for_model(self.programs.optimizer, self.programs.split.params.matrices)

    def weight_of(self, packed: Packed) -> jax.Array:
        """float32[]: what the sums of all shards are divided by."""
        return self.weight(self.sums.rest(packed))

    def gradient(self, parts: Mapping[str, Sequence[jax.Array]], weight: jax.Array) -> Leaves:
        """The mean gradients, in the types of their parameters."""
        counted, params = divisor(weight), self.sums.params
        return {name: (reduce(jnp.add, leaves) / counted).astype(params[name].dtype) for name, leaves in parts.items()}

    def squares(self, block: Packed, weight: jax.Array) -> jax.Array:
        """float32[1]: the sum of the squares of the gradient of a block of all groups."""
        groups = [
            self.sums.block(i, [block[name] for name in chunks]) for i, chunks in enumerate(self.sums.chunks) if chunks
        ]
        return squares_of([self.gradient(parts, weight) for parts in groups])[None]

    def numbers(
        self,
        packed: Packed,
        squares: jax.Array | None,
        model: Model,
        step: jax.Array,
        health: LossMonitorState,
        counts: Leaves,
    ) -> tuple[Numbers, Rest, Parts, Metrics]:
        """(what all updates take, the state beside them, the gradient sums of small parameters, the metrics but for the
        norm of the update) of the sums without those of blocks, and float32[1, V] the squares of these, if there are
        any."""
        whole, counts = self.join(self.sums.rest(packed), model, counts)
        counted, settings = divisor(whole.weight), self.optimizer.for_batch(model.hparams, self.batch)
        small = {name: [grad] for name, grad in whole.grads.items()}
        grads = self.gradient(small, whole.weight)
        norm = global_norm(grads) if squares is None else jnp.sqrt(squares.sum() + squares_of(grads))
        means = {
            name: (leaf / self.programs.shards).astype(model.rest[name].dtype)
            for name, leaf in whole.statistics.items()
        }
        scalars = {name: value / counted for name, value in whole.scalars.items()}
        loss = Loss(whole.loss / counted, scalars, whole.row_loss, row_weight=whole.row_weight)
        row_loss, row_weight = jax.tree.map(jnp.float32, (loss.row_loss, loss.row_weight))
        scalars = {**scalars, "loss": loss.loss, "grad_norm": norm}
        if (rate := self.optimizer.rate(settings, step)) is not None:
            scalars["lr"] = rate
        scalars = jax.tree.map(jnp.float32, scalars)
        skip = self.programs.skip_bad
        health, bad = update_monitor(health, step + 1, scalars["loss"], norm, model.hparams[SPIKE_FACTOR], skip=skip)
        rest = {**model.rest, **counts, **means}
        if skip:
            rest = jax.tree.map(partial(jnp.where, bad), model.rest, rest)
        shared = Numbers(whole.weight, norm, loss.minimized, step, health.good, bad)
        return shared, Rest(step + 1, rest, health), small, Metrics(scalars, row_loss, row_weight, health, whole.load)

    def update(
        self, selection: Selection, own: list[Any], common: list[Any], parts: Parts, numbers: Numbers, hparams: Hparams
    ) -> tuple[list[Any], list[Any], jax.Array]:
        """(arrays, the optimizer's own numbers, float32[1] the sum of the squares of the changes) after a step, of some
        parameters or a block of each, as `Selection.leaves` gives them."""
        before = params, opt_state = selection.tree(own, common)
        grads = self.gradient(parts, numbers.weight)
        rule = self.optimizer.build(self.optimizer.for_batch(hparams, self.batch), numbers.step, numbers.norm)
        changes, inner = updates_of(rule, grads, inner_state(opt_state), params, numbers.loss)
        after: Any = optax.apply_updates(params, changes)
        if isinstance(opt_state, Averaged):
            average = schedule_free_average(inner, after)
            if average is None:
                average = update_average(opt_state.average, after, hparams[EMA], numbers.good)
            inner = Averaged(inner, average)
        leaves = jax.tree.leaves((after, inner))
        if self.programs.skip_bad:
            leaves = [
                jnp.where(numbers.bad, old, new) for old, new in zip(jax.tree.leaves(before), leaves, strict=True)
            ]
        pairs = list(zip(leaves, selection.owners, strict=True))
        own, common = [leaf for leaf, owner in pairs if owner], [leaf for leaf, owner in pairs if not owner]
        return own, common, squares_of(changes)[None]


def squares_of(leaves: Any) -> jax.Array:
    """float32[]: the sum of the squares of all elements."""
    sums = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(leaves)]
    return reduce(jnp.add, sums, jnp.float32(0))


def with_update_norm(metrics: Metrics, squares: list[jax.Array]) -> Metrics:
    """The metrics with the norm of the update, of the squares of blocks, float32[1, V], and of groups, float32[1]."""
    total = reduce(jnp.add, [each.sum() for each in squares])
    return metrics._replace(scalars={**metrics.scalars, "update_norm": jnp.sqrt(total)})
