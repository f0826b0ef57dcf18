"""The plan: which tokens every step reads, as a closed form of (data sets, curriculum with amendments, seed, step).

A data set is cut in units (see `data/units.py`). In pass p the units are visited in the order of a bijection keyed by
(seed, data set, p). A *segment* is a run of steps in which nothing changes: one phase, one pass, the same data sets in
the blend. It claims the next units of each of its data sets, enough for its rows, and a second bijection orders the
windows of each chunk of the claim. So phases of any shape share no token within a pass, every window is contiguous
text, and a step is found by one bisection, however far it is and whatever the data sets hold.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from roxxel_dist.curriculum.amend import Amendment, beginnings, carried, check, first_amendment, unit_of
from roxxel_dist.curriculum.segments import Position, Segment, Shape, Source, cut
from roxxel_dist.data.units import Ranges, Units

ROWS_AHEAD = 8192
ENDLESS = 1 << 62
"""Steps of a phase that goes on, pass after pass."""


@dataclass(frozen=True)
class Rows:
    """The rows of one step's global batch of B rows."""

    dataset: np.ndarray
    """int32[B]: index into `Plan.datasets`."""
    offset: np.ndarray
    """int64[B]: first token of the row's window, in tokens from the data set's start."""
    seq_len: int
    """Tokens of a window, the target included."""
    packed: bool = False
    """Whether the batch tells the documents of its rows apart."""


class Plan:
    """What each step trains on.

    Args:
        phases: their shapes.
        datasets: name to readable ranges; the first is named "self".
        seed: of all orders, 0 or more.
        max_passes: the most passes over a data set; None for as many as the steps take.

    Raises:
        ValueError: a data set cannot fill one batch of a phase in a whole pass, or the passes are not enough.
    """

    def __init__(
        self, phases: Sequence[Shape], datasets: Mapping[str, Ranges], seed: int, *, max_passes: int | None = None
    ) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is {seed!r}: it must be a whole number of at least 0")
        self._build(seed, max_passes, [first_amendment(phases, datasets)])

    def _build(self, seed: int, max_passes: int | None, amendments: Sequence[Amendment]) -> None:
        self.seed: int = seed
        self.max_passes: int | None = max_passes
        self.amendments: tuple[Amendment, ...] = tuple(amendments)
        self.segments: list[Segment] = []
        """In order; of whole passes that repeat (`Segment.laps`) those of the first."""
        self.total_steps: int = 0
        for level, amendment in enumerate(amendments):
            positions = self._positions_for(level) if level else beginnings(amendment.sources, seed)
            # A segment that an amendment cuts short keeps its length: its order follows from it.
            self.segments = [s for s in self.segments if s.first_step < amendment.from_step]
            self._firsts = [segment.first_step for segment in self.segments]
            self._known_to = amendment.from_step
            self.shapes: tuple[Shape, ...] = amendment.shapes
            self.total_steps = sum(shape.steps for shape in amendment.shapes)
            self._rest = cut(
                amendment.shapes, amendment.sources, positions,
                seed=seed, first_step=amendment.from_step, level=level, max_passes=max_passes,
            )  # fmt: skip
            self._know(self.total_steps - 1 if self.total_steps < ENDLESS else amendment.from_step)
        self.datasets: tuple[str, ...] = tuple(
            dict.fromkeys(name for amendment in amendments for name in amendment.sources)
        )
        self._ahead = (0, 0, (np.empty((0, 0), np.int32), np.empty((0, 0), np.int64), 0, False))

    def _know(self, step: int) -> None:
        """Find the segments up to the one that holds `step`; a plan without an end finds the others when asked."""
        while self._known_to <= step:
            segment = next(self._rest)
            self.segments.append(segment)
            self._firsts.append(segment.first_step)
            self._known_to = segment.first_step + segment.steps

    # -- amending

    def amend(
        self,
        step: int,
        phases: Sequence[Shape] | None = None,
        *,
        datasets: Mapping[str, Ranges] | None = None,
        skip: int = 0,
    ) -> "Plan":
        """This plan up to `step`, and another from there on.

        Steps before `step` stay what they are. What this pass has read is not read again, whatever changes: of each
        data set in use at most the rest of one chunk of units is given up.

        Args:
            step: the first step that changes.
            phases: all phases, from step 0; the ones there are where not given.
            datasets: all data sets by name, with their ranges; the ones there are where not given. Ranges may be
                added behind those of a data set, or taken away from its end; whole data sets may come and go.
            skip: leave out what the next so many steps of this plan would have read.

        Returns:
            A new plan; this one stays what it is.

        Raises:
            ValueError: the step is outside the plan or before the last amendment, or a window is longer than a unit.
        """
        last = self.amendments[-1]
        if not last.from_step <= step <= self.total_steps:
            raise ValueError(
                f"step {step} cannot be amended: the last amendment is of step {last.from_step}, and the plan has "
                f"{self.total_steps} steps"
            )
        if skip < 0:
            raise ValueError(f"skip is {skip}: it must be 0 or more steps")
        shapes = tuple(phases) if phases is not None else last.shapes
        longest = max(shape.seq_len for shape in shapes)
        sources = dict(last.sources)
        if datasets is not None:
            sources = {
                name: Source(name=name, units=Units(ranges, unit_of(name, ranges, longest, last.sources)))
                for name, ranges in datasets.items()
            }
        check(shapes, sources)
        total = sum(shape.steps for shape in shapes)
        if total <= step:
            raise ValueError(f"the phases end at step {total}, and step {step} was to be amended: give longer ones")
        plan = object.__new__(Plan)
        amendment = Amendment(from_step=step, skip=skip, shapes=shapes, sources=sources)
        plan._build(self.seed, self.max_passes, [*self.amendments, amendment])
        return plan

    def _positions_for(self, level: int) -> dict[str, Position]:
        """How far each data set was read when an amendment begins, its pool being what is left.

        One that is taken away keeps its position, for when it comes back.
        """
        amendment, earlier = self.amendments[level], self.amendments[:level]
        done = min(amendment.from_step + amendment.skip, self.total_steps)
        segment = self.segment(done) if done < self.total_steps else self.segment(done - 1)
        before = segment.after(done - segment.first_step)
        return before | {
            name: carried(
                before.get(name), [a.sources[name] for a in earlier if name in a.sources], source, self.seed, level
            )
            for name, source in amendment.sources.items()
        }

    # -- reading

    def segment(self, step: int) -> Segment:
        """The segment that holds `step` (from 0).

        Raises:
            IndexError: the plan has no such step.
        """
        first, lap = self._find(step)
        return first.again(lap)

    def _find(self, step: int) -> tuple[Segment, int]:
        """The segment in which `step` is, or like which its own is, so many passes later."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step}: the plan has steps 0 to {self.total_steps - 1}")
        self._know(step)
        laps = self.segments[bisect.bisect_right(self._firsts, step) - 1].laps
        lap, inside = divmod(step - laps.first_step, laps.period) if laps else (0, 0)
        like = laps.first_step + inside if laps else step
        return self.segments[bisect.bisect_right(self._firsts, like) - 1], lap

    def rows(self, step: int) -> Rows:
        """The rows of a step: the same on every process, after every restart, on every machine.

        Args:
            step: counted from 0. The log counts from 1.

        Returns:
            `Rows` of the whole global batch: `dataset` int32[B], `offset` int64[B], both read-only, `seq_len`.

        Raises:
            IndexError: the plan has no such step.
        """
        first, stop, rows = self._ahead
        if not first <= step < stop:
            segment = self.segment(step)
            count = max(1, ROWS_AHEAD // segment.shape.batch_size) if step == stop else 1
            first, stop = step, step + min(count, self._end(segment) - step)
            rows = self._compute(segment, first, stop)
            self._ahead = (first, stop, rows)
        dataset, offset, seq_len, packed = rows
        return Rows(dataset[step - first], offset[step - first], seq_len, packed)

    def _end(self, segment: Segment) -> int:
        """One past the last step that a segment is used for."""
        amended = (a.from_step for a in self.amendments if a.from_step > segment.first_step)
        return min(segment.first_step + segment.steps, next(amended, ENDLESS))

    def _compute(self, segment: Segment, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """The fields of `Rows` for the S steps [first, stop) of a segment, the arrays being [S, B]."""
        items, width = segment.items_a_step, segment.rows_an_item
        begin = segment.first_step
        chosen, before = segment.blend.choose((first - begin) * items, (stop - begin) * items)
        offset = np.empty((len(chosen), width), np.int64)
        for number, claim in enumerate(segment.claims):
            # A data set's windows are read one after the other, whatever is read between them.
            mine = np.flatnonzero(chosen == number)
            if len(mine):
                low = int(before[number]) * width
                offset[mine] = claim.offsets(low, low + len(mine) * width).reshape(-1, width)
        names = np.array([self.datasets.index(claim.source.name) for claim in segment.claims], np.int32)
        dataset = np.repeat(names[chosen], width)
        shape, size = segment.shape, (stop - first, segment.shape.batch_size)
        dataset, offset = dataset.reshape(size), offset.reshape(size)
        for array in (dataset, offset):  # `rows` hands out views of them, to whoever asks
            array.flags.writeable = False
        return dataset, offset, shape.seq_len, shape.packing == "documents"

    def phase(self, step: int) -> int:
        """The index of the phase that holds `step`. Both count from 0.

        Raises:
            IndexError: the plan has no such step.
        """
        return self._find(step)[0].phase

    def shape(self, step: int) -> tuple[int, int]:
        """(batch_size, seq_len) of `step`, counted from 0.

        Raises:
            IndexError: the plan has no such step.
        """
        shape = self._find(step)[0].shape
        return shape.batch_size, shape.seq_len

    def tokens(self, step: int) -> int:
        """How many tokens the steps before `step` read."""
        ends = [*(amendment.from_step for amendment in self.amendments[1:]), step]
        spans = zip(self.amendments, ends, strict=True)
        return sum(_tokens(a.shapes, a.from_step, min(end, step)) for a, end in spans if a.from_step < step)

    # -- keeping and telling

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to continue this plan: a few numbers a phase and a shard, whatever they hold."""
        amendments = [amendment.state() for amendment in self.amendments]
        return {"step": step, "seed": self.seed, "max_passes": self.max_passes, "amendments": amendments}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Plan":
        """The plan that `state` was taken from."""
        plan = object.__new__(cls)
        plan._build(state["seed"], state["max_passes"], [Amendment.from_state(a) for a in state["amendments"]])
        return plan

    def describe(self) -> str:
        """A table for people: phases, shapes, tokens, passes, and the steps at which something changes."""
        return describe(self)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides what a step reads, except the tokens themselves."""
        return hashlib.sha256(json.dumps(self.state(0)).encode()).hexdigest()[:16]


def _tokens(shapes: Sequence[Shape], low: int, high: int) -> int:
    """Tokens of the steps [low, high) of some phases."""
    first = found = 0
    for shape in shapes:
        stop = first + shape.steps
        found += max(0, min(stop, high) - max(first, low)) * shape.batch_size * shape.seq_len
        first = stop
    return found


HEAD = ("phase", "steps", "batch x seq_len", "tokens", "passes", "data")


def describe(plan: "Plan") -> str:
    """The table of phases and, below it, every step at which a data set leaves the blend or a new pass begins."""
    table: list[tuple[str, ...]] = [HEAD]
    readable = sum(source.units.count * source.units.size for source in plan.amendments[-1].sources.values())
    first = 0
    for number, shape in enumerate(plan.shapes):
        stop = first + shape.steps
        tokens = plan.tokens(stop) - plan.tokens(first)  # an amended phase may have begun in another shape
        shares = sum(weight for _, weight in shape.weights)
        data = ", ".join(f"{name} {weight / shares:.0%}" for name, weight in shape.weights)
        by = f" by {shape.blend}" if len(shape.weights) > 1 else ""
        cells = (f"{first + 1:,} to {stop:,}", f"{shape.batch_size:,} x {shape.seq_len:,}", f"{tokens:,}")
        apart = ", documents apart" if shape.packing == "documents" else ""
        table.append((str(number + 1), *cells, f"{tokens / readable:.2f}", data + by + apart))
        first = stop
    total = plan.tokens(plan.total_steps)
    table.append(("all", f"{plan.total_steps:,}", "", f"{total:,}", f"{total / readable:.2f}", ""))
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines + [f"step {step + 1:,}: {what}" for step, what in events(plan)])


def events(plan: "Plan") -> list[tuple[int, str]]:
    """(step, what begins with it) of everything that is no phase's beginning: amendments, new passes, exhaustion."""
    found = [(a.from_step, "amended" + (f", {a.skip} steps left out" if a.skip else "")) for a in plan.amendments[1:]]
    for before, segment in zip(plan.segments, plan.segments[1:], strict=False):
        found += [(segment.first_step, what) for what in _changes(before, segment)]
    for laps in dict.fromkeys(segment.laps for segment in plan.segments if segment.laps):
        found.append((laps.first_step, f"this pass and the {laps.count - 1} behind it take {laps.period:,} steps each"))
    return sorted(found, key=lambda event: event[0])


def _changes(before: Segment, now: Segment) -> list[str]:
    passes = {claim.source.name: claim.position.pass_index for claim in now.claims}
    known = {name: position.pass_index for name, position in before.before.items()}
    renewed = [f"{name!r}" for name, index in passes.items() if index > known.get(name, index)]
    left = [
        f"{claim.source.name!r}"
        for claim in before.claims
        if claim.source.name not in passes and claim.source.name in dict(now.shape.weights)
    ]
    told = [f"all is used up: a new pass over {', '.join(renewed)} begins, in another order"] if renewed else []
    return told + ([f"{', '.join(left)} is used up and leaves the blend"] if left else [])
