"""Passes apart: each data set begins its next pass on its own, so that it keeps its share however small it is.

A pass over a data set of u units gives W = u m windows of one length, m of each unit, and window i that the plan reads
of it is window i mod W of pass i div W. So i follows from the mixture's counts alone, a segment is a whole phase, and
the sequence of windows of a data set is the same whatever the shares, the other data sets and the ends of the phases:
curricula that differ in them can be compared on the same text (common random numbers). A phase of rows of another
length begins with the next chunk of units, as after an amendment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from roxxel_dist.curriculum.mixture import Mixture, quota
from roxxel_dist.curriculum.segments import Allocation, Cursor, Segment, SegmentBuilder, Shape
from roxxel_dist.process.exit_codes import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class PassesApart(Allocation):
    """The windows that a phase reads of one data set: the rest of a pass, and then whole passes."""

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop), in the order in which they are read."""
        place, end, pieces = first + self.cursor.windows, stop + self.cursor.windows, []
        while place < end:
            number, inside = self._find(place)
            part = _part(self, number)
            count = min(end - place, part.units * self.windows_per_unit - inside)
            pieces.append(part.offsets(inside, inside + count))
            place += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def cursor_after(self, windows: int) -> Cursor:
        """The data set's cursor once so many windows are read, to the window."""
        number, inside = self._find(self.cursor.windows + windows)
        return replace(_part(self, number).cursor, windows=inside, seq_len=self.seq_len)

    def passes_begun(self, windows: int) -> int:
        """Passes over the data set, from the plan's beginning, that its first so many windows are of."""
        if not windows:
            return 0
        return self.cursor.pass_index + self._find(self.cursor.windows + windows - 1)[0] + 1

    def _find(self, place: int) -> tuple[int, int]:
        """(the pass, 0 being that of the cursor, the place in it) of a window counted from the cursor's first unit."""
        rest = self.units * self.windows_per_unit
        if place < rest:
            return 0, place
        number, inside = divmod(place - rest, self.source.units.count * self.windows_per_unit)
        return number + 1, inside


# Steps that follow each other are of the same pass, which keeps the orders of its chunks.
@lru_cache(maxsize=64)
def _part(phase: PassesApart, number: int) -> Allocation:
    """One pass of those that a phase reads."""
    cursor, units = replace(phase.cursor, windows=0), phase.units
    if number:
        cursor, units = phase.source.new_pass(phase.key, cursor.pass_index + number), phase.source.units.count
    return Allocation(source=phase.source, cursor=cursor, units=units, seq_len=phase.seq_len, key=phase.key)


class ApartBuilder(SegmentBuilder):
    """Cuts phases into segments with passes apart: a segment for each phase."""

    def build(self, shapes: Sequence[Shape], first_step: int) -> Iterator[Segment]:
        """The segments of the steps from `first_step` on. Raises UserError where `max_passes` are not enough."""
        end = 0
        for phase, shape in enumerate(shapes):
            step, end = max(end, first_step), end + shape.steps
            if step < end:
                segment = self._whole(shape, phase, step, end - step)
                yield segment
                self.cursors |= segment.after(segment.steps)

    def _whole(self, shape: Shape, phase: int, step: int, steps: int) -> Segment:
        """A phase, or what is left of it."""
        weights, items = [weight for _, weight in shape.weights], steps * shape.items_per_step
        # By phase, not by step: its order does not depend on where it begins.
        mixture = Mixture(weights, items, self.key.mixture(phase))
        allocations = []
        for (name, _), count in zip(shape.weights, quota(mixture.cumulative, items), strict=True):
            source, cursor = self.sources[name], self.cursors[name]
            if cursor.seq_len != shape.seq_len:
                cursor = cursor.without_windows(source)
            units = cursor.remaining.size - cursor.used
            read = PassesApart(source=source, cursor=cursor, units=units, seq_len=shape.seq_len, key=self.key)
            passes = read.passes_begun(count * shape.rows_per_item)
            if self.max_passes is not None and passes > self.max_passes:
                raise UserError(
                    f"phase {phase + 1}: it reads {name!r} up to pass {passes}, and max_passes is {self.max_passes}: "
                    f"use fewer steps, a smaller share, more data, or a larger max_passes"
                )
            allocations.append(read)
        return self._segment(shape, phase, step, steps, mixture, allocations)
