"""Amendments: the plan from a step on, and how far each data set was read at that step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.curriculum.segments import Cursor, Key, Shape, UnitSource
from roxxel_dist.data.units import LARGE_UNITS, SPREAD, Ranges, Units, unit_size


@dataclass(frozen=True, kw_only=True)
class Amendment:
    """What is read from a step on. The first one, of step 0, is the plan itself."""

    from_step: int
    skip: int
    """Steps of the plan before it whose data is left out, from `from_step` on."""
    shapes: tuple[Shape, ...]
    """All phases, from step 0: those before `from_step` only say how long they were."""
    sources: Mapping[str, UnitSource]

    def state(self) -> dict[str, Any]:
        """Plain numbers and names, for JSON."""
        return {
            "from_step": self.from_step,
            "skip": self.skip,
            "shapes": [_shape_state(shape) for shape in self.shapes],
            "datasets": {
                name: {"unit": source.units.size, "ranges": [[int(s), int(n)] for s, n in source.units.ranges]}
                for name, source in self.sources.items()
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], order: int) -> "Amendment":
        """The amendment, of a plan in this order, that `state` was taken from."""
        shapes = [
            Shape(**{**shape, "weights": tuple((name, weight) for name, weight in shape["weights"])})
            for shape in state["shapes"]
        ]
        sources = {
            name: UnitSource(name=name, units=Units([(s, n) for s, n in kept["ranges"]], kept["unit"]), order=order)
            for name, kept in state["datasets"].items()
        }
        return cls(from_step=state["from_step"], skip=state["skip"], shapes=tuple(shapes), sources=sources)


def _shape_state(shape: Shape) -> dict[str, Any]:
    """Without `packing` where there is none: plans from before there was any keep their fingerprint."""
    state = asdict(shape)
    if shape.packing == "contiguous":
        del state["packing"]
    return state


def longest_window(shapes: Sequence[Shape], name: str, order: int = SPREAD) -> int:
    """The longest `seq_len` of the phases that read a data set; of all phases, if none does."""
    if order == LARGE_UNITS:
        return max(shape.seq_len for shape in shapes)
    reading = [shape.seq_len for shape in shapes if name in dict(shape.weights)]
    return max(reading or [shape.seq_len for shape in shapes])


def cut_in_units(
    datasets: Mapping[str, Ranges], shapes: Sequence[Shape], before: Mapping[str, UnitSource], order: int
) -> dict[str, UnitSource]:
    """Data sets cut in units for their longest window.

    One that was there before keeps its units, so that its pass goes on, unless a window is longer than a unit: then it
    is cut anew, and `carried_over` begins its next pass.
    """
    sources = {}
    for name, ranges in datasets.items():
        size = before[name].units.size if name in before else 0
        if max((shape.seq_len for shape in shapes if name in dict(shape.weights)), default=1) > size:
            size = unit_size(ranges, longest_window(shapes, name, order), order)
        kept = before.get(name)
        is_same = kept is not None and (kept.units.size, kept.units.ranges) == (size, ranges)
        sources[name] = kept if kept and is_same else UnitSource(name=name, units=Units(ranges, size), order=order)
    return sources


def check(shapes: Sequence[Shape], sources: Mapping[str, UnitSource]) -> None:
    """Raises UserError for a phase that reads an unknown data set, or one that gives it less than one batch."""
    for number, shape in enumerate(shapes):
        for name, weight in shape.weights:
            if name not in sources:
                raise UserError(
                    f"phase {number + 1}: weights name {name!r}, and the data sets are {', '.join(sources)}"
                )
            if not weight > 0:
                raise UserError(f"phase {number + 1}: the weight of {name!r} is {weight}: it must be above 0")
            units = sources[name].units
            longest = max((length for _, length in units.ranges), default=0)
            if shape.seq_len > longest:
                raise UserError(
                    f"phase {number + 1}: seq_len is {shape.seq_len}, and the data {name!r} does not hold one such "
                    f"row: the training part of its longest shard has {longest} tokens. Use a smaller seq_len, give "
                    f"{name!r} the weight 0, or join its files with `roxxel-dist data build`"
                )
    for number, shape in enumerate(shapes):
        for name, _ in shape.weights:
            check_batch(number, shape, sources[name])


def check_batch(phase: int, shape: Shape, source: UnitSource) -> None:
    """Raises UserError if a whole pass over a data set gives less than one batch of a phase (counted from 0)."""
    rows = source.units.count * (source.units.size // shape.seq_len)
    if rows < shape.batch_size:
        raise UserError(
            f"phase {phase + 1}: a batch of {shape.batch_size} rows of {shape.seq_len} tokens does not fit in "
            f"the data {source.name!r}, which holds {rows} such rows: use a smaller batch_size or seq_len, or more text"
        )


def carried_over(before: Cursor | None, earlier: Sequence[UnitSource], source: UnitSource, key: Key) -> Cursor:
    """A data set's cursor (None: a new one) after an amendment; `earlier` is the data set as it was, oldest first.

    Where it was cut in longer units its next pass begins: of the spread units that are not read yet hardly two are
    neighbours, so that they hold no longer window.
    """
    if before is None or not earlier:
        return source.new_pass(key, 0)
    if source.units.size != earlier[-1].units.size:
        return source.new_pass(key, before.pass_index + 1)
    alike = takewhile(lambda old: old.units.size == source.units.size, reversed(earlier))
    earlier = list(alike)[::-1]
    kept = _units_in_common(source, earlier[-1])
    if kept == earlier[-1].units.count == source.units.count:
        return before
    known = max(_units_in_common(source, old) for old in earlier)
    rest = key.rest_of_pass(source.number, before.pass_index)
    remaining = before.remaining.amended(before.used, kept, source.units.count, rest, known=known)
    return Cursor(
        pass_index=before.pass_index, remaining=remaining, exhausted=before.exhausted and source.units.count <= kept
    )


def _units_in_common(source: UnitSource, other: UnitSource) -> int:
    """Units of the ranges with which both begin."""
    pairs = zip(source.units.ranges, other.units.ranges, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: tuple(pair[0]) == tuple(pair[1]), pairs))
    return Units(source.units.ranges[:common], source.units.size).count
