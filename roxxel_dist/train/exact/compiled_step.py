"""A step with virtual shards as the host runs it: programs of one device, and a binary tree of additions.

`CompiledStep` is the step in order. The lower parts of the tree are on a device: the sums of whole subtrees of its own
shards. Of these each device sends every other one the part that the other one owns (an all-to-all). The owner adds the
rest of the tree. Then all get all parts from their owners, but for the gradients of blocks, which stay there (see
`Ownership`). The tree is that of the shards, so a sum is the same to the bit on any number of devices.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.block_update import BlockUpdate, Gather, copies
from roxxel_dist.train.exact.blocks import Ownership
from roxxel_dist.train.exact.gradient import Model, Packed, pieces, unpack
from roxxel_dist.train.exact.layout import SHARDS, DeviceStates, Programs, ShardLayout, rows_like
from roxxel_dist.train.step.compile import Compiler
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams, Metrics

Subtree = tuple[int, int]
"""(its first shard, how many)."""


@dataclass(frozen=True)
class CompiledStep:
    """(state, hparams, batch) -> (state, metrics), as `make_step` has it, but for `DeviceStates`.

    It takes a `TrainState` of global arrays too. The state is donated; nothing waits for the devices.
    """

    layout: ShardLayout
    gather: Gather
    """Of the `Model`."""
    step: Any
    """A `RowStep` or a `long_rows.CompiledLongStep`."""
    hparams: "HparamCopies"
    like: TrainState
    """The shapes of the state, with shardings."""

    def __call__(self, state: TrainState | DeviceStates, hparams: Hparams, batch: Any) -> tuple[DeviceStates, Metrics]:
        """One step."""
        parts = state.parts if isinstance(state, DeviceStates) else copies(state, self.layout.devices)
        inputs = self.hparams.copies_of(hparams)
        models = self.gather.run([Model(part.params, part.rest, own) for part, own in zip(parts, inputs, strict=True)])
        totals, counts = self.step.totals(models, batch)
        parts, metrics = self.step.update.run(parts, models, totals, counts)
        return DeviceStates(parts, self.like), metrics


@dataclass(frozen=True)
class RowStep:
    """The sums of all shards and the update, for shards of whole rows."""

    rows: "RowCutter"
    sums: Programs
    reduction: "Reduction"
    update: BlockUpdate

    def totals(self, models: list[Model], batch: Any) -> tuple[list[Packed], list[Leaves]]:
        """(the packed sums of all shards, the counts of random streams), by device of this process."""
        rows, counts = self.rows.run(batch), list[Leaves]({} for _ in models)

        def sums_of(i: int, k: int) -> Packed:
            total, after = self.sums[i](*models[i], rows[i][k], self.reduction.layout.numbers[i][k])
            counts[i] = counts[i] or after
            return total

        return self.reduction.run(sums_of), counts


@dataclass(frozen=True)
class RowCutter:
    """Gives each device the rows of its virtual shards."""

    layout: ShardLayout
    cut: Programs
    """Empty where each device has one."""

    @classmethod
    def compile_cutter(cls, layout: ShardLayout, batch: Any, compiler: Compiler) -> "tuple[RowCutter, Any]":
        """The cutter of such (abstract) batches, and the rows of a shard, as `jax.ShapeDtypeStruct`s."""
        rows, cut = jax.tree.leaves(batch)[0].shape[0], ()
        if not layout.is_even:
            args = rows_like(batch, rows), jax.ShapeDtypeStruct((), np.int32)
            cut = compiler.each(jax.jit(rows_of_shard(rows // layout.count)), args, layout.devices)
        elif layout.most > 1:
            cut = compiler.each(
                jax.jit(cutter(layout.most)), (rows_like(batch, rows // layout.line.size),), layout.devices
            )
        return cls(layout, cut), rows_like(batch, rows // layout.count)

    def run(self, batch: Any) -> list[Sequence[Any]]:
        """The rows of each shard, by device of this process."""
        layout = self.layout
        if not layout.is_even:
            every = zip(self.cut, copies(batch, layout.devices), layout.numbers, strict=True)
            return [[cut(rows, number) for number in numbers] for cut, rows, numbers in every]
        leaves, treedef = jax.tree.flatten(batch)  # `copies` asks each array for more than that
        own = [jax.tree.unflatten(treedef, [leaf.addressable_data(i) for leaf in leaves]) for i in layout.places]
        if not self.cut:
            return [(rows,) for rows in own]
        return [cut(rows) for cut, rows in zip(self.cut, own, strict=True)]


def rows_of_shard(size: int) -> Callable[[Any, jax.Array], Any]:
    """Takes the `size` rows of a shard, by its number, int32[], from those of all."""

    def rows_of_shard(rows: Any, shard: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, shard * size, size), rows)

    return rows_of_shard


def cutter(count: int) -> Callable[[Any], list[Any]]:
    """Cuts rows into so many equal parts, in order; the name is the program's."""

    def cut_rows(rows: Any) -> list[Any]:
        size = jax.tree.leaves(rows)[0].shape[0] // count
        begins = range(0, size * count, size)
        return [jax.tree.map(lambda leaf, begin=begin: leaf[begin : begin + size], rows) for begin in begins]

    cut_rows.__name__ = f"cut_rows_{count}"
    return cut_rows


@dataclass
class HparamCopies:
    """The inputs of every step on each device of this process: taken apart once, as they stay the same."""

    layout: ShardLayout
    _known: tuple[Hparams, list[Hparams]] | None = field(default=None, repr=False)

    def copies_of(self, hparams: Hparams) -> list[Hparams]:
        """The inputs of every step by device."""
        if self._known is None or self._known[0] is not hparams:
            self._known = hparams, copies(hparams, self.layout.devices)
        return self._known[1]


def add_sums(left: Packed, right: Packed) -> Packed:
    """The sums of two neighbours in the tree."""
    return jax.tree.map(jax.numpy.add, left, right)


class SumTree:
    """The sums of a device's parts of the tree: neighbours are added, then their sums, each as soon as it can be."""

    def __init__(self, add: Callable[[Any, Any], Any], first: int = 0) -> None:
        """`first` is the number of the first part."""
        self._add, self._next = add, first
        self._parts: list[tuple[int, int, Any]] = []  # (level, place in the level, sum)

    def put(self, part: Any) -> None:
        """The next one."""
        level, place = 0, self._next
        self._next += 1
        while place % 2 and self._parts and self._parts[-1][:2] == (level, place - 1):
            part, level, place = self._add(self._parts.pop()[2], part), level + 1, place // 2
        self._parts.append((level, place, part))

    @property
    def count(self) -> int:
        """How many sums are kept now."""
        return len(self._parts)

    def sums(self) -> list[Any]:
        """The sums of the `subtrees` of its parts, which are not kept."""
        found, self._parts = [part for _, _, part in self._parts], []
        return found

    def total(self) -> Any:
        """The sum, where the parts are one subtree."""
        (total,) = self.sums()
        return total


def subtrees(shards: range) -> list[Subtree]:
    """The whole subtrees that neighbouring shards are made of, as `SumTree` leaves them."""
    tree = SumTree(lambda left, right: (left[0], left[1] + right[1]), shards.start)
    for shard in shards:
        tree.put((shard, 1))
    return tree.sums()


def total_of(known: dict[Subtree, jax.Array], first: int, count: int) -> jax.Array:
    """The sum of `count` shards from the `first` one on, from the sums of subtrees."""
    if (first, count) in known:
        return known[first, count]
    half = count // 2
    return total_of(known, first, half) + total_of(known, first + half, half)


@dataclass(frozen=True)
class Exchange:
    """Adds the sums of subtrees over all devices, and gives each device the totals, or its share of them."""

    layout: ShardLayout
    like: Any
    """The shapes and types of the tree that is added up."""
    steps: Sequence["Sent"]
    """Empty where there is one device."""
    kept: Packed
    """The packed totals that a device gets, as shapes."""

    @classmethod
    def compile_exchange(
        cls,
        layout: ShardLayout,
        like: Any,
        packed: Packed,
        compiler: Compiler,
        owner: Ownership | None = None,
        chunks: Collection[str] = (),
    ) -> "Exchange":
        """The exchange of sums such as `packed`, of trees such as `like`.

        Of the `chunks` among them a device gets its share alone, as an `owner` of blocks.
        """
        if layout.line.size == 1:
            return cls(layout, like, (), packed)
        others = [name for name in packed if name not in chunks]
        steps, known = list[Sent](), dict[Any, Sent]()
        for names in [*([name] for name in sorted(chunks)), others]:
            own = {str(i): packed[name] for i, name in enumerate(names)}
            kind = names != others, *(leaf.shape for leaf in own.values())
            if kind not in known:
                known[kind] = Sent.compile_sending(layout, names, own, owner if names != others else None, compiler)
            steps.append(replace(known[kind], names=names))
        kept = {name: step.kept[str(i)] for step in steps for i, name in enumerate(step.names)}
        return cls(layout, like, steps, kept)

    def run(self, sums: list[list[Packed]]) -> list[Packed]:
        """The packed sums of all shards on each device of this process, from those of its subtrees."""
        if not self.steps:
            return [own for own, *_ in sums]
        totals: list[Packed] = [{} for _ in sums]
        for step in self.steps:
            for total, found in zip(totals, step.run(sums), strict=True):
                total.update(found)
        return totals

    def unpack(self, total: Packed) -> Any:
        """The tree of a device's packed sums, leaves in their types for sums."""
        return unpack(total, self.like)


@dataclass(frozen=True)
class Sent:
    """A chunk of the packed arrays, which is exchanged at once."""

    layout: ShardLayout
    names: Sequence[str]
    arrange: Programs
    """The pieces of a device's sums."""
    send: Any
    kept: Any
    """What a device gets, as shapes, by the number of the name."""

    @classmethod
    def compile_sending(
        cls, layout: ShardLayout, names: Sequence[str], packed: Packed, owner: Ownership | None, compiler: Compiler
    ) -> "Sent":
        """The sending of such packed sums, of which a device gets all, or its share as an `owner` of blocks."""
        parts = [subtrees(layout.shards_of(device)) for device in layout.line.devices.flat]
        most, size = max(map(len, parts)), layout.line.size

        def in_pieces(sums: Packed) -> Packed:
            return pieces(sums, size) if owner is None else {name: owner.pieces(flat) for name, flat in sums.items()}

        def arrange_sums(sums: list[Packed]) -> Packed:
            stacked, more = [in_pieces(each) for each in sums], most - len(sums)
            return {
                name: jnp.pad(jnp.stack([each[name] for each in stacked], 1), ((0, 0), (0, more), (0, 0)))[None]
                for name in stacked[0]
            }

        def add_rest(own: Packed) -> Packed:
            return {name: _added(piece[0], parts, layout, owner is not None)[None] for name, piece in own.items()}

        arrange = [
            compiler.each(jax.jit(arrange_sums), ([packed] * len(subtrees(layout.shards_of(device))),), [device])[0]
            for device in layout.devices
        ]
        own = jax.eval_shape(arrange_sums, [packed])
        kept = {
            name: jax.ShapeDtypeStruct((1, leaf.shape[-1] * (size if owner is None else 1)), leaf.dtype)
            for name, leaf in own.items()
        }
        whole = {
            name: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype, sharding=layout.cut)
            for name, leaf in own.items()
        }
        send = jax.shard_map(add_rest, mesh=layout.line, in_specs=P(SHARDS), out_specs=P(SHARDS), check_vma=False)
        return cls(layout, names, arrange, compiler.one(jax.jit(send), (whole,), layout.line), kept)

    def run(self, sums: list[list[Packed]]) -> list[Packed]:
        """The totals of this chunk, by device of this process, from the sums of its subtrees, which are given back."""
        own = [[{str(i): tree.pop(name) for i, name in enumerate(self.names)} for tree in trees] for trees in sums]
        arranged = [arrange(trees) for arrange, trees in zip(self.arrange, own, strict=True)]
        del own
        # As `line_array` has it.
        total = self.send(
            {
                name: jax.make_array_from_single_device_arrays(
                    (self.layout.line.size, *leaf.shape[1:]), self.layout.cut, [piece[name] for piece in arranged]
                )
                for name, leaf in arranged[0].items()
            }
        )
        return [
            {name: total[str(k)].addressable_data(i) for k, name in enumerate(self.names)} for i in range(len(sums))
        ]


def _added(own: jax.Array, parts: list[list[Subtree]], layout: ShardLayout, is_share: bool) -> jax.Array:
    """[devices, subtrees, M] of a device to the total of all, [M'], or of its share of that, [M], within a shard_map
    over all devices."""
    received = jax.lax.all_to_all(own, SHARDS, 0, 0, tiled=True)
    known = {subtree: received[i, k] for i, each in enumerate(parts) for k, subtree in enumerate(each)}
    total = total_of(known, 0, layout.count)
    return total if is_share else jax.lax.all_gather(total, SHARDS, tiled=True)


@dataclass(frozen=True)
class Reduction:
    """The tree of additions over all virtual shards, compiled for sums of one shape."""

    layout: ShardLayout
    add: Programs
    exchange: Exchange

    @classmethod
    def compile_reduction(
        cls, layout: ShardLayout, packed: Packed, exchange: Exchange, compiler: Compiler
    ) -> "Reduction":
        """The tree for packed sums such as `packed`."""
        add: Programs = ()
        if layout.most > 1:
            add = compiler.each(jax.jit(add_sums, donate_argnums=0), (packed, packed), layout.devices)
        return cls(layout, add, exchange)

    def run(self, sums: Callable[[int, int], Packed]) -> list[Packed]:
        """The sums of all shards on each device; `sums` gives those of the k-th shard of the i-th device."""
        shards = self.layout.owned
        trees = [SumTree(self.add[i] if self.add else add_sums, own.start) for i, own in enumerate(shards)]
        for i, k in self.layout.turns:
            trees[i].put(sums(i, k))
        return self.exchange.run([tree.sums() for tree in trees])
