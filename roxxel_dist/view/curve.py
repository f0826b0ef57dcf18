"""A curve of any length in bounded memory: buckets of steps that keep their least and their largest value.

All buckets are as wide, a power of two of steps: the smallest one that leaves at most `MOST` of them. So a curve
depends on its rows, and not on when they were read.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST = 1024
"""Buckets of a curve; one of at most so many rows is kept exactly."""

Points = list[tuple[int, float]]


class Bucket(NamedTuple):
    """The values of neighbouring steps."""

    begin: int
    """The first step."""
    end: int
    """The last step."""
    rows: int
    total: float
    first: float
    """The value of the first step."""
    last: float
    """The value of the last step."""
    low: float
    low_step: int
    high: float
    high_step: int

    @property
    def mean(self) -> float:
        """The mean of its values."""
        return min(max(self.total / self.rows, self.low), self.high)

    @property
    def points(self) -> Points:
        """The first and the last value, the least and the largest: a line through them covers what all rows cover."""
        if self.rows == 1:
            return [(self.begin, self.first)]
        ends = ((self.begin, self.first), (self.end, self.last))
        return sorted({*ends, (self.low_step, self.low), (self.high_step, self.high)})


def _of(steps: Sequence[int], values: Sequence[float]) -> Bucket:
    low, high, first, last = min(values), max(values), values[0], values[-1]
    low_step, high_step = steps[values.index(low)], steps[values.index(high)]
    return Bucket(steps[0], steps[-1], len(steps), sum(values), first, last, low, low_step, high, high_step)


def _merge(a: Bucket, b: Bucket) -> Bucket:
    low, high = (a if a.low <= b.low else b), (a if a.high >= b.high else b)
    extremes = low.low, low.low_step, high.high, high.high_step
    return Bucket(a.begin, b.end, a.rows + b.rows, a.total + b.total, a.first, b.last, *extremes)


class Curve:
    """The values of one metric, added in the order of their steps."""

    def __init__(self) -> None:
        self._width, self._buckets = 1, list[Bucket]()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets so far, in the order of steps."""
        return tuple(self._buckets)

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add finite values of steps that rise, and are behind those so far."""
        self._make_room(steps)
        place = 0
        while place < len(steps):
            index = steps[place] // self._width
            stop = bisect_left(steps, (index + 1) * self._width, place)
            bucket = _of(steps[place:stop], values[place:stop])
            if self._buckets and self._buckets[-1].end // self._width == index:
                self._buckets[-1] = _merge(self._buckets[-1], bucket)
            else:
                self._buckets.append(bucket)
            place = stop

    def cut(self, step: int) -> None:
        """Remove the values at `step` and behind it. Of a bucket with values on both sides, those before it whose steps
        are known stay."""
        while self._buckets and self._buckets[-1].begin >= step:
            self._buckets.pop()
        if self._buckets and self._buckets[-1].end >= step:
            known = [point for point in self._buckets[-1].points if point[0] < step]
            self._buckets[-1] = _of([at for at, _ in known], [value for _, value in known])

    def _make_room(self, steps: Sequence[int]) -> None:
        """Widen the buckets until there are at most `MOST` with those of some more steps."""
        while len(self._buckets) + len(steps) > MOST:
            places = {step // self._width for step in steps}
            if self._buckets:
                places.discard(self._buckets[-1].end // self._width)
            if len(self._buckets) + len(places) <= MOST:
                return
            self._width *= 2
            self._buckets = _merged(self._buckets, self._width)


def _merged(buckets: Sequence[Bucket], width: int) -> list[Bucket]:
    merged: list[Bucket] = []
    for bucket in buckets:
        if merged and merged[-1].end // width == bucket.begin // width:
            merged[-1] = _merge(merged[-1], bucket)
        else:
            merged.append(bucket)
    return merged


def reduce_buckets(buckets: Sequence[Bucket], most: int) -> Sequence[Bucket]:
    """The curve in at most `most` buckets, each of them wider, for a smaller picture."""
    width = 1
    while len({bucket.begin // width for bucket in buckets}) > most:
        width *= 2
    return _merged(buckets, width) if len(buckets) > most else buckets


def points_of(buckets: Sequence[Bucket]) -> Points:
    """Points whose line covers what the line through all rows covers: at most four a bucket."""
    return [point for bucket in buckets for point in bucket.points]


def curve_of(points: Sequence[tuple[int, float]]) -> tuple[Bucket, ...]:
    """The buckets of (step, value) pairs with rising steps; values that are not finite are left out."""
    finite, curve = [(step, value) for step, value in points if math.isfinite(value)], Curve()
    curve.add([step for step, _ in finite], [value for _, value in finite])
    return curve.buckets


class Curves:
    """The curve of each metric of a run, from its rows: `row` has the newest value of each metric, NaN if it is not
    finite; `curves` the finite values by metric; `gaps` the steps whose value is not finite, with the value 0."""

    def __init__(self, skipped: Sequence[str] = ()) -> None:
        """`skipped` are the keys of a row that are no metrics."""
        self._skipped: frozenset[str] = frozenset(skipped)
        self._step: float = -math.inf
        self.row: dict[str, float] = {}
        self.curves: dict[str, Curve] = {}
        self.gaps: dict[str, Curve] = {}

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows in the order of the log. A row whose step is not behind those before it replaces them."""
        part: list[tuple[int, Mapping[str, object]]] = []
        for row in rows:
            if (step := step_of(row)) is None:
                continue
            if step <= self._step:
                self._add_part(part)
                part = []
                self._replace(step, row)
            self._step = step
            part.append((step, row))
        self._add_part(part)

    def _replace(self, step: int, row: Mapping[str, object]) -> None:
        """Remove the values that a row replaces: of its own step, its metrics; of later steps, all."""
        for curve in (*self.curves.values(), *self.gaps.values()):
            curve.cut(step + 1)
        for name in row:
            for curves in (self.curves, self.gaps):
                if name in curves:
                    curves[name].cut(step)

    def _add_part(self, part: Sequence[tuple[int, Mapping[str, object]]]) -> None:
        """Add rows with rising steps."""
        every, rows = [step for step, _ in part], [row for _, row in part]
        for name in {name: None for row in rows for name in row}:
            steps = every
            values: list[Any] = [row.get(name, "") for row in rows]
            if not _is_finite(values):
                pairs = [(step, number_of(value)) for step, value in zip(every, values, strict=True)]
                known = [(step, value) for step, value in pairs if value is not None]
                if not known:
                    continue
                self.row[name] = known[-1][1]
                if name not in self._skipped:
                    gaps = [step for step, value in known if not math.isfinite(value)]
                    self.gaps.setdefault(name, Curve()).add(gaps, [0.0] * len(gaps)) if gaps else None
                known = [pair for pair in known if math.isfinite(pair[1])]
                steps, values = [step for step, _ in known], [value for _, value in known]
            else:
                self.row[name] = values[-1]
            if values and name not in self._skipped:
                self.curves.setdefault(name, Curve()).add(steps, values)


def _is_finite(values: Sequence[Any]) -> bool:
    """Whether all values are finite numbers; False also if that takes a look at each."""
    try:
        return set(map(type, values)) <= {int, float} and math.isfinite(sum(values))
    except OverflowError:
        return False


def step_of(row: Mapping[str, object]) -> int | None:
    """The step of a row; None if it has none."""
    step = row.get("step")
    return int(step) if isinstance(step, int | float) and abs(step) <= sys.float_info.max else None


def number_of(value: object) -> float | None:
    """A value of a row as a number: NaN if it is not finite, which JSON writes as null; None if it is none."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan
