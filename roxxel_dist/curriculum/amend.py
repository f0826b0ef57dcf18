"""What a plan says from a step on, and how far each data set was read when that step comes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roxxel_dist.curriculum.segments import OF_UNITS, Position, Shape, Source
from roxxel_dist.data.units import Ranges, Units, unit_size


@dataclass(frozen=True, kw_only=True)
class Amendment:
    """What is read from a step on. The first one, of step 0, is the plan itself."""

    from_step: int
    skip: int
    """Steps of the plan before it whose data is left out, from `from_step` on."""
    shapes: tuple[Shape, ...]
    """All phases, from step 0: those before `from_step` only say how long they were."""
    sources: Mapping[str, Source]

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
            name: Source(name=name, units=Units([(s, n) for s, n in kept["ranges"]], kept["unit"]))
            for name, kept in state["datasets"].items()
        }
        return cls(from_step=state["from_step"], skip=state["skip"], shapes=tuple(shapes), sources=sources)


def _shape_state(shape: Shape) -> dict[str, Any]:
    """Without `packing` where there is none: plans from before there was any keep their fingerprint."""
    state = asdict(shape)
    if shape.packing == "contiguous":
        del state["packing"]
    return state


def first_amendment(phases: Sequence[Shape], datasets: Mapping[str, Ranges]) -> Amendment:
    """The plan as it begins: data sets cut in units for its longest window."""
    longest = max(shape.seq_len for shape in phases)
    sources = {
        name: Source(name=name, units=Units(ranges, unit_size(ranges, longest))) for name, ranges in datasets.items()
    }
    check(phases, sources)
    return Amendment(from_step=0, skip=0, shapes=tuple(phases), sources=sources)


def unit_of(name: str, ranges: Ranges, longest: int, before: Mapping[str, Source]) -> int:
    """A data set keeps the units that it was first cut in."""
    return before[name].units.size if name in before else unit_size(ranges, longest)


def check(shapes: Sequence[Shape], sources: Mapping[str, Source]) -> None:
    """Raises ValueError for weights of unknown data sets, and windows longer than a unit."""
    for number, shape in enumerate(shapes):
        for name, weight in shape.weights:
            if name not in sources:
                raise ValueError(
                    f"phase {number + 1}: weights name {name!r}, and the data sets are {', '.join(sources)}"
                )
            if not weight > 0:
                raise ValueError(f"phase {number + 1}: the weight of {name!r} is {weight}: it must be above 0")
            if shape.seq_len > sources[name].units.size:
                raise ValueError(
                    f"phase {number + 1}: seq_len is {shape.seq_len}, and {name!r} was cut in units of "
                    f"{sources[name].units.size} tokens when the run began: use at most that, or start a new plan"
                )


def beginnings(sources: Mapping[str, Source], seed: int) -> dict[str, Position]:
    """Every data set before its first token is read."""
    return {name: source.beginning(seed, 0) for name, source in sources.items()}


def carried(before: Position | None, earlier: Sequence[Source], source: Source, seed: int, level: int) -> Position:
    """A data set's position, carried over an amendment that may have changed its ranges.

    Args:
        before: the position until now; None for a new data set.
        earlier: the data set as it was, oldest first.
        source: the data set as it is now.
        seed: of all orders.
        level: which amendment this is.
    """
    if before is None or not earlier:
        return source.beginning(seed, 0)
    kept = _units_in_common(source, earlier[-1])
    if kept == earlier[-1].units.count == source.units.count:
        return before
    known = max(_units_in_common(source, old) for old in earlier)
    key = (seed, source.key, before.pass_index, OF_UNITS, level)
    pool = before.pool.amended(before.used, kept, source.units.count, key, known=known)
    return Position(pass_index=before.pass_index, pool=pool, out=before.out and source.units.count <= kept)


def _units_in_common(one: Source, other: Source) -> int:
    """Units of the ranges with which both begin."""
    common = 0
    for mine, its in zip(one.units.ranges, other.units.ranges, strict=False):
        if tuple(mine) != tuple(its):
            break
        common += 1
    return Units(one.units.ranges[:common], one.units.size).count
