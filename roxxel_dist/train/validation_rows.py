"""Which rows the validations of a run read: chosen once, and kept whatever phase is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from roxxel_dist.curriculum.segments import Shape


@dataclass(frozen=True, kw_only=True)
class ValidationRows:
    """What decides the rows of a validation: two runs that agree in it, on the same data, read the same ones."""

    batch_size: int
    seq_len: int
    """The most tokens of a row, the target included; a small set is read in shorter rows."""
    packing: Literal["contiguous", "documents"] = "contiguous"
    eval_iters: int | None = None
    """The most batches of each set; None if not known."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each validation set by its name; empty if not known."""

    @classmethod
    def of_shape(cls, shape: Shape, **known: Any) -> Self:
        """Those of batches of this shape."""
        return cls(batch_size=shape.batch_size, seq_len=shape.seq_len, packing=shape.packing, **known)

    @classmethod
    def of_phases(cls, shapes: Sequence[Shape], **known: Any) -> Self:
        """Those of a new run: its longest rows, in the smallest batch that a phase has of them.

        So a validation costs no more than that many training steps of any phase with long rows, and fits where they
        fit.
        """
        return cls.of_shape(min(shapes, key=lambda shape: (-shape.seq_len, shape.batch_size)), **known)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        return cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "tokens": dict(self.tokens)}

    def __str__(self) -> str:
        """Such as "10 batches of 4 x 17 tokens (data: 3,400 tokens)"."""
        batches = {None: "batches", 1: "1 batch"}.get(self.eval_iters, f"{self.eval_iters or 0:,} batches")
        packed = ", documents apart" if self.packing == "documents" else ""
        whole = f" (data: {sum(self.tokens.values()):,} tokens)" if self.tokens else ""
        return f"{batches} of {self.batch_size:,} x {self.seq_len:,} tokens{packed}{whole}"

    @property
    def shape(self) -> Shape:
        """The shape of a batch."""
        return Shape(steps=0, batch_size=self.batch_size, seq_len=self.seq_len, packing=self.packing)

    def same_rows(self, other: Self) -> bool:
        """Whether both read the same rows, as far as is known of both."""
        pairs = ((value, vars(other)[name]) for name, value in vars(self).items())
        return all(one == two for one, two in pairs if one not in (None, {}) and two not in (None, {}))


def validation_note(saved: Mapping[str, Any], shapes: Sequence[Shape]) -> str:
    """Which rows the validations of a run with several shapes read, in a line; empty where that needs no word."""
    if not saved or len({(shape.batch_size, shape.seq_len, shape.packing) for shape in shapes}) == 1:
        return ""
    return f"validation: {ValidationRows.from_dict(saved)}, the same rows in every phase"
