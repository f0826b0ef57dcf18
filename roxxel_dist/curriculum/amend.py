"""Amendments: the plan from a step on, and how far each data set was read at that step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.curriculum.segments import Cursor, Key, Shape, UnitSource
from roxxel_dist.data.units import Ranges, Units, unit_size


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
    def from_state(cls, state: Mapping[str, Any]) -> "Amendment":
        """The amendment that `state` was taken from."""
        shapes = [
            Shape(**{**shape, "weights": tuple((name, weight) for name, weight in shape["weights"])})
            for shape in state["shapes"]
        ]
        sources = {
            name: UnitSource(name=name, units=Units([(s, n) for s, n in kept["ranges"]], kept["unit"]))
            for name, kept in state["datasets"].items()
        }
        return cls(from_step=state["from_step"], skip=state["skip"], shapes=tuple(shapes), sources=sources)


def _shape_state(shape: Shape) -> dict[str, Any]:
    """Without `packing` where there is none: plans from before there was any keep their fingerprint."""
    state = asdict(shape)
    if shape.packing == "contiguous":
        del state["packing"]
    return state


def cut_in_units(
    datasets: Mapping[str, Ranges], shapes: Sequence[Shape], before: Mapping[str, UnitSource]
) -> dict[str, UnitSource]:
    """Data sets cut in units for the longest window; one that was there before keeps its units."""
    longest = max(shape.seq_len for shape in shapes)
    sizes = {name: before[name].units.size if name in before else None for name in datasets}
    return {
        name: UnitSource(name=name, units=Units(ranges, sizes[name] or unit_size(ranges, longest)))
        for name, ranges in datasets.items()
    }


def check(shapes: Sequence[Shape], sources: Mapping[str, UnitSource]) -> None:
    """Raises ValueError for weights of unknown data sets, and windows longer than a unit."""
    for number, shape in enumerate(shapes):
        for name, weight in shape.weights:
            if name not in sources:
                raise UserError(
                    f"phase {number + 1}: weights name {name!r}, and the data sets are {', '.join(sources)}"
                )
            if not weight > 0:
                raise UserError(f"phase {number + 1}: the weight of {name!r} is {weight}: it must be above 0")
            if shape.seq_len > sources[name].units.size:
                raise UserError(
                    f"phase {number + 1}: seq_len is {shape.seq_len}, and {name!r} was cut in units of "
                    f"{sources[name].units.size} tokens when the run began: use at most that, or start a new plan"
                )


def carried_over(before: Cursor | None, earlier: Sequence[UnitSource], source: UnitSource, key: Key) -> Cursor:
    """A data set's cursor (None: a new one) after an amendment; `earlier` is the data set as it was, oldest first."""
    if before is None or not earlier:
        return source.new_pass(key, 0)
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
