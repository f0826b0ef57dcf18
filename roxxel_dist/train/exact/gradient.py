"""What one device computes: the sums of a virtual shard, and losses from the sums of all. Pure functions.

Random streams are those of a shard: its number is folded into each key, and the counts, which go on as in a step of
one device, are the same everywhere. Running statistics are the mean over the shards. Arrays are packed as one long
array a type, so that few are added up and sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.model.loss import END_NATS
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.optimizer import Optimizer
from roxxel_dist.train.step.step import (
    WEIGHT,
    Hparams,
    Loss,
    LossFn,
    count_predicted,
    divisor,
    measure,
    micro_batches,
    weigh,
)

TILE = 1024
"""Numbers of a piece are a multiple of this. A TPU lays long arrays out in such tiles, and its compiler makes a sum of
the gather of other pieces: twice the bytes, and -0.0 + 0.0 is 0.0."""
Packed = dict[str, jax.Array]
"""A type's name to [1, N]; the first axis is for the devices, along which such arrays become a global one."""


def wide(dtype: Any) -> Any:
    """The type that numbers are added up in: a sum of bfloat16 loses what is small."""
    return jnp.promote_types(dtype, jnp.float32)


def pack(tree: Any) -> Packed:
    """The leaves of a tree, flat and behind each other, by their types for sums."""
    by_type: dict[str, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        kind = wide(leaf.dtype)
        by_type.setdefault(kind.name, []).append(leaf.astype(kind).reshape(-1))
    return {name: jnp.concatenate(leaves)[None] for name, leaves in by_type.items()}


def unpack(packed: Mapping[str, jax.Array], like: Any) -> Any:
    """The tree of which `pack` made these, leaves in their types for sums; `like` has its shapes and types."""
    leaves, treedef = jax.tree.flatten(like)
    places, out = dict.fromkeys(packed, 0), []
    for leaf in leaves:
        name = wide(leaf.dtype).name
        start, stop = places[name], places[name] + leaf.size
        out.append(packed[name][0, start:stop].reshape(leaf.shape))
        places[name] = stop
    return jax.tree.unflatten(treedef, out)


def pieces(packed: Packed, devices: int) -> Packed:
    """[devices, M]: packed arrays in a piece for each device that adds one up, the last ones filled with zeros."""
    return {
        name: jnp.pad(array[0], (0, -array.shape[1] % (devices * TILE))).reshape(devices, -1)
        for name, array in packed.items()
    }


class Model(NamedTuple):
    """What all programs take."""

    params: Leaves
    rest: Leaves
    hparams: Hparams


class Sums(NamedTuple):
    """What shards are added up to."""

    grads: Leaves
    """Of the losses, each times its weight where there are weights."""
    loss: jax.Array
    weight: jax.Array
    """float32[]: what the losses are means of; 1 for each micro-batch where they do not say."""
    scalars: dict[str, jax.Array]
    """Each times the weight of its micro-batch where there are weights."""
    row_loss: jax.Array | None
    """float32[rows of the batch], 0 where the rows are another shard's."""
    row_weight: jax.Array | None
    """Likewise."""
    load: jax.Array | None
    """float32[layers, experts], see `Loss`."""
    statistics: Leaves
    """What a call of the model changed of its state, but for random streams."""


@dataclass(frozen=True)
class ShardPrograms:
    """The functions of one device, of a model, a loss and an optimizer, to be jitted."""

    split: ModuleSplit
    loss_fn: LossFn
    optimizer: Optimizer
    shards: int
    grad_accum: int
    compute_dtype: Any
    skip_bad: bool
    end: int | None = None
    """The id of end-of-text, whose losses a validation sums up too; see `token_losses`."""

    def sums(self, params: Leaves, rest: Leaves, hparams: Hparams, rows: Any, shard: jax.Array) -> tuple[Sums, Leaves]:
        """(the sums of a virtual shard, the counts of random streams after it) of its rows and its number, int32[]."""
        count = micro_batches(self.grad_accum, jax.tree.leaves(rows)[0].shape[0])
        streams, changed = fold_in_shard(rest, shard), set[str]()

        def loss_of(params: Leaves, rest: Leaves, rows: Any) -> tuple[jax.Array, Any]:
            model = self.split.merge(params, rest, hparams, training=True, dtype=self.compute_dtype)
            loss = measure(self.loss_fn, model, rows)
            after = self.split.rest_of(model)
            changed.update(name for name in after if after[name] is not rest[name])
            return loss.minimized, (after, loss)

        def gradient(rest: Leaves, rows: Any) -> tuple[Leaves, Leaves, Loss]:
            grads, (rest, loss) = jax.grad(loss_of, has_aux=True)(params, rest, rows)
            return jax.tree.map(lambda grad: weigh(grad.astype(wide(grad.dtype)), loss.weight), grads), rest, loss

        if count == 1:
            grads, after, loss = gradient(streams, rows)
            losses = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], loss)
        else:

            def add(carry: Any, piece: Any) -> tuple[Any, Loss]:
                total, rest = carry
                grads, rest, loss = gradient(rest, piece)
                return (jax.tree.map(jnp.add, total, grads), rest), loss

            pieces = jax.tree.map(lambda array: array.reshape(count, -1, *array.shape[1:]), rows)
            zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, wide(param.dtype)), params)
            (grads, after), losses = jax.lax.scan(add, (zeros, streams), pieces)
        loss, weight = jnp.float32(losses.loss), losses.weight
        scalars = {name: weigh(jnp.float32(value), weight).sum() for name, value in losses.scalars.items()}
        counted = jnp.float32(count) if weight is None else jnp.float32(weight).sum()

        def of_all_rows(values: jax.Array | None) -> jax.Array | None:
            if values is None:
                return None
            own = jnp.float32(values).reshape(-1)
            return jax.lax.dynamic_update_slice(jnp.zeros(own.size * self.shards), own, (shard * own.size,))

        # A key goes through a scan over layers as another array, and stays what it is: a stream changes its count.
        counts, statistics = random_counts(self.split, rest) & changed, changed - random_keys(rest)
        sums = Sums(
            grads,
            weigh(loss, weight).sum(),
            counted,
            scalars,
            of_all_rows(losses.row_loss),
            of_all_rows(losses.row_weight),
            jax.tree.map(lambda load: load.sum(0), losses.load),
            {name: after[name] for name in sorted(statistics - counts)},
        )
        check_statistics(sums.statistics)
        return sums, {name: after[name] for name in sorted(counts)}

    def losses(self, params: Leaves, rest: Leaves, hparams: Hparams, rows: Any) -> Packed:
        """The packed sums of the losses of a virtual shard, dropout off: see `mean_losses`."""
        loss = self._evaluated(params, rest, hparams, rows)
        weight = jnp.float32(count_predicted(rows) if loss.weight is None else loss.weight)
        scalars = [weigh(jnp.float32(loss.scalars[name]), weight) for name in _means(loss.scalars)]
        ends = None if self.end is None else jnp.float32(loss.scalars[END_NATS])
        return pack((weigh(jnp.float32(loss.loss), weight), weight, scalars, ends))

    def _evaluated(self, params: Leaves, rest: Leaves, hparams: Hparams, rows: Any) -> Loss:
        model = self.split.merge(params, rest, hparams, training=False, dtype=self.compute_dtype)
        return measure(self.loss_fn, model, rows, self.end)

    def scalar_names(self, *args: Any) -> list[str]:
        """The names of the scalars in `losses` of such (abstract) arguments, in their order."""
        return _means(jax.eval_shape(lambda *args: self._evaluated(*args).scalars, *args))

    def mean_losses(self, total: Packed, names: Sequence[str]) -> dict[str, jax.Array]:
        """float32[] "loss", "loss_weight", the scalars with these names, and with `end` the sum `END_NATS`, of the
        packed sums of all shards."""
        loss, weight, *scalars = total["float32"][0]
        means = {"loss": loss / divisor(weight), WEIGHT: weight}
        if self.end is not None:
            means[END_NATS] = scalars.pop()
        return means | {name: value / divisor(weight) for name, value in zip(names, scalars, strict=True)}


def _means(scalars: Mapping[str, Any]) -> list[str]:
    """The names of those that are means, in order."""
    return sorted(name for name in scalars if name != END_NATS)


def fold_in_shard(rest: Leaves, shard: jax.Array) -> Leaves:
    """The state of a module with the random keys of a virtual shard."""

    def fold(keys: jax.Array) -> jax.Array:
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), shard)
        return folded.reshape(keys.shape)

    keys = random_keys(rest)
    return {name: fold(leaf) if name in keys else leaf for name, leaf in rest.items()}


def random_keys(rest: Leaves) -> set[str]:
    """The names of the random keys."""
    return {name for name, leaf in rest.items() if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}


def random_counts(split: ModuleSplit, rest: Leaves) -> set[str]:
    """The names of the leaves that count what was drawn from a random stream."""
    return set(split.rest.streams) - random_keys(rest)


def check_statistics(statistics: Leaves) -> None:
    """Raises ValueError if the model changes a leaf of its state that has no mean over the shards."""
    for name, leaf in statistics.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"virtual_shards: each call of the model changes {name!r} of {leaf.dtype}, so each shard would have "
                f"another value. Change floating-point state only (the mean over the shards is used), or set "
                f"virtual_shards to 0"
            )
