"""From phases and data sets to segments: stretches of steps in which nothing changes."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from roxxel_dist.curriculum.blend import Blend
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
    packing: Literal["contiguous", "documents"] = "contiguous"
    """"documents": rows come with the document that each token is of. It changes no row."""


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


@dataclass(frozen=True, kw_only=True)
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

    def offsets(self, window: np.ndarray) -> np.ndarray:
        """int64[n] windows of the claim, in the order in which they are read, to their first tokens, int64[n]."""
        windows_a_chunk = self.source.chunk * self.per_unit
        chunk, inside = np.divmod(window, windows_a_chunk)
        result = np.empty_like(window)
        for number in range(int(chunk.min()), int(chunk.max()) + 1):
            mine = chunk == number
            first = number * self.source.chunk
            size = min(self.source.chunk, self.units - first)
            order = _window_order(size * self.per_unit, (*self.key, OF_WINDOWS, self.position.used + first))
            unit, within = np.divmod(order(inside[mine]), self.per_unit)
            units = self.position.pool.units(self.position.used + first + unit)
            result[mine] = self.source.units.start(units) + within * self.seq_len
        return result

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


@lru_cache(maxsize=256)
def _window_order(windows: int, key: tuple[int, ...]) -> Permutation:
    """Steps that follow each other read from the same chunk: its keys are made once."""
    return Permutation(windows, key)


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
    a_step = shape.batch_size if shape.blend == "row" else 1

    def segment(steps: int) -> Segment:
        blend = Blend(weights, steps * a_step, (seed, OF_BLEND, level, step))
        rows = blend.counts(steps * a_step) * (1 if shape.blend == "row" else shape.batch_size)
        claims = []
        for name, windows in zip(live, rows.tolist(), strict=True):
            source, position = sources[name], now[name]
            key = (seed, source.key, position.pass_index, level)
            units = -(-windows // (source.units.size // shape.seq_len))
            claims.append(Claim(source=source, position=position, units=units, seq_len=shape.seq_len, key=key))
        return Segment(
            first_step=step, steps=steps, phase=phase, shape=shape, blend=blend, claims=tuple(claims), before=dict(now)
        )

    def fits(steps: int) -> bool:
        found = _counts(weights, steps * a_step)
        return all(count <= room[name] for name, count in zip(live, found, strict=True))

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return segment(max(low, 0))


def _counts(weights: Sequence[float], items: int) -> list[int]:
    return Blend(weights, items, (0,)).counts(items).tolist()


def _asked(segment: Segment, steps: int) -> dict[str, int]:
    """Items that each data set of a segment would have to give, were it `steps` long."""
    names = [claim.source.name for claim in segment.claims]
    shares = dict(segment.shape.weights)
    counts = _counts([shares[name] for name in names], steps * segment.items_a_step)
    return dict(zip(names, counts, strict=True))
