"""The plan: which tokens every step reads, as a closed form of (data sets, curriculum with amendments, seed, step).

A data set is cut in units (see `data/units.py`). In pass p the units are visited in the order of a bijection keyed by
(seed, data set, p). A *segment* is a run of steps in which nothing changes: one phase, one pass, the same data sets in
the mixture. It is allocated the next units of each of its data sets, enough for its rows, and a second bijection orders
the windows of each chunk of them. So phases of any shape share no token within a pass, every window is contiguous
text, and a step is found by one bisection, however far it is and whatever the data sets hold.
"""

import bisect
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.curriculum.amend import Amendment, carry_cursor, check, check_added, make_sources
from roxxel_dist.curriculum.apart import ApartBuilder
from roxxel_dist.curriculum.segments import Cursor, Key, Segment, SegmentBuilder, Shape, UnitSource
from roxxel_dist.data.units import APART, SPREAD, Ranges
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import aligned

ROWS_AHEAD = 8192
ENDLESS = 1 << 62
"""Steps of a phase that goes on, pass after pass."""


class Rows(NamedTuple):
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
    """The rows that each step trains on.

    Args:
        phases: their shapes.
        datasets: name to readable ranges; the first is named "self".
        seed: of all orders, 0 or more.
        max_passes: the most passes over a data set; None for as many as the steps take.
        order: `SPREAD`, or `APART` where each data set begins its next pass on its own.

    Raises:
        ValueError: a data set cannot fill one batch of a phase in a whole pass, or the passes are not enough.
    """

    def __init__(
        self,
        phases: Sequence[Shape],
        datasets: Mapping[str, Ranges],
        seed: int,
        *,
        max_passes: int | None = None,
        order: int = SPREAD,
    ) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise UserError(f"seed is {seed!r}: it must be a whole number of at least 0")
        self.order: int = order
        sources = make_sources(datasets, phases, {}, order)
        check(phases, sources)
        self._build(seed, max_passes, [Amendment(from_step=0, skip=0, shapes=tuple(phases), sources=sources)])

    def __repr__(self) -> str:
        """Its length, phases, data sets and seed."""
        steps = "endless" if self.total_steps >= ENDLESS else f"{self.total_steps:,} steps"
        amended = [amendment.from_step + 1 for amendment in self.amendments[1:]]
        more = f", amended at step {', '.join(map(str, amended))}" if amended else ""
        return f"<Plan: {steps}, {len(self.shapes)} phase(s) of {', '.join(self.datasets)}, seed {self.seed}{more}>"

    def _build(self, seed: int, max_passes: int | None, amendments: Sequence[Amendment]) -> None:
        self.seed: int = seed
        self.max_passes: int | None = max_passes
        self.amendments: tuple[Amendment, ...] = tuple(amendments)
        self.segments: list[Segment] = []
        """In order; of whole passes that repeat (`Segment.repeated`) those of the first."""
        self.total_steps: int = 0
        for level, amendment in enumerate(amendments):
            key, first = Key(seed=seed, level=level), amendment.from_step
            cursors = self._cursors_for(level, key)
            # A segment that an amendment cuts short keeps its length: its order follows from it.
            self.segments = [segment for segment in self.segments if segment.first_step < first]
            self._firsts = [segment.first_step for segment in self.segments]
            self._known_to = first
            self.shapes: tuple[Shape, ...] = amendment.shapes
            self.total_steps = sum(shape.steps for shape in amendment.shapes)
            make = ApartBuilder if self.order == APART else SegmentBuilder
            builder = make(sources=amendment.sources, cursors=cursors, key=key, max_passes=max_passes)
            self._rest = builder.build(amendment.shapes, first)
            self._extend_to(self.total_steps - 1 if self.total_steps < ENDLESS else first)
        names = (name for amendment in amendments for name in amendment.sources)
        self.datasets: tuple[str, ...] = tuple(dict.fromkeys(names))
        self._ahead = (0, 0, (np.empty((0, 0), np.int32), np.empty((0, 0), np.int64), 0, False))

    def _extend_to(self, step: int) -> None:
        """Find the segments up to the one that holds `step`; a plan without an end finds the others when asked."""
        while self._known_to <= step:
            segment = next(self._rest)
            self.segments.append(segment)
            self._firsts.append(segment.first_step)
            self._known_to = segment.first_step + segment.steps

    def _cursors_for(self, level: int, key: Key) -> dict[str, Cursor]:
        """How far each data set was read when an amendment begins. A data set that is no longer in the plan keeps its
        cursor, for when it comes back."""
        amendment, before, earlier = self.amendments[level], dict[str, Cursor](), dict[str, UnitSource]()
        if level:
            done = min(amendment.from_step + amendment.skip, self.total_steps)
            segment = self.segment(min(done, self.total_steps - 1))
            before = segment.after(done - segment.first_step)
        for one in self.amendments[:level]:
            earlier |= one.sources
        if not amendment.is_fork:
            check_added(earlier, {name: source.units.ranges for name, source in amendment.sources.items()})
        return before | {
            name: carry_cursor(before.get(name), earlier.get(name), source, key)
            for name, source in amendment.sources.items()
        }

    # -- amending

    def amend(
        self,
        step: int,
        phases: Sequence[Shape] | None = None,
        *,
        datasets: Mapping[str, Ranges] | None = None,
        skip: int = 0,
        is_fork: bool = False,
    ) -> "Plan":
        """This plan up to `step`, and another from there on.

        Steps before `step` stay unchanged. Data that this pass has read is never read again: of each data set in use
        at most the rest of one chunk of units is given up. A data set whose windows become longer than its units is
        cut in longer ones, and its next pass begins at `step`.

        Args:
            step: the first step that changes.
            phases: all phases, from step 0; the ones there are where not given.
            datasets: all data sets by name, with their ranges; the ones there are where not given. Ranges may be
                added behind those of a data set, and whole data sets may come and go.
            skip: leave out what the next so many steps of this plan would have read.
            is_fork: ranges may be taken away from a data set too; then its next pass begins at `step`.

        Returns:
            A new plan; this one stays what it is.

        Raises:
            ValueError: the step is outside the plan or before the last amendment, a data set holds no such window, or
                has other ranges than before.
        """
        last = self.amendments[-1]
        if not last.from_step <= step <= self.total_steps:
            raise UserError(
                f"step {step} cannot be amended: the last amendment is of step {last.from_step}, and the plan has "
                f"{self.total_steps} steps"
            )
        if skip < 0:
            raise UserError(f"skip is {skip}: it must be 0 or more steps")
        shapes = tuple(phases) if phases is not None else last.shapes
        ranges = datasets or {name: source.units.ranges for name, source in last.sources.items()}
        sources = make_sources(ranges, shapes, last.sources, self.order)
        check(shapes, sources)
        total = sum(shape.steps for shape in shapes)
        if total <= step:
            raise UserError(f"the phases end at step {total}, and step {step} was to be amended: give longer ones")
        plan = object.__new__(Plan)
        plan.order = self.order
        amendment = Amendment(from_step=step, skip=skip, shapes=shapes, sources=sources, is_fork=is_fork)
        plan._build(self.seed, self.max_passes, [*self.amendments, amendment])
        return plan

    # -- reading

    def segment(self, step: int) -> Segment:
        """The segment that holds `step` (from 0). Raises IndexError: the plan has no such step."""
        segment, number = self._find(step)
        return segment.in_pass(number)

    def _find(self, step: int) -> tuple[Segment, int]:
        """The segment in which `step` is, or like which its own is, so many passes later."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step}: the plan has steps 0 to {self.total_steps - 1}")
        self._extend_to(step)
        segment, number = self.segments[bisect.bisect_right(self._firsts, step) - 1], 0
        if repeated := segment.repeated:
            number, inside = divmod(step - repeated.first_step, repeated.period)
            segment = self.segments[bisect.bisect_right(self._firsts, repeated.first_step + inside) - 1]
        return segment, number

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
        return min(segment.first_step + segment.steps, self._amended_after(segment))

    def _amended_after(self, segment: Segment) -> int:
        """The step of the next amendment after a segment's first step."""
        return next((a.from_step for a in self.amendments if a.from_step > segment.first_step), ENDLESS)

    def _compute(self, segment: Segment, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """The fields of `Rows` for the S steps [first, stop) of a segment, the arrays being [S, B]."""
        per_step, width, begin = segment.shape.items_per_step, segment.shape.rows_per_item, segment.first_step
        chosen, before = segment.mixture.choose((first - begin) * per_step, (stop - begin) * per_step)
        offset = np.empty((len(chosen), width), np.int64)
        for number, allocation in enumerate(segment.allocations):
            # A data set's windows are read one after the other, whatever is read between them.
            items = np.flatnonzero(chosen == number)
            if len(items):
                low = int(before[number]) * width
                offset[items] = allocation.offsets(low, low + len(items) * width).reshape(-1, width)
        numbers = np.array([self.datasets.index(a.source.name) for a in segment.allocations], np.int32)
        dataset = np.repeat(numbers[chosen], width)
        shape = segment.shape
        dataset, offset = (array.reshape(stop - first, shape.batch_size) for array in (dataset, offset))
        for array in (dataset, offset):  # `rows` hands out views of them
            array.flags.writeable = False
        return dataset, offset, shape.seq_len, shape.packing == "documents"

    def phase(self, step: int) -> int:
        """The index of the phase that holds `step`. Both count from 0. Raises IndexError: the plan has no such step."""
        return self._find(step)[0].phase

    def shape(self, step: int) -> tuple[int, int]:
        """(batch_size, seq_len) of `step`, counted from 0. Raises IndexError: the plan has no such step."""
        shape = self.shape_at(step)
        return shape.batch_size, shape.seq_len

    def tokens(self, step: int) -> int:
        """The tokens that the steps before `step` read."""
        return self._sum(step, lambda shape: shape.tokens)

    def predicted_tokens(self, step: int) -> int:
        """The tokens that the steps before `step` compute: of each row all but one."""
        return self._sum(step, lambda shape: shape.predicted_tokens)

    def _sum(self, step: int, of: Callable[[Shape], int]) -> int:
        """The sum of a number of each step before `step`, by its shape."""
        ends, total = [*(amendment.from_step for amendment in self.amendments[1:]), step], 0
        for amendment, end in zip(self.amendments, ends, strict=True):
            first = 0
            for shape in amendment.shapes:
                stop = first + shape.steps
                total += max(0, min(stop, end, step) - max(first, amendment.from_step)) * of(shape)
                first = stop
        return total

    def rows_read(self, first: int, stop: int) -> dict[str, int]:
        """The rows of each data set that the steps [first, stop) read, both counted from 0.

        Raises IndexError: the plan has no such step.
        """
        rows = dict.fromkeys(self.datasets, 0)
        while first < stop:
            if passes := self._whole_passes(first, stop):
                count, period = passes
                for name, of_one in self.rows_read(first, first + period).items():
                    rows[name] += count * of_one
                first += count * period
                continue
            segment = self.segment(first)
            end, per_step = min(self._end(segment), stop), segment.shape.items_per_step
            low, high = (segment.mixture.counts((step - segment.first_step) * per_step) for step in (first, end))
            for allocation, items in zip(segment.allocations, (high - low).tolist(), strict=True):
                rows[allocation.source.name] += items * segment.shape.rows_per_item
            first = end
        return rows

    def _whole_passes(self, first: int, stop: int) -> tuple[int, int] | None:
        """(count, steps of each) of the passes from `first` that read as many rows of each data set, if they are two
        or more, and end before `stop` and the next amendment."""
        begun = self._find(first)[0]
        if (repeated := begun.repeated) is None:
            return None
        end = min(stop, repeated.first_step + repeated.count * repeated.period, self._amended_after(begun))
        count = (end - first) // repeated.period
        return (count, repeated.period) if count > 1 and (first - repeated.first_step) % repeated.period == 0 else None

    def shape_at(self, step: int) -> Shape:
        """The shape of the phase that holds `step`, counted from 0. Raises IndexError: the plan has no such step."""
        return self._find(step)[0].shape

    def datasets_from(self, step: int) -> set[str]:
        """The names of the data sets that `step` and those after it may read."""
        ends = [*(amendment.from_step for amendment in self.amendments[1:]), ENDLESS]
        spans = zip(self.amendments, ends, strict=True)
        return {name for amendment, end in spans if step < end for name in amendment.sources}

    def copy(self) -> "Plan":
        """A copy of the plan for another thread: one caches the rows that it computed last, and serves one reader."""
        return Plan.from_state(self.state(0))

    # -- state and description

    def state(self, step: int) -> dict[str, Any]:
        """The state in a checkpoint from which the plan continues: a few numbers per phase and shard, of any size."""
        amendments = [amendment.state() for amendment in self.amendments]
        own = {"step": step, "seed": self.seed, "max_passes": self.max_passes}
        return own | {"amendments": amendments, "order": self.order}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Plan":
        """The plan that `state` was taken from."""
        plan = object.__new__(cls)
        plan.order = state["order"]
        amendments = [Amendment.from_state(amendment, plan.order) for amendment in state["amendments"]]
        plan._build(state["seed"], state["max_passes"], amendments)
        return plan

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides what a step reads, except the tokens themselves."""
        return hashlib.sha256(json.dumps(self.state(0)).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """A table of phases, shapes, tokens and passes, and below it the steps at which something changes."""
        table: list[tuple[str, ...]] = [("phase", "steps", "batch x seq_len", "tokens", "passes", "data")]
        readable = sum(source.units.count * source.units.size for source in self.amendments[-1].sources.values())
        first = 0
        for number, shape in enumerate(self.shapes):
            stop = first + shape.steps
            tokens = self.tokens(stop) - self.tokens(first)  # an amended phase may have begun in another shape
            data = ", ".join(_shares(shape, self.rows_read(first, stop)))
            data += f" by {shape.blend}" if len(shape.weights) > 1 else ""
            data += ", documents apart" if shape.packing == "documents" else ""
            size = f"{shape.batch_size:,} x {shape.seq_len:,}"
            row = (f"{first + 1:,} to {stop:,}", size, f"{tokens:,}", f"{tokens / readable:.2f}", data)
            table.append((str(number + 1), *row))
            first = stop
        total = self.tokens(self.total_steps)
        table.append(("all", f"{self.total_steps:,}", "", f"{total:,}", f"{total / readable:.2f}", ""))
        return "\n".join([*aligned(table, left=0), *(f"step {step + 1:,}: {event}" for step, event in _events(self))])


def _shares(shape: Shape, rows: Mapping[str, int]) -> Iterator[str]:
    """The share of each data set of a phase that reads so many rows of them, and the one asked for if it is another:
    a data set that is used up leaves its share to the others."""
    weights, whole = sum(weight for _, weight in shape.weights), max(1, sum(rows.values()))
    for name, weight in shape.weights:
        asked, read = f"{weight / weights:.0%}", f"{rows[name] / whole:.0%}"
        if not rows[name]:
            yield f"{name} nothing ({weight / weights:.2%} asked)"
            continue
        # A short phase has no exact shares: a step or a row more or less is none's.
        is_near = abs(rows[name] - whole * weight / weights) <= len(shape.weights) * shape.rows_per_item
        yield f"{name} {asked}" if is_near or asked == read else f"{name} {read} ({asked} asked)"


def _events(plan: Plan) -> list[tuple[int, str]]:
    """(step, what begins with it) of everything that is no phase's beginning: amendments, new passes, exhaustion."""
    events = [(a.from_step, "amended" + (f", {a.skip} steps left out" if a.skip else "")) for a in plan.amendments[1:]]
    for earlier, amendment in pairwise(plan.amendments):
        longer = [
            f"{name!r} (units of {source.units.size:,} tokens)" for name, source in amendment.sources.items()
            if name in earlier.sources and source.units.size != earlier.sources[name].units.size
        ]  # fmt: skip
        shorter = [
            f"{name!r}" for name, source in amendment.sources.items()
            if name in earlier.sources and len(source.units.ranges) < len(earlier.sources[name].units.ranges)
        ]  # fmt: skip
        if shorter:
            event = f"the next pass over {', '.join(shorter)} begins, because shards were taken away"
            events.append((amendment.from_step, event))
        if longer:
            event = f"the next pass over {', '.join(longer)} begins, because rows are longer than the units until here"
            events.append((amendment.from_step, event))
    for before, segment in pairwise(plan.segments):
        passes = {a.source.name: a.cursor.pass_index for a in segment.allocations}
        known = {name: cursor.pass_index for name, cursor in before.before.items()}
        renewed = [f"{name!r}" for name, index in passes.items() if index > known.get(name, index)]
        renewed = [] if plan.order == APART else renewed  # they begin within phases
        weighted, names = dict(segment.shape.weights), [a.source.name for a in before.allocations]
        left = [f"{name!r}" for name in names if name not in passes and name in weighted]
        if renewed:
            event = f"all tokens of {', '.join(renewed)} are read: the next pass begins, in a new order"
            events.append((segment.first_step, event))
        if left:
            events.append((segment.first_step, f"{', '.join(left)} is used up and leaves the blend"))
    for repeated in dict.fromkeys(segment.repeated for segment in plan.segments if segment.repeated):
        event = f"this pass and the {repeated.count - 1} that follow take {repeated.period:,} steps each"
        events.append((repeated.first_step, event))
    return sorted(events, key=lambda event: event[0])
