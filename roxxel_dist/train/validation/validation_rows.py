"""Which rows the validations of a run read: chosen when it begins, and kept in every phase and every branch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from roxxel_dist.curriculum.segments import Shape

Packing = Literal["contiguous", "documents"]


@dataclass(frozen=True, kw_only=True)
class ValidationBatch:
    """The shape of the batches that a validation reads."""

    batch_size: int
    seq_len: int
    """The most tokens of a row, the target included; a small set is read in shorter rows."""
    packing: Packing = "contiguous"

    @classmethod
    def of_shape(cls, shape: Shape) -> Self:
        """Batches of the shape of a phase."""
        return cls(batch_size=shape.batch_size, seq_len=shape.seq_len, packing=shape.packing)

    @property
    def shape(self) -> Shape:
        """The shape as a stream takes it."""
        return Shape(steps=0, batch_size=self.batch_size, seq_len=self.seq_len, packing=self.packing)

    def __str__(self) -> str:
        """Such as "4 x 17 tokens"."""
        packed = ", documents apart" if self.packing == "documents" else ""
        return f"{self.batch_size:,} x {self.seq_len:,} tokens{packed}"


@dataclass(frozen=True, kw_only=True)
class ValidationRows:
    """What decides the rows of the validations of a run, beside the data.

    Phases whose rows are alike, but for their number in a batch, are validated on the same rows: those of the smallest
    of their batches, so that a validation costs no more in the first steps of a ramp. Rows of another length are other
    rows: a model is validated at the length that it is trained at.
    """

    batches: tuple[ValidationBatch, ...]
    """One for each seq_len and packing of a phase."""
    eval_iters: int
    """The most batches of each set."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each validation set by its name."""

    @classmethod
    def of_phases(cls, shapes: Sequence[Shape], eval_iters: int, tokens: Mapping[str, int]) -> Self:
        """The rows of a new run."""
        return cls(batches=(), eval_iters=eval_iters, tokens=tokens).with_phases(shapes)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """The rows that `to_dict` wrote."""
        return cls(**{**saved, "batches": tuple(ValidationBatch(**batch) for batch in saved["batches"])})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "batches": [asdict(batch) for batch in self.batches]}

    def with_phases(self, shapes: Sequence[Shape], fits: Callable[[Shape], bool] = lambda shape: True) -> Self:
        """The same rows as far as they fit, and rows for phases that have none."""
        batches = [batch for batch in self.batches if fits(batch.shape)]
        known = {(batch.seq_len, batch.packing) for batch in batches}
        for shape in sorted(shapes, key=lambda shape: shape.batch_size):
            if (shape.seq_len, shape.packing) not in known:
                known.add((shape.seq_len, shape.packing))
                batches.append(ValidationBatch.of_shape(shape))
        return replace(self, batches=tuple(batches))

    def batch_of(self, shape: Shape) -> ValidationBatch:
        """The batch on which a phase of this shape is validated: that of the phase where no other is known."""
        alike = (batch for batch in self.batches if (batch.seq_len, batch.packing) == (shape.seq_len, shape.packing))
        return next(alike, ValidationBatch.of_shape(shape))

    def text(self, shape: Shape) -> str:
        """The rows of a validation in a phase of this shape: "10 batches of 4 x 17 tokens, of held out (3,400)"."""
        count = "1 batch" if self.eval_iters == 1 else f"{self.eval_iters:,} batches"
        sets = (f"{name or 'held out'} ({size:,})" for name, size in self.tokens.items())
        return f"{count} of {self.batch_of(shape)}, of {', '.join(sets)}"

    def by_phase(self, shapes: Sequence[Shape]) -> str:
        """The batches of each phase, such as "4 x 17 tokens (phases 1, 2), 8 x 33 tokens (phase 3)"."""
        phases: dict[ValidationBatch, list[str]] = {}
        for number, shape in enumerate(shapes, 1):
            phases.setdefault(self.batch_of(shape), []).append(str(number))
        if len(phases) == 1:
            return f"{next(iter(phases))} in every phase, the same rows"
        named = (f"{batch} (phase{'s' * (len(of) > 1)} {', '.join(of)})" for batch, of in phases.items())
        return f"{', '.join(named)}; val_loss of other lengths is of other rows"


def validation_note(saved: Mapping[str, Any], shapes: Sequence[Shape]) -> str:
    """Which rows the validations of a run with several shapes read, in a line; empty where that needs no word."""
    if not saved or len({(shape.batch_size, shape.seq_len, shape.packing) for shape in shapes}) == 1:
        return ""
    rows = ValidationRows.from_dict(saved)
    return f"validation: at most {rows.eval_iters:,} batches of {rows.by_phase(shapes)}"
