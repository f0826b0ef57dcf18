"""Cuts phases and data sets into segments: stretches of steps in which nothing changes.

Within a segment a data set's items are counted by the closed form of `mixture`, so the longest segment that what is
left of a pass can give is found by bisection of that form. Its windows are those of the next units of the pass, in
chunks: window w of a chunk is window tau(w) mod m of the chunk's unit tau(w) div m, where tau is a keyed bijection and
m the windows per unit. Units are found by the bijection sigma of the pass. So a row costs two bijections, wherever it
is.

`RemainingUnits` are the units that a pass over a data set has yet to visit, `Allocation` is what a segment reads of one
data set: units of a pass, and their windows in a keyed order. `SegmentBuilder` cuts phases into segments. Decision 1.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from roxxel_dist.curriculum.mixture import Mixture, cumulative_weights, quota
from roxxel_dist.curriculum.permutation import Permutation, SpreadOrder
from roxxel_dist.data.units import SPREAD, Units
from roxxel_dist.process.exit_codes import UserError

MAX_CHUNK, MIN_CHUNK, CHUNKS = 256, 16, 8
TOGETHER = 1 << 18
"""Tokens of a stretch that is read at about the same time: on a small corpus all of it, on a large one not."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """The key of all random orders of a plan between two amendments."""

    seed: int
    level: int = 0
    """How many amendments came before."""

    # The third or second number names the kind of order, so that two orders never share a key.
    def new_pass(self, data_set: int, pass_index: int) -> tuple[int, ...]:
        """The key of the units of a pass, from its first step on."""
        return self.seed, data_set, pass_index, 0

    def rest_of_pass(self, data_set: int, pass_index: int) -> tuple[int, ...]:
        """The key of the units that an amendment leaves of a pass."""
        return self.seed, data_set, pass_index, 0, self.level

    def windows(self, data_set: int, pass_index: int, unit: int) -> tuple[int, ...]:
        """The key of the windows of a chunk, by the place of its first unit in the pass."""
        return self.seed, data_set, pass_index, self.level, 1, unit

    def mixture(self, step: int) -> tuple[int, ...]:
        """The key of the data sets in the segment that begins with a step."""
        return self.seed, 2, self.level, step


@dataclass(frozen=True, kw_only=True)
class RemainingUnits:
    """The units that a pass has yet to visit, in an order.

    A pass begins with all n units, in the order sigma: place t of the pass is unit sigma(t). An amendment that adds m
    units after u were given out leaves r = n - u + m. They get an order of their own, sigma' of [0, r): place t is unit
    sigma(u + sigma'(t)) where sigma'(t) < n - u, one that the pass had left, and else unit n + sigma'(t) - (n - u), one
    that was added. So no unit is listed, and a pass that is amended k times asks k + 1 bijections for a unit.
    """

    size: int
    order: SpreadOrder | None
    """Of [0, size); None where there are none."""
    block: int
    """The argument of each `SpreadOrder`."""
    parent: "RemainingUnits | None" = None
    """The units that the pass had before the amendment."""
    used: int = 0
    """Units that the parent gave out before: its places below this."""
    added: int = 0
    """The first unit of those that were added; of a new pass 0."""

    @classmethod
    def first(cls, units: int, key: Sequence[int], block: int) -> "RemainingUnits":
        """The units of a whole pass, so many."""
        return cls(size=units, order=_order(units, key, block), block=block)

    def amend(self, used: int, units: tuple[int, int], key: Sequence[int]) -> "RemainingUnits":
        """The units that remain after `used` units were given out, and the units [units[0], units[1]) were added."""
        added, stop = units
        size = self.size - used + stop - added
        return RemainingUnits(
            size=size, order=_order(size, key, self.block), block=self.block, parent=self, used=used, added=added
        )

    def units(self, place: np.ndarray) -> np.ndarray:
        """The units at these places of the order: int64 to int64 of the same shape."""
        assert self.order is not None
        inner = self.order(place)
        if self.parent is None:
            return inner
        left = self.parent.size - self.used
        result, is_old = self.added + inner - left, inner < left
        if is_old.any():
            result[is_old] = self.parent.units(self.used + inner[is_old])
        return result


def _order(size: int, key: Sequence[int], block: int) -> SpreadOrder | None:
    return SpreadOrder(size, key, block) if size else None


@dataclass(frozen=True, kw_only=True)
class UnitSource:
    """A data set as the plan sees it."""

    name: str
    units: Units
    order: int = SPREAD
    """`SPREAD` or `APART`: that of its plan."""

    @cached_property
    def number(self) -> int:
        """A number for the name in keys, independent of other data sets."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

    def new_pass(self, key: Key, pass_index: int) -> "Cursor":
        """The cursor before the first token of a pass."""
        block = max(1, TOGETHER // self.units.size)
        remaining = RemainingUnits.first(self.units.count, key.new_pass(self.number, pass_index), block)
        return Cursor(pass_index=pass_index, remaining=remaining)

    @property
    def chunk(self) -> int:
        """Units whose windows are shuffled together; an amendment gives up at most the rest of one chunk."""
        return max(MIN_CHUNK, min(MAX_CHUNK, self.units.count // CHUNKS))


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The place up to which a data set has been read."""

    pass_index: int
    remaining: RemainingUnits
    """The units of the pass, from its beginning or from the last amendment on."""
    used: int = 0
    """How many of them were given out."""
    exhausted: bool = False
    """It had too little left for a batch, and waits until all are used up."""
    windows: int = 0
    """With passes apart: windows read of the units from `used` on."""
    seq_len: int = 0
    """Tokens of these windows."""

    def without_windows(self, source: UnitSource) -> "Cursor":
        """Without windows: the rest of a chunk that was begun is given up."""
        chunks = -(-self.windows // (source.chunk * (source.units.size // self.seq_len))) if self.windows else 0
        used = self.used + chunks * source.chunk
        return replace(self, used=min(used, self.remaining.size), windows=0, seq_len=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """The units that a segment reads of one data set: [cursor.used, cursor.used + units) of its pass."""

    source: UnitSource
    cursor: Cursor
    units: int
    seq_len: int
    key: Key

    @property
    def windows_per_unit(self) -> int:
        """Windows of a unit."""
        return self.source.units.size // self.seq_len

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop), counted in the order they are read in."""
        windows_a_chunk = self.source.chunk * self.windows_per_unit
        pieces = []
        while first < stop:
            number, inside = divmod(first, windows_a_chunk)
            count = min(stop - first, windows_a_chunk - inside)
            order, starts = _chunk(self, number)
            window = order(np.arange(inside, inside + count))
            unit = window // self.windows_per_unit
            window -= unit * self.windows_per_unit
            window *= self.seq_len
            window += starts[unit]
            pieces.append(window)
            first += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def cursor_after(self, windows: int) -> Cursor:
        """The data set's cursor once so many windows of the allocation are read."""
        chunks = -(-windows // (self.source.chunk * self.windows_per_unit))  # whole ones are given out
        return replace(self.cursor, used=self.cursor.used + min(self.units, chunks * self.source.chunk))


# Steps that follow each other read from the same chunk: its order and its units are found once.
@lru_cache(maxsize=64)
def _chunk(allocation: Allocation, number: int) -> tuple[Permutation, np.ndarray]:
    """The order of a chunk's windows, and int64: the first token of each of its units."""
    source, cursor = allocation.source, allocation.cursor
    size = min(source.chunk, allocation.units - number * source.chunk)
    first = cursor.used + number * source.chunk
    key = allocation.key.windows(source.number, cursor.pass_index, first)
    units = cursor.remaining.units(np.arange(first, first + size))
    return Permutation(size * allocation.windows_per_unit, key), source.units.start(units)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A phase as the plan sees it."""

    steps: int
    batch_size: int
    seq_len: int
    weights: tuple[tuple[str, float], ...] = (("self", 1.0),)
    """Positive shares by data set."""
    blend: Literal["step", "row"] = "step"
    """Whether each step, or each row, is of one data set."""
    packing: Literal["contiguous", "documents"] = "contiguous"
    """"documents": rows come with the document that each token is of. It changes no row."""

    @property
    def tokens(self) -> int:
        """Tokens that a step reads."""
        return self.batch_size * self.seq_len

    @property
    def predicted_tokens(self) -> int:
        """Tokens that a step computes: the last one of a row is predicted, and no input."""
        return self.batch_size * (self.seq_len - 1)

    @property
    def items_per_step(self) -> int:
        """The items that the mixture counts in a step: one for the step itself, or one per row."""
        return self.batch_size if self.blend == "row" else 1

    @property
    def rows_per_item(self) -> int:
        """Rows that one choice of the mixture covers."""
        return 1 if self.blend == "row" else self.batch_size

    def capacity(self, source: UnitSource, cursor: Cursor) -> int:
        """Items of the mixture (steps or rows) that what is left of the pass can give."""
        windows = (cursor.remaining.size - cursor.used) * (source.units.size // self.seq_len)
        batches = windows // self.batch_size
        return batches if self.blend == "step" or batches == 0 else windows


@dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedPass:
    """Whole passes of one phase that differ in their keys alone."""

    first_step: int
    period: int
    """Steps of a pass."""
    count: int
    """How many passes."""
    sources: tuple[UnitSource, ...]
    """Those of the phase."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Steps [first_step, first_step + steps) of one phase, in one pass, with the same data sets in the mixture."""

    first_step: int
    steps: int
    phase: int
    shape: Shape
    key: Key
    mixture: Mixture
    allocations: tuple[Allocation, ...]
    """Of the data sets that are in the mixture, in its order."""
    before: Mapping[str, Cursor]
    """Every data set's cursor when the segment begins."""
    repeated: RepeatedPass | None = None
    """It comes again in passes that follow; this is the first time."""

    def after(self, steps: int) -> dict[str, Cursor]:
        """The cursor of every data set when so many of the segment's steps are done."""
        result = dict(self.before)
        counts = self.mixture.counts(steps * self.shape.items_per_step) * self.shape.rows_per_item
        for allocation, windows in zip(self.allocations, counts.tolist(), strict=True):
            result[allocation.source.name] = allocation.cursor_after(windows)
        return result

    def in_pass(self, number: int) -> "Segment":
        """The segment as it comes so many passes later."""
        return _in_pass(self, number) if number else self


# Steps that follow each other are of the same segment, which keeps what it found out.
@lru_cache(maxsize=16)
def _in_pass(first: Segment, number: int) -> Segment:
    assert first.repeated
    step, before = first.first_step + number * first.repeated.period, dict(first.before)
    for source in first.repeated.sources:
        cursor = before[source.name]
        begun = source.new_pass(first.key, cursor.pass_index + number)
        before[source.name] = replace(cursor, pass_index=begun.pass_index, remaining=begun.remaining)
    allocations = tuple(replace(a, cursor=before[a.source.name]) for a in first.allocations)
    mixture = Mixture(first.mixture.weights, first.mixture.items, first.key.mixture(step))
    return replace(first, first_step=step, mixture=mixture, allocations=allocations, before=before, repeated=None)


@dataclass(kw_only=True, eq=False)
class SegmentBuilder:
    """Cuts phases into segments, one after another."""

    sources: Mapping[str, UnitSource]
    cursors: dict[str, Cursor]
    """How far each data set has been read; kept up to date."""
    key: Key
    max_passes: int | None = None

    def build(self, shapes: Sequence[Shape], first_step: int) -> Iterator[Segment]:
        """The segments of the steps from `first_step` to the end of the last phase; `shapes` begin with step 0.

        Where whole passes repeat, those of the first stand for all of them; see `Segment.repeated`. A whole pass over
        each data set of a phase must give a batch of it. Raises UserError where `max_passes` are not enough.
        """
        step, end = first_step, 0
        for phase, shape in enumerate(shapes):
            end += shape.steps
            names = [name for name, _ in shape.weights]
            is_new_pass = False
            while step < end:
                segments = list(self._until_exhausted(shape, phase, step, end))
                period = sum(segment.steps for segment in segments)
                # Passes begun in this phase are alike; the last one is left to be cut, for it may end early.
                count = (end - step - 1) // period if is_new_pass and self.max_passes is None else 1
                if count > 1:
                    sources = tuple(self.sources[name] for name in names)
                    repeated = RepeatedPass(first_step=step, period=period, count=count, sources=sources)
                    segments = [replace(segment, repeated=repeated) for segment in segments]
                    for name in names:
                        last = self.cursors[name].pass_index + count - 1
                        self.cursors[name] = replace(self.cursors[name], pass_index=last)
                yield from segments
                step += max(count, 1) * period
                if step < end:
                    for name in names:
                        self.cursors[name] = self._new_pass(shape, phase, step, name)
                    is_new_pass = True

    def _until_exhausted(self, shape: Shape, phase: int, step: int, end: int) -> Iterator[Segment]:
        """The segments from `step` to `end`, or until no data set of the phase has enough left."""
        cursors = self.cursors
        while step < end and (live := [name for name, _ in shape.weights if not cursors[name].exhausted]):
            capacity = {name: shape.capacity(self.sources[name], cursors[name]) for name in live}
            # One that cannot give a batch leaves before the first step: rounding might ask it for one at once.
            exhausted = [name for name in live if capacity[name] == 0]
            if not exhausted:
                segment = self._longest(shape, phase, step, end - step, capacity)
                yield segment
                cursors |= segment.after(segment.steps)
                step += segment.steps
                if step < end:
                    needed = quota(segment.mixture.cumulative, (segment.steps + 1) * shape.items_per_step)
                    exhausted = [name for name, items in zip(live, needed, strict=True) if items > capacity[name]]
            for name in exhausted:
                cursors[name] = replace(cursors[name], exhausted=True)

    def _new_pass(self, shape: Shape, phase: int, step: int, name: str) -> Cursor:
        """The beginning of a new pass over a data set."""
        source, passes = self.sources[name], self.cursors[name].pass_index + 1
        cursor = source.new_pass(self.key, passes)
        if self.max_passes is not None and passes >= self.max_passes:
            raise UserError(
                f"phase {phase + 1}: all of its data is used up at step {step + 1}, and max_passes is "
                f"{self.max_passes}: use fewer steps, more data, or a larger max_passes"
            )
        return cursor

    def _longest(self, shape: Shape, phase: int, step: int, most: int, capacity: Mapping[str, int]) -> Segment:
        """The longest segment from `step` on that what is left of the pass can give; it has at most `most` steps."""
        shares = dict(shape.weights)
        weights = [shares[name] for name in capacity]
        cumulative, per_step = cumulative_weights(weights), shape.items_per_step
        # Counts are within one of their shares, so there is little to search. The factors make up for rounding.
        limits = [(items, shares[name] / sum(weights)) for name, items in capacity.items()]
        high = min(most, int(min((items + 1) / share for items, share in limits) * (1 + 1e-9)) // per_step)
        low = min(high, int(max(0.0, min((items - 1) / share for items, share in limits)) * (1 - 1e-9)) // per_step)
        while low < high:
            middle = (low + high + 1) // 2
            counts = zip(quota(cumulative, middle * per_step), capacity.values(), strict=True)
            low, high = (middle, high) if all(count <= items for count, items in counts) else (low, middle - 1)
        allocations = []
        for name, items in zip(capacity, quota(cumulative, low * per_step), strict=True):
            source = self.sources[name]
            units = -(-items * shape.rows_per_item // (source.units.size // shape.seq_len))
            allocations.append(
                Allocation(source=source, cursor=self.cursors[name], units=units, seq_len=shape.seq_len, key=self.key)
            )
        mixture = Mixture(weights, low * per_step, self.key.mixture(step))
        return self._segment(shape, phase, step, low, mixture, allocations)

    def _segment(
        self, shape: Shape, phase: int, step: int, steps: int, mixture: Mixture, allocations: Sequence[Allocation]
    ) -> Segment:
        return Segment(
            first_step=step, steps=steps, phase=phase, shape=shape, key=self.key, mixture=mixture,
            allocations=tuple(allocations), before=dict(self.cursors),
        )  # fmt: skip


def check_batches(shapes: Iterable[Shape], grad_accum: int) -> None:
    """Raises ValueError for a phase whose batch gradient accumulation does not divide. A batch of fewer rows than
    micro-batches has one row in each: a curriculum may end in one long row."""
    for i, shape in enumerate(shapes):
        if shape.batch_size % min(grad_accum, shape.batch_size):
            raise UserError(
                f"phase {i + 1}: batch_size is {shape.batch_size}, which is not a multiple of grad_accum "
                f"({grad_accum}): use a multiple of {grad_accum}"
            )
