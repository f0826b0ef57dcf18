"""From phases and data sets to segments: stretches of steps in which nothing changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from roxxel_dist.curriculum.blend import Blend, quota, running_shares
from roxxel_dist.curriculum.claim import OF_BLEND, Claim, Position, Source


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
