"""What a person writes down: phases, and the curriculum they make with a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel


@dataclass(frozen=True)
class Phase:
    """A stretch of training in which batches have one shape.

    Either `steps` or `epochs` says how long it lasts.
    """

    steps: int | None = None
    """Optimizer steps."""
    batch_size: int | None = None
    """Rows of the global batch, over all processes and accumulation steps."""
    seq_len: int | None = None
    """Tokens read for a row, the last target included: a model sees `seq_len - 1` positions."""
    epochs: float | None = None
    """Passes over the primary data set, fractions allowed, instead of `steps`."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"{self._named()}: give steps or epochs, one of the two")
        if self.batch_size is None or self.seq_len is None:
            raise ValueError(f"{self._named()}: batch_size and seq_len must be given")
        for name, least in (("steps", 1), ("batch_size", 1), ("seq_len", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(
                    f"{self._named()}: {name} is {value!r}, and must be a whole number of at least {least}"
                )
        if self.epochs is not None and not (isinstance(self.epochs, int | float) and 0 < self.epochs < 1e9):
            raise ValueError(f"{self._named()}: epochs is {self.epochs!r}, and must be a number above 0")

    def _named(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return "Phase(" + ", ".join(f"{name}={value!r}" for name, value in given.items()) + ")"

    @classmethod
    def of(cls, phase: "Phase | Mapping[str, Any]") -> "Phase":
        """A phase from a mapping as it stands in YAML, or the phase itself.

        Raises:
            ValueError: a key that a phase does not have.
        """
        if isinstance(phase, Phase):
            return phase
        if not isinstance(phase, Mapping):
            raise ValueError(
                f"phases: {phase!r} is not a phase: write a mapping such as {{steps: 100, batch_size: 8, seq_len: 129}}"
            )
        names = [f.name for f in fields(cls)]
        if unknown := [key for key in phase if key not in names]:
            raise ValueError(f"phases: {unknown[0]!r} is not a field of a phase: they are {', '.join(names)}")
        return cls(**phase)


class Curriculum:
    """Phases, one after another, over a data set.

    Args:
        primary_streamer: the data set.
        phases: `Phase`s or mappings with their fields.

    Raises:
        ValueError: no phase, a field that breaks its rule, or `epochs` that come to less than a step.
    """

    def __init__(self, primary_streamer: Roxxel, phases: Sequence[Phase | Mapping[str, Any]]) -> None:
        if not phases:
            raise ValueError("phases: a curriculum needs at least one phase")
        self.primary_streamer = primary_streamer
        self.phases = tuple(self._with_steps(Phase.of(phase)) for phase in phases)

    def _with_steps(self, phase: Phase) -> Phase:
        if phase.epochs is None:
            return phase
        assert phase.batch_size is not None
        assert phase.seq_len is not None
        pass_steps = self.primary_streamer.estimate_steps(seq_len=phase.seq_len, batch_size=phase.batch_size)
        steps = int(pass_steps * phase.epochs)
        if steps < 1:
            raise ValueError(
                f"{phase._named()}: one pass over the data has {pass_steps} step(s) of {phase.batch_size} rows of "
                f"{phase.seq_len} tokens, less than is asked for: use a smaller batch_size or seq_len, or more epochs"
            )
        return replace(phase, steps=steps, epochs=None)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps or 0 for phase in self.phases)

    def plan(self, seed: int) -> Plan:
        """What every step reads, for this seed.

        Raises:
            ValueError: the data set is too small for a phase's batch.
        """
        shapes = [(p.steps or 0, p.batch_size or 0, p.seq_len or 0) for p in self.phases]
        return Plan(shapes, {"self": self.primary_streamer.ranges}, seed)
