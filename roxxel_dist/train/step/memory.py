"""The memory that a compiled step takes on a device."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device, from XLA's memory analysis of the compiled step."""

    arguments: int
    """State, settings and batch."""
    temporaries: int
    """Activations, gradients, gathered parameters."""
    results: int
    """Outputs besides the state, which reuses the memory of the previous state."""
    code: int
    """The program itself, if the backend reports it."""

    peak: int
    """All of them together."""

    @classmethod
    def of_parts(cls, **parts: int) -> "StepMemory":
        """With the sum of these."""
        return cls(**parts, peak=sum(parts.values()))

    @classmethod
    def of_program(cls, program: Any) -> "StepMemory":
        """Of each device, for a compiled program."""
        account = program.memory_analysis()
        return cls.of_parts(
            arguments=account.argument_size_in_bytes,
            temporaries=account.temp_size_in_bytes,
            results=account.output_size_in_bytes - account.alias_size_in_bytes,
            code=account.generated_code_size_in_bytes,
        )
