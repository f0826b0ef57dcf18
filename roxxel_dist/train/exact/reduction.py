"""The binary tree of additions over all virtual shards: the only thing that is computed across devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from roxxel_dist.train.exact.layout import SHARDS, Layout
from roxxel_dist.train.exact.packing import Packed
from roxxel_dist.train.step.compile import Compile, CompileForEach

Programs = Sequence[Any]
"""One compiled program, on each device of this process."""


@dataclass(frozen=True)
class Reduction:
    """The tree of additions over all virtual shards, compiled for sums of one shape."""

    layout: Layout
    add: Programs
    cross: Any
    """Across devices; None where there is one."""

    @classmethod
    def compiled(cls, layout: Layout, like: Packed, compile_one: Compile, for_each: CompileForEach) -> "Reduction":
        """For packed sums such as `like`."""
        add: Programs = ()
        if layout.per_device > 1:
            add = for_each(jax.jit(add_sums, donate_argnums=0), (like, like), layout.devices)
        return cls(layout, add, across(layout, like, compile_one))

    def run(self, sums: Callable[[int, int], Packed]) -> list[Packed]:
        """The sums of all shards, on each device; `sums` gives those of the k-th shard of the i-th device."""
        trees = [Tree(self.add[i] if self.add else add_sums) for i in range(len(self.layout.devices))]
        for k in range(self.layout.per_device):
            for i, tree in enumerate(trees):  # every device has something to do at once
                tree.put(sums(i, k))
        return sum_across(self.layout, self.cross, [tree.total() for tree in trees])


class Tree:
    """The sum of 2^n parts: neighbours are added, then their sums, each as soon as it can be."""

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        self._add = add
        self._parts: list[tuple[int, Any]] = []  # (level, sum)

    def put(self, part: Any) -> None:
        """The next one."""
        level = 0
        while self._parts and self._parts[-1][0] == level:
            part, level = self._add(self._parts.pop()[1], part), level + 1
        self._parts.append((level, part))

    def total(self) -> Any:
        """The sum, which is not kept."""
        return self._parts.pop()[1]


def across(layout: Layout, like: Packed, compile_one: Compile) -> Any:
    """The program that adds such packed sums over all devices; None where there is one."""
    if layout.line.size == 1:
        return None
    butterfly = jax.shard_map(add_across, mesh=layout.line, in_specs=P(SHARDS), out_specs=P(SHARDS), check_vma=False)
    whole = {
        name: jax.ShapeDtypeStruct((layout.line.size, leaf.shape[1]), leaf.dtype, sharding=layout.cut)
        for name, leaf in like.items()
    }
    return compile_one(jax.jit(butterfly, donate_argnums=0), (whole,), layout.line)


def sum_across(layout: Layout, program: Any, own: list[Packed]) -> list[Packed]:
    """The sums over all devices, on each of this process, by the program of `across`; it takes the arrays' memory."""
    if program is None:
        return own
    total = program({name: layout.along([part[name] for part in own]) for name in own[0]})
    return [{name: array.addressable_data(i) for name, array in total.items()} for i in range(len(own))]


def add_sums(left: Packed, right: Packed) -> Packed:
    """The sums of two neighbours in the tree."""
    return jax.tree.map(jax.numpy.add, left, right)


def add_across(own: Packed) -> Packed:
    """The sums of all devices, within a shard_map over them: a + b is b + a to the bit, so all have the same."""
    distance, size = 1, jax.lax.axis_size(SHARDS)
    while distance < size:
        pairs = [(i, i ^ distance) for i in range(size)]
        own = jax.tree.map(lambda part, pairs=pairs: part + jax.lax.ppermute(part, SHARDS, pairs), own)
        distance *= 2
    return own
