"""From phases and data sets to segments: stretches of steps in which nothing changes.

The units that a pass over a data set visits, and in which order.

What a stretch of steps reads of one data set: units of a pass, and their windows in a keyed order.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from roxxel_dist.curriculum.mixture import Blend, quota, running_shares
from roxxel_dist.curriculum.permutation import Permutation
from roxxel_dist.data.units import Units


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """An order over some units.

    A pass begins with a pool of all units. An amendment in its midst makes another one, of what the old pool has not
    given out yet, without the units that were taken away, and with the ones that were added. It remembers the old pool,
    not the units, so it stays small; only units that are taken away, or come back, cost memory, 8 bytes for each.
    """

    size: int
    order: Permutation | None
    """Of the positions [0, size); None where the pool is empty."""
    parent: "Pool | None" = None
    taken: int = 0
    """Units that the parent gave out before: its positions below this."""
    holes: np.ndarray = field(default_factory=_none)
    """Sorted places among the parent's rest of units that are no longer there."""
    added: int = 0
    """The first unit of those that were added (for a first pool: 0, all units count as added)."""
    spent: np.ndarray = field(default_factory=_none)
    """Sorted places among the added units of those that this pass has read before they were taken away."""

    @classmethod
    def first(cls, units: int, key: Sequence[int]) -> "Pool":
        """All of so many units."""
        return cls(size=units, order=Permutation(units, key) if units else None)

    def amended(self, used: int, kept: int, units: int, key: Sequence[int], *, known: int = 0) -> "Pool":
        """What is left after `used` units.

        Args:
            used: how many units of this pool were given out.
            kept: units numbered from here on are taken away.
            units: units [kept, units) are added.
            key: of the new order.
            known: of the added units, those below this number were in an earlier pool of this pass.
        """
        positions = self.positions(np.arange(kept, self._stop))
        holes = np.sort(positions[positions >= used]) - used
        returning = np.arange(kept, known)
        spent = np.flatnonzero(self._given_out(returning, used))
        size = self.size - used - len(holes) + units - kept - len(spent)
        order = Permutation(size, key) if size else None
        return Pool(size=size, order=order, parent=self, taken=used, holes=holes, added=kept, spent=spent)

    @property
    def _left(self) -> int:
        """Units that come from the parent."""
        return self.parent.size - self.taken - len(self.holes) if self.parent else 0

    @property
    def _stop(self) -> int:
        """One past the highest unit."""
        return self.added + self.size - self._left + len(self.spent)

    def units(self, position: np.ndarray) -> np.ndarray:
        """The units that stand at these positions of the order: int64 to int64 of the same shape."""
        assert self.order is not None
        place = self.order(position)
        result = self.added + _nth_without(self.spent, place - self._left)
        old = place < self._left
        if self.parent is not None and old.any():
            result[old] = self.parent.units(self.taken + _nth_without(self.holes, place[old]))
        return result

    def positions(self, unit: np.ndarray) -> np.ndarray:
        """Where these units stand in the order: int64, -1 for a unit that is not in the pool."""
        inside = unit - self.added
        new = (unit >= self.added) & (unit < self._stop) & ~np.isin(inside, self.spent)
        place = self._left + inside - np.searchsorted(self.spent, inside)
        if self.parent is not None:
            above = self.parent.positions(unit) - self.taken
            old = (unit < self.added) & (above >= 0) & ~np.isin(above, self.holes)
            place = np.where(old, above - np.searchsorted(self.holes, above), place)
            new = new | old
        result = np.full(unit.shape, -1, np.int64)
        if new.any():
            assert self.order is not None
            result[new] = self.order.inverse(place[new])
        return result

    def _given_out(self, unit: np.ndarray, used: int) -> np.ndarray:
        """Whether this pool, of which `used` units were given out, or one before it has given these units out."""
        position = self.positions(unit)
        given = (position >= 0) & (position < used)
        given[np.isin(unit - self.added, self.spent)] = True
        return given | self.parent._given_out(unit, self.taken) if self.parent is not None else given


def _nth_without(holes: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The n-th (from 0) whole number that is not in the sorted `holes`."""
    return n + np.searchsorted(holes - np.arange(len(holes)), n, side="right")


# What an order is of: part of its key, so that two orders never share one.
OF_UNITS, OF_WINDOWS, OF_BLEND = 0, 1, 2
MOST_CHUNK, LEAST_CHUNK, CHUNKS = 256, 16, 8


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set as the plan sees it."""

    name: str
    units: Units

    @cached_property
    def key(self) -> int:
        """A number that stands for the name in keys, whatever other data sets there are."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

    def beginning(self, seed: int, pass_index: int) -> "Position":
        """Before the first token of a pass."""
        return Position(
            pass_index=pass_index, pool=Pool.first(self.units.count, (seed, self.key, pass_index, OF_UNITS))
        )

    @property
    def chunk(self) -> int:
        """Units whose windows are shuffled together; an amendment gives up at most the rest of one chunk."""
        return max(LEAST_CHUNK, min(MOST_CHUNK, self.units.count // CHUNKS))


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a data set has been read."""

    pass_index: int
    pool: Pool
    used: int = 0
    """Units given out in this pass."""
    out: bool = False
    """It had too little left for a batch, and waits until all are used up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What a segment reads of one data set: the units [position.used, position.used + units) of its pass."""

    source: Source
    position: Position
    units: int
    seq_len: int
    key: tuple[int, ...]
    """(seed, data set, pass, amendments before)."""

    @property
    def per_unit(self) -> int:
        """Windows of a unit."""
        return self.source.units.size // self.seq_len

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop), counted in the order they are read in."""
        windows_a_chunk = self.source.chunk * self.per_unit
        parts = []
        while first < stop:
            number, inside = divmod(first, windows_a_chunk)
            count = min(stop - first, windows_a_chunk - inside)
            parts.append(_chunk(self, number).offsets(inside, inside + count))
            first += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def units_after(self, windows: int) -> int:
        """Units of the pass that are given out once so many windows of the claim are read, whole chunks."""
        chunks = -(-windows // (self.source.chunk * self.per_unit))
        return self.position.used + min(self.units, chunks * self.source.chunk)

    def moved(self, position: Position) -> "Claim":
        """The same of another pass."""
        seed, name, _, *others = self.key
        return replace(self, position=position, key=(seed, name, position.pass_index, *others))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Units of a claim whose windows are shuffled together."""

    order: Permutation
    """Of the windows of all its units."""
    starts: np.ndarray
    """int64: the first token of each unit."""
    per_unit: int
    seq_len: int

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop) of the order."""
        window = self.order(np.arange(first, stop))
        unit = window // self.per_unit
        window -= unit * self.per_unit
        window *= self.seq_len
        window += self.starts[unit]
        return window


# Steps that follow each other read from the same chunk: its order and its units are found once.
@lru_cache(maxsize=64)
def _chunk(claim: Claim, number: int) -> Chunk:
    first = number * claim.source.chunk
    size = min(claim.source.chunk, claim.units - first)
    at = claim.position.used + first
    units = claim.position.pool.units(np.arange(at, at + size))
    order = Permutation(size * claim.per_unit, (*claim.key, OF_WINDOWS, at))
    return Chunk(order=order, starts=claim.source.units.start(units), per_unit=claim.per_unit, seq_len=claim.seq_len)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Laps:
    """Whole passes of one phase that differ in their keys alone."""

    first_step: int
    period: int
    """Steps of a pass."""
    count: int
    """How many passes."""
    sources: Mapping[str, Source]
    """Those of the phase."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Steps [first_step, first_step + steps) of one phase, in one pass, with the same data sets in the blend."""

    first_step: int
    steps: int
    phase: int
    shape: Shape
    blend: Blend
    claims: tuple[Claim, ...]
    """Of the data sets that are in the blend, in its order."""
    before: Mapping[str, Position]
    """Every data set's position when the segment begins."""
    laps: "Laps | None" = None
    """It comes again in passes that follow; this is the first time."""

    @property
    def items_a_step(self) -> int:
        """What the blend counts in a step: the step itself, or its rows."""
        return self.shape.batch_size if self.shape.blend == "row" else 1

    @property
    def rows_an_item(self) -> int:
        """Rows that one choice of the blend covers."""
        return 1 if self.shape.blend == "row" else self.shape.batch_size

    def after(self, steps: int) -> dict[str, Position]:
        """Every data set's position when so many of the segment's steps are done."""
        result = dict(self.before)
        counts = self.blend.counts(steps * self.items_a_step) * self.rows_an_item
        for claim, windows in zip(self.claims, counts.tolist(), strict=True):
            result[claim.source.name] = replace(claim.position, used=claim.units_after(windows))
        return result

    def again(self, lap: int) -> "Segment":
        """The segment as it comes `lap` passes later."""
        return _again(self, lap) if lap else self


# Steps that follow each other are of the same segment, which keeps what it found out.
@lru_cache(maxsize=16)
def _again(first: Segment, lap: int) -> Segment:
    assert first.laps
    seed, *others, _ = first.blend.key
    step, before = first.first_step + lap * first.laps.period, dict(first.before)
    for name, source in first.laps.sources.items():
        begun = source.beginning(seed, before[name].pass_index + lap)
        before[name] = replace(before[name], pass_index=begun.pass_index, pool=begun.pool)
    claims = tuple(claim.moved(before[claim.source.name]) for claim in first.claims)
    blend = Blend(first.blend.weights, first.blend.items, (seed, *others, step))
    return replace(first, first_step=step, blend=blend, claims=claims, before=before, laps=None)


def cut(
    shapes: Sequence[Shape],
    sources: Mapping[str, Source],
    positions: Mapping[str, Position],
    *,
    seed: int,
    first_step: int = 0,
    level: int = 0,
    max_passes: int | None = None,
) -> Iterator[Segment]:
    """The segments of the steps from `first_step` to the end of the last phase, one after another.

    Where whole passes repeat, those of the first stand for all of them; see `Segment.laps`.

    Args:
        shapes: all phases, from step 0.
        sources: every data set by name.
        positions: how far each was read when `first_step` begins.
        seed: of all orders.
        first_step: where this begins.
        level: how many amendments came before; part of every key.
        max_passes: the most passes over a data set.

    Raises:
        ValueError: a whole pass over a data set holds less than one batch of a phase, or `max_passes` are not enough.
    """
    now, step, end = dict(positions), first_step, 0
    for phase, shape in enumerate(shapes):
        end += shape.steps
        mine = {name: sources[name] for name, _ in shape.weights}
        begun = False
        while step < end:
            found = list(_until_used_up(shape, phase, step, end, mine, now, seed, level))
            period = sum(segment.steps for segment in found)
            # Passes begun in this phase are alike; the last one is left to be cut, for it may end early.
            count = (end - step - 1) // period if begun and max_passes is None else 1
            if count > 1:
                laps = Laps(first_step=step, period=period, count=count, sources=mine)
                found = [replace(segment, laps=laps) for segment in found]
                for name in mine:
                    now[name] = replace(now[name], pass_index=now[name].pass_index + count - 1)
            yield from found
            step += max(count, 1) * period
            if step < end:
                _next_pass(shape, phase, step, mine, now, seed, max_passes)
                begun = True


def _until_used_up(
    shape: Shape,
    phase: int,
    step: int,
    end: int,
    sources: Mapping[str, Source],
    now: dict[str, Position],
    seed: int,
    level: int,
) -> Iterator[Segment]:
    """The segments from `step` to `end`, or until no data set of the phase has enough left; keeps `now` up to date."""
    while step < end and (live := [name for name in sources if not now[name].out]):
        room = {name: room_for(shape, sources[name], now[name]) for name in live}
        # One that cannot give a batch leaves before the first step: rounding might ask it for one at once.
        dry = [name for name in live if room[name] == 0]
        if not dry:
            segment = _longest(shape, phase, step, end - step, live, room, sources, now, seed, level)
            yield segment
            now |= segment.after(segment.steps)
            step += segment.steps
            if step < end:
                asked = _asked(segment, segment.steps + 1)
                dry = [name for name in live if asked[name] > room[name]]
        for name in dry:
            now[name] = replace(now[name], out=True)


def room_for(shape: Shape, source: Source, position: Position) -> int:
    """Items of the blend (steps or rows) that what is left of the pass can give."""
    windows = (position.pool.size - position.used) * (source.units.size // shape.seq_len)
    batches = windows // shape.batch_size
    return batches if shape.blend == "step" or batches == 0 else windows


def _next_pass(
    shape: Shape,
    phase: int,
    step: int,
    sources: Mapping[str, Source],
    now: dict[str, Position],
    seed: int,
    max_passes: int | None,
) -> None:
    """Begin a new pass over every data set of the phase."""
    for name in sources:
        source, passes = sources[name], now[name].pass_index + 1
        position = source.beginning(seed, passes)
        if room_for(shape, source, position) == 0:
            held = source.units.count * (source.units.size // shape.seq_len)
            raise ValueError(
                f"phase {phase + 1}: a batch of {shape.batch_size} rows of {shape.seq_len} tokens does not fit in "
                f"the data {name!r}, which holds {held} such rows: use a smaller batch_size or seq_len, or more text"
            )
        if max_passes is not None and passes >= max_passes:
            raise ValueError(
                f"phase {phase + 1}: all of its data is used up at step {step + 1}, and max_passes is {max_passes}: "
                f"use fewer steps, more data, or a larger max_passes"
            )
        now[name] = position


def _longest(
    shape: Shape,
    phase: int,
    step: int,
    most: int,
    live: list[str],
    room: Mapping[str, int],
    sources: Mapping[str, Source],
    now: Mapping[str, Position],
    seed: int,
    level: int,
) -> Segment:
    """The longest segment from `step` on that what is left of the pass can give."""
    shares = dict(shape.weights)
    weights = [shares[name] for name in live]
    edges, rooms = running_shares(weights), [room[name] for name in live]
    a_step = shape.batch_size if shape.blend == "row" else 1
    # Counts are within one of their shares, so there is little to search. The factors make up for rounding.
    parts = [(room, shares[name] / sum(weights)) for name, room in zip(live, rooms, strict=True)]
    high = min(most, int(min((room + 1) / share for room, share in parts) * (1 + 1e-9)) // a_step)
    low = min(high, int(max(0.0, min((room - 1) / share for room, share in parts)) * (1 - 1e-9)) // a_step)
    while low < high:
        middle = (low + high + 1) // 2
        fits = all(count <= room for count, room in zip(quota(edges, middle * a_step), rooms, strict=True))
        low, high = (middle, high) if fits else (low, middle - 1)
    blend = Blend(weights, low * a_step, (seed, OF_BLEND, level, step))
    rows_an_item = 1 if shape.blend == "row" else shape.batch_size
    claims = []
    for name, items in zip(live, quota(edges, low * a_step), strict=True):
        source, position = sources[name], now[name]
        key = (seed, source.key, position.pass_index, level)
        units = -(-items * rows_an_item // (source.units.size // shape.seq_len))
        claims.append(Claim(source=source, position=position, units=units, seq_len=shape.seq_len, key=key))
    return Segment(
        first_step=step, steps=low, phase=phase, shape=shape, blend=blend, claims=tuple(claims), before=dict(now)
    )


def _asked(segment: Segment, steps: int) -> dict[str, int]:
    """Items that each data set of a segment would have to give, were it `steps` long."""
    names = [claim.source.name for claim in segment.claims]
    return dict(zip(names, quota(segment.blend.edges, steps * segment.items_a_step), strict=True))
