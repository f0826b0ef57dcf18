"""Amendments: the plan from a step on, and how far each data set was read at that step. Decision 2."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from roxxel_dist.curriculum.segments import Cursor, Key, Shape, UnitSource
from roxxel_dist.data.units import APART, Ranges, Units, unit_size
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument


@dataclass(frozen=True, kw_only=True)
class Amendment:
    """An amendment: what is read from a step on. The first one, of step 0, is the plan itself."""

    from_step: int
    skip: int
    """Steps of the plan before it whose data is left out, from `from_step` on."""
    shapes: tuple[Shape, ...]
    """All phases, from step 0: those before `from_step` only say how long they were."""
    sources: Mapping[str, UnitSource]
    is_fork: bool = False
    """Whether ranges may have been taken away: the next pass over their data sets begins."""

    def state(self) -> dict[str, Any]:
        """Plain numbers and names, for JSON."""
        return {
            "from_step": self.from_step,
            "skip": self.skip,
            "shapes": [asdict(shape) for shape in self.shapes],
            "datasets": {
                name: {"unit": source.units.size, "ranges": [[int(s), int(n)] for s, n in source.units.ranges]}
                for name, source in self.sources.items()
            },
            "is_fork": self.is_fork,
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
        return cls(
            from_step=state["from_step"],
            skip=state["skip"],
            shapes=tuple(shapes),
            sources=sources,
            is_fork=state["is_fork"],
        )


def longest_window(shapes: Sequence[Shape], name: str, order: int) -> int:
    """The longest `seq_len` of the phases that read a data set; of all phases, if none does, or no share may matter."""
    if order == APART:
        return max(shape.seq_len for shape in shapes)
    reading = [shape.seq_len for shape in shapes if name in dict(shape.weights)]
    return max(reading or [shape.seq_len for shape in shapes])


def make_sources(
    datasets: Mapping[str, Ranges], shapes: Sequence[Shape], before: Mapping[str, UnitSource], order: int
) -> dict[str, UnitSource]:
    """Data sets cut in units for their longest window. One that was there before keeps its units, so that its pass goes
    on, unless a window is longer than a unit: then it is cut anew, and `carry_cursor` begins its next pass."""
    sources = {}
    for name, ranges in datasets.items():
        size = before[name].units.size if name in before else 0
        if max((shape.seq_len for shape in shapes if name in dict(shape.weights)), default=1) > size:
            size = unit_size(ranges, longest_window(shapes, name, order))
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
            units = sources[name].units
            rows = units.count * (units.size // shape.seq_len)
            if rows < shape.batch_size:
                raise UserError(
                    f"phase {number + 1}: a batch of {shape.batch_size} rows of {shape.seq_len} tokens does not fit in "
                    f"the data {name!r}, which holds {rows} such rows: use a smaller batch_size or seq_len, or more "
                    f"text"
                )


def check_added(before: Mapping[str, UnitSource], datasets: Mapping[str, Ranges]) -> None:
    """Raises UserError unless each data set that was there begins with the ranges that it had."""
    for name, ranges in datasets.items():
        if name in before and (shard := _first_change(before[name], ranges)) is not None:
            raise UserError(
                f"the data {name!r} differs from what the run read, from shard {shard} on: an amendment adds shards "
                f"after the existing ones, with the same val_fraction. Put them back, or begin a run that reads "
                f"other data from a checkpoint on: {argument('fork', 'RUN@STEP')}"
            )


def _first_change(before: UnitSource, ranges: Ranges) -> int | None:
    """The first of the ranges of a data set that is no longer there as it was; None if all are."""
    pairs = zip_longest(before.units.ranges, ranges[: len(before.units.ranges)])
    return next((number for number, (old, new) in enumerate(pairs) if new is None or tuple(old) != tuple(new)), None)


def carry_cursor(before: Cursor | None, earlier: UnitSource | None, source: UnitSource, key: Key) -> Cursor:
    """A data set's cursor after an amendment; `before` and `earlier` are its cursor and the data set as they were.

    Added units are read in this pass. The next pass begins where units became longer, for of the spread units that are
    not read yet hardly two are neighbours, so that they hold no longer window; and, in a fork, where ranges were taken
    away, for its places are of units that are no longer there.
    """
    if before is None or earlier is None:
        return source.new_pass(key, 0)
    if source.units.size != earlier.units.size or _first_change(earlier, source.units.ranges) is not None:
        return source.new_pass(key, before.pass_index + 1)
    before, units = before.without_windows(earlier), (earlier.units.count, source.units.count)
    if units[0] == units[1]:
        return before
    rest = key.rest_of_pass(source.number, before.pass_index)
    return Cursor(pass_index=before.pass_index, remaining=before.remaining.amend(before.used, units, rest))
