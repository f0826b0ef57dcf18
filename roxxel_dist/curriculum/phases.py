"""The phases that a person writes down, and the curriculum they make with a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Any, Literal

from roxxel_dist.curriculum.amend import longest_window
from roxxel_dist.curriculum.plan import ENDLESS, Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.units import APART, SPREAD, Ranges, rows_in_a_pass
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import MOST_WHOLE, number_of

Passes = Literal["together", "apart"]
ORDERS: Mapping[str, int] = {"together": SPREAD, "apart": APART}
"""The order of a plan by `Curriculum.passes`."""
HEAVIEST = 1e12
LEAST_SHARE = 1e-4
"""Of a data set in a blend: rarer ones would make the blocks in which shares are exact too long."""


class PhaseError(UserError):
    """A field of a phase breaks its rule."""

    def __init__(self, phase: "Phase", problem: str) -> None:
        super().__init__(f"{phase!r}: {problem}")
        self.problem: str = problem


@dataclass(frozen=True)
class Phase:
    """A stretch of training in which batches have one shape.

    `steps` or `epochs` says how long it lasts. `Curriculum.phases` has the same phases with the steps that epochs come
    to. Raises ValueError: a field breaks its rule; the message names the phase and the field.
    """

    steps: int | None = None
    """Optimizer steps."""
    batch_size: int | None = None
    """Rows of the global batch, over all processes and accumulation steps."""
    seq_len: int | None = None
    """Tokens read for a row, the last target included: a model sees `seq_len - 1` positions."""
    epochs: float | None = None
    """Passes over the primary data set ("self"), fractions allowed, instead of `steps`: the phase ends when its rows of
    "self" come to so many passes, whatever it reads besides."""
    weights: Mapping[str, float] | None = None
    """Share of each data set, "self" being the primary one; they are normalised. None: all of it is "self"."""
    blend: Literal["step", "row"] = "step"
    """Whether each step, or each row of a batch, is of one data set."""
    packing: Literal["contiguous", "documents"] = "contiguous"
    """"documents": batches say which document each token is of (`data.packing.Packed`), and attention stops where a
    document ends. The rows are the same tokens either way."""

    def __post_init__(self) -> None:
        if isinstance(self.epochs, Mapping):
            raise PhaseError(self, f"epochs is a mapping: the shares of data sets are weights={dict(self.epochs)}")
        if self.steps is None and self.epochs is None:
            raise PhaseError(self, "give steps or epochs")
        if self.steps is not None and self.epochs is not None:
            raise PhaseError(
                self,
                f"steps is {self.steps!r} and epochs is {self.epochs!r}: both are the length of the "
                f"phase, so give one of them",
            )
        if self.batch_size is None or self.seq_len is None:
            raise PhaseError(self, "batch_size and seq_len must be given")
        for name, least in (("steps", 1), ("batch_size", 1), ("seq_len", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise PhaseError(self, f"{name} is {value!r}, and must be a whole number of at least {least}")
            if value is not None and value > MOST_WHOLE and value != ENDLESS:
                raise PhaseError(self, f"{name} is {value!r}, and must be at most {MOST_WHOLE:,}")
        is_number = isinstance(self.epochs, int | float) and not isinstance(self.epochs, bool)
        if self.epochs is not None and not (is_number and 0 < self.epochs < 1e9):
            raise PhaseError(self, f"epochs is {self.epochs!r}, and must be a number above 0 and below 1e9")
        for name, (first, second) in {"blend": ("step", "row"), "packing": ("contiguous", "documents")}.items():
            if getattr(self, name) not in (first, second):
                raise PhaseError(self, f"{name} is {getattr(self, name)!r}, and must be {first!r} or {second!r}")
        if self.weights is not None:
            self._check_weights(self.weights)
            if self.epochs is not None and not self.weights.get("self"):
                raise PhaseError(
                    self,
                    f"epochs is {self.epochs!r}, which counts passes over self, and the weight of self is 0: "
                    f"give steps instead of epochs",
                )

    def _check_weights(self, weights: object) -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise PhaseError(self, "weights must be a mapping such as {self: 0.9, code: 0.1}")
        for name, weight in weights.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 <= weight < HEAVIEST:
                raise PhaseError(
                    self,
                    f"the weight of {name!r} is {weight!r}: it must be a number of at least 0 and below {HEAVIEST:g}",
                )
        total = float(sum(weights.values()))
        if total <= 0:
            raise PhaseError(self, "all weights are 0: at least one must be above")
        weight, name = min((weight, name) for name, weight in weights.items() if weight > 0)
        if weight / total < LEAST_SHARE:
            least = LEAST_SHARE * (total - weight) / (1 - LEAST_SHARE)
            raise PhaseError(
                self,
                f"the weight of {name!r} is {weight:g}, which is {weight / total:.6g} of the sum of all "
                f"weights ({total:.6g}): this share must be 0, or at least {LEAST_SHARE:g}: use a weight of at least "
                f"{1.001 * least:.4g}, or 0",
            )

    @property
    def shape(self) -> Shape:
        """The phase as the plan sees it; its steps must be known."""
        shares = tuple((name, float(weight)) for name, weight in (self.weights or {"self": 1.0}).items() if weight > 0)
        return Shape(
            steps=self.steps or 0, batch_size=self.batch_size or 0, seq_len=self.seq_len or 0, weights=shares,
            blend=self.blend, packing=self.packing,
        )  # fmt: skip

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "Phase(" + ", ".join(f"{name}={value!r}" for name, value in given.items()) + ")"

    @classmethod
    def of_value(cls, phase: "Phase | Mapping[str, Any]") -> "Phase":
        """A phase from a mapping as it stands in YAML, or the phase itself.

        Raises ValueError: a key that a phase does not have, or what making a `Phase` raises.
        """
        if isinstance(phase, Phase):
            return phase
        if not isinstance(phase, Mapping):
            raise UserError(
                f"phases: {phase!r} is not a phase: write a mapping such as {{steps: 100, batch_size: 8, seq_len: 129}}"
            )
        names = [f.name for f in fields(cls)]
        if unknown := [key for key in phase if key not in names]:
            near = get_close_matches(str(unknown[0]), names, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(names)}"
            raise UserError(f"phases: {unknown[0]!r} is not a field of a phase: {cure}")
        return cls(**numbers_in(phase))


def numbers_in(phase: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a phase as it stands in YAML, whose numbers may be text such as 1e3."""
    read = {key: _as_number(value) for key, value in phase.items()}
    if isinstance(weights := read.get("weights"), Mapping):
        read["weights"] = {name: _as_number(weight) for name, weight in weights.items()}
    return read


def _as_number(value: Any) -> Any:
    """1e-3 is text in YAML, which asks for a point in a number with an exponent; other values as they are."""
    number = number_of(value) if isinstance(value, str) else None
    return value if number is None else number


def phases_of(given: Phase | Mapping[str, Any]) -> list[Phase]:
    """The phase of a mapping as it stands in YAML, or those of a ramp, whose `batch_size` is a list of sizes that rise.

    A ramp has a phase for each size, and all read the same number of rows, up to rounding: each has an equal share of
    the `epochs`, or of the `steps` a share in proportion to 1 / size. Raises ValueError: what `Phase.of_value` raises,
    or the sizes do not rise, or one of them gets no step.
    """
    sizes = given.get("batch_size") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(sizes, list | tuple):
        return [Phase.of_value(given)]
    whole = [Phase.of_value({**given, "batch_size": size}) for size in sizes]
    if len(whole) < 2 or any(one >= other for one, other in pairwise(phase.batch_size or 0 for phase in whole)):
        raise UserError(
            f"phases: batch_size is {list(sizes)}: the sizes of a ramp are two or more, and each is larger than the "
            f"one before, as in [16, 32, 64]; for one size write the number alone"
        )
    steps, epochs = whole[0].steps, whole[0].epochs
    if steps is None:
        assert epochs is not None
        return [replace(phase, epochs=epochs / len(whole)) for phase in whole]
    shares = [Fraction(1, phase.batch_size or 1) for phase in whole]
    ends = [0, *(int(steps * share / sum(shares) + Fraction(1, 2)) for share in accumulate(shares))]
    counts = [end - begin for begin, end in pairwise(ends)]
    if 0 in counts:
        raise UserError(
            f"phases: steps is {steps}, and batch_size {list(sizes)} is a ramp whose sizes share them: use more steps, "
            f"or fewer sizes"
        )
    return [replace(phase, steps=count) for phase, count in zip(whole, counts, strict=True)]


def all_phases(given: Sequence[Phase | Mapping[str, Any]]) -> list[Phase]:
    """The phases of a curriculum, each as `phases_of` gives it; its ValueError gets the number of the phase."""
    phases: list[Phase] = []
    for number, one in enumerate(given, 1):
        try:
            phases += phases_of(one)
        except UserError as error:
            problem = str(error).removeprefix("phases: ")
            if isinstance(error, PhaseError) and isinstance(one, Mapping):
                problem = error.problem
            which = f" of {len(given)}" if len(given) > 1 else ""
            raise UserError(f"phase {number}{which}: {problem}") from error
    return phases


class Curriculum:
    """Phases, one after another, over a data set.

    Args:
        primary_streamer: the data set.
        phases: `Phase`s, or mappings with their fields; one whose `batch_size` is a list is a ramp (`phases_of`).
        mix_streamers: other data sets by the names that weights use.
        passes: "together": a data set that is used up leaves the blend until all are. "apart": it begins its next pass
            at once and keeps its share, and it is read in an order that no share and no end of a phase changes.

    Raises:
        ValueError: `passes` is neither, no phase, a field that breaks its rule, a weight of a data set that is not
            there, data sets of different vocabularies, or `epochs` that come to less than a step.
    """

    def __init__(
        self,
        primary_streamer: Roxxel,
        phases: Sequence[Phase | Mapping[str, Any]],
        mix_streamers: Mapping[str, Roxxel] | None = None,
        *,
        passes: Passes = "together",
    ) -> None:
        if passes not in ORDERS:
            raise UserError(f"passes is {passes!r}, and must be {' or '.join(map(repr, ORDERS))}")
        if not phases:
            raise UserError("phases: a curriculum needs at least one phase")
        for name, streamer in {"primary_streamer": primary_streamer, **(mix_streamers or {})}.items():
            if not isinstance(streamer, Roxxel):
                raise TypeError(f"{name} is {streamer!r}: it must be a data set, such as Roxxel(PATH)")
        self.primary_streamer = primary_streamer
        self.mix_streamers: dict[str, Roxxel] = dict(mix_streamers or {})
        if "self" in self.mix_streamers:
            raise UserError('mix_streamers: "self" is the primary data set: give this one another name')
        primary = primary_streamer.tokenizer_fingerprint
        for name, streamer in self.mix_streamers.items():
            other = streamer.tokenizer_fingerprint
            if None not in (primary, other) and primary != other:  # ids of two tokenizers would be noise
                raise UserError(
                    f"mix_streamers: {name!r} was made with tokenizer {other}, the primary data set with {primary}: "
                    f"build both with the same tokenizer.json"
                )
        self.passes: Passes = passes
        self._order: int = ORDERS[passes]
        self._given = all_phases(phases)
        counted: list[Phase] = []
        for phase in self._given:
            counted.append(phase if phase.epochs is None else self._counted(phase, counted))
        self.phases: tuple[Phase, ...] = tuple(counted)
        """With their steps; those that were given with epochs are new objects."""

    def __repr__(self) -> str:
        """The phases, and the data sets by name."""
        others = f", others={list(self.mix_streamers)}" if self.mix_streamers else ""
        return f"Curriculum({list(self.phases)}, steps={self.total_steps}{others})"

    def _counted(self, phase: Phase, before: Sequence[Phase]) -> Phase:
        """A phase that begins after others, with steps instead of epochs."""
        assert phase.epochs is not None
        shape = phase.shape
        # In the units that the whole curriculum uses, or phases that add up to a pass would read more than one.
        longest = longest_window([each.shape for each in self._given], "self", self._order)
        rows = rows_in_a_pass(self.primary_streamer.ranges, shape.seq_len, longest)
        pass_steps = rows // shape.batch_size
        steps = floor(pass_steps * phase.epochs + 1e-9)  # 0.29 of 100 is 28.999999999999996
        if steps < 1:
            raise UserError(
                f"{phase!r}: one pass over the text to train on has {pass_steps} step(s) of {shape.batch_size} "
                f"rows of {shape.seq_len} tokens. These epochs are less than one step: use a smaller batch_size or "
                f"seq_len, or more text"
            )
        if len(shape.weights) > 1:
            if self._order == APART:
                wanted = floor(rows * phase.epochs + 1e-9)
                return replace(phase, steps=self._steps_until(wanted, phase, before), epochs=None)
            # A pass of a blend by row leaves less than a batch of rows unread.
            lost = int(phase.epochs) * (rows % shape.batch_size + shape.batch_size - 1) if phase.blend == "row" else 0
            steps = self._steps_until(max(1, steps * shape.batch_size - lost), phase, before)
        return replace(phase, steps=steps, epochs=None)

    def _steps_until(self, rows: int, phase: Phase, before: Sequence[Phase]) -> int:
        """The fewest steps of a phase, after others, that read so many rows of the primary data set."""
        first, low, high = sum(each.steps or 0 for each in before), 0, 1
        while self._rows_of_self(phase, before, first, high) < rows:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rows_of_self(phase, before, first, middle) >= rows else (middle, high)
        return high

    def _rows_of_self(self, phase: Phase, before: Sequence[Phase], first: int, steps: int) -> int:
        """Rows of the primary data set in the first steps of a phase; `first` steps are before it."""
        rest = [replace(each, steps=1, epochs=None).shape for each in self._given[len(before) + 1 :]]
        shapes = [*(each.shape for each in before), replace(phase, steps=steps, epochs=None).shape, *rest]
        plan = Plan(shapes, self._ranges, 0, order=self._order)
        return plan.rows_read(first, first + steps)["self"]

    def hold_out(self, fraction: float) -> "tuple[Curriculum, Roxxel]":
        """The curriculum without the last part of every shard of the primary data set.

        Args:
            fraction: the share that is held out, at least 0 and less than 1.

        Returns:
            The curriculum that is left, in which `epochs` are counted again, and the part that is held out.

        Raises:
            ValueError: the share is no such number, or what is left is too little for a phase.
        """
        train, held_out = self.primary_streamer.split(fraction)
        return Curriculum(train, self._given, self.mix_streamers, passes=self.passes), held_out

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps or 0 for phase in self.phases)

    @property
    def datasets(self) -> dict[str, Roxxel]:
        """The data sets by name, "self" first."""
        return {"self": self.primary_streamer, **self.mix_streamers}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The phases as the plan sees them."""
        return tuple(phase.shape for phase in self.phases)

    def plan(self, seed: int, max_passes: int | None = None) -> Plan:
        """The plan of what every step reads, for this seed.

        Args:
            seed: of all orders.
            max_passes: the most passes over a data set; None for as many as the steps take.

        Returns:
            The plan. It reads nothing: it holds a few numbers for each stretch in which nothing changes.

        Raises:
            ValueError: a data set is too small for a phase's batch, a weight names none, or the passes are not enough.
        """
        return Plan(self.shapes, self._ranges, seed, max_passes=max_passes, order=self._order)

    @property
    def _ranges(self) -> dict[str, Ranges]:
        return {name: streamer.ranges for name, streamer in self.datasets.items()}
