"""The binary tree of additions over all virtual shards: the only thing that is computed across devices.

Its lower parts are on a device: the sums of whole subtrees of its own shards. Of these each device sends every other
one the part that the other one owns (an all-to-all). The owner adds the rest of the tree. Then all get all parts from
their owners, but for the gradients of blocks, which stay there (see `ownership.py`). The tree is that of the shards, so
a sum is the same to the bit on any number of devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from roxxel_dist.train.exact.blocks.ownership import Ownership, Shares
from roxxel_dist.train.exact.layout import SHARDS, ShardLayout
from roxxel_dist.train.exact.packing import Packed, pieces, unpack
from roxxel_dist.train.step.compile import Compile, CompileForEach

Programs = Sequence[Any]
"""One compiled program, on each device of this process."""
Subtree = tuple[int, int]
"""(its first shard, how many)."""


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
        """Those of the `subtrees` of its parts, which are not kept."""
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
        compile_one: Compile,
        for_each: CompileForEach,
        shares: Shares | None = None,
    ) -> "Exchange":
        """For packed sums such as `packed`, of trees such as `like`."""
        if layout.line.size == 1:
            return cls(layout, like, (), packed)
        chunks = [] if shares is None else [[name] for name in sorted(shares.names)]
        others = [name for name in packed if shares is None or name not in shares.names]
        steps, known = list[Sent](), dict[Any, Sent]()
        for names in [*chunks, others]:
            own = {str(i): packed[name] for i, name in enumerate(names)}
            kind = names != others, *(leaf.shape for leaf in own.values())
            if kind not in known:
                owner = shares.ownership if shares is not None and names != others else None
                known[kind] = Sent.compile_sending(layout, names, own, owner, compile_one, for_each)
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
    """Some of the packed arrays, which are exchanged at once."""

    layout: ShardLayout
    names: Sequence[str]
    arrange: Programs
    """The pieces of a device's sums."""
    send: Any
    kept: Any
    """What a device gets, as shapes, by the number of the name."""

    @classmethod
    def compile_sending(
        cls,
        layout: ShardLayout,
        names: Sequence[str],
        packed: Packed,
        owner: Ownership | None,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "Sent":
        """For such packed sums, of which a device gets all, or its share as an `owner` of blocks."""
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
            for_each(jax.jit(arrange_sums), ([packed] * len(subtrees(layout.shards_of(device))),), [device])[0]
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
        return cls(layout, names, arrange, compile_one(jax.jit(send), (whole,), layout.line), kept)

    def run(self, sums: list[list[Packed]]) -> list[Packed]:
        """These totals, by device of this process, of the sums of its subtrees, which are given back."""
        own = [[{str(i): tree.pop(name) for i, name in enumerate(self.names)} for tree in trees] for trees in sums]
        arranged = [arrange(trees) for arrange, trees in zip(self.arrange, own, strict=True)]
        del own
        total = self.send({name: self.layout.along([piece[name] for piece in arranged]) for name in arranged[0]})
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
        cls, layout: ShardLayout, packed: Packed, exchange: Exchange, for_each: CompileForEach
    ) -> "Reduction":
        """For packed sums such as `packed`."""
        add: Programs = ()
        if layout.most > 1:
            add = for_each(jax.jit(add_sums, donate_argnums=0), (packed, packed), layout.devices)
        return cls(layout, add, exchange)

    def run(self, sums: Callable[[int, int], Packed]) -> list[Packed]:
        """The sums of all shards on each device; `sums` gives those of the k-th shard of the i-th device."""
        return self.exchange.run(self.sums_of_subtrees(sums))

    def sums_of_subtrees(self, sums: Callable[[int, int], Packed]) -> list[list[Packed]]:
        """The sums of the subtrees of each device of this process."""
        shards = self.layout.owned
        trees = [SumTree(self.add[i] if self.add else add_sums, own.start) for i, own in enumerate(shards)]
        for k in range(self.layout.most):
            for i, own in enumerate(shards):  # every device has something to do at once
                if k < len(own):
                    trees[i].put(sums(i, k))
        return [tree.sums() for tree in trees]
