"""From phases and data sets to segments: stretches of steps in which nothing changes."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from roxxel_dist.curriculum.blend import Blend, quota, running_shares
from roxxel_dist.curriculum.permutation import Permutation
from roxxel_dist.curriculum.pool import Pool
from roxxel_dist.data.units import Units

# What an order is of: part of its key, so that two orders never share one.
OF_UNITS, OF_WINDOWS, OF_BLEND = 0, 1, 2
MOST_CHUNK, LEAST_CHUNK, CHUNKS = 256, 16, 8


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


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set as the plan sees it."""

    name: str
    units: Units

    @property
    def key(self) -> int:
        """A number that stands for the name in keys, whatever other data sets there are."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

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


@dataclass(frozen=True, kw_only=True)
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
        while step < end:
            live = [name for name, _ in shape.weights if not now[name].out]
            room = {name: room_for(shape, sources[name], now[name]) for name in live}
            # One that cannot give a batch leaves before the first step: rounding might ask it for one at once.
            dry = [name for name in live if room[name] == 0]
            if not dry and live:
                segment = _longest(shape, phase, step, end - step, live, room, sources, now, seed, level)
                yield segment
                now, step = segment.after(segment.steps), step + segment.steps
                if step < end:
                    asked = _asked(segment, segment.steps + 1)
                    dry = [name for name in live if asked[name] > room[name]]
            for name in dry:
                now[name] = replace(now[name], out=True)
            if step < end and all(now[name].out for name, _ in shape.weights):
                _next_pass(shape, phase, step, sources, now, seed, max_passes)


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
    for name, _ in shape.weights:
        source, passes = sources[name], now[name].pass_index + 1
        pool = Pool.first(source.units.count, (seed, source.key, passes, OF_UNITS))
        position = Position(pass_index=passes, pool=pool)
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
    low, high = 0, min(most, sum(rooms) // a_step)
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
