"""The memory of a step: of one program as XLA says; with virtual shards the programs of a shard are compiled, and what
is alive beside them is added."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.run.estimate.target_steps import peak_bytes
from roxxel_dist.train.exact.layout import shapes_of
from roxxel_dist.train.exact.long_shapes import LongSums
from roxxel_dist.train.exact.memory import StepPeaks, long_peaks, step_peaks
from roxxel_dist.train.exact.step import RowSums
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import ShardedSteps


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


def memory_analysis(program: Any) -> StepMemory:
    """Memory of each device for a compiled program, from XLA's memory analysis."""
    account = program.memory_analysis()
    parts = {
        "arguments": account.argument_size_in_bytes,
        "temporaries": account.temp_size_in_bytes,
        "results": account.output_size_in_bytes - account.alias_size_in_bytes,
        "code": account.generated_code_size_in_bytes,
    }
    return StepMemory(**parts, peak=peak_bytes(program))


@dataclass(frozen=True)
class ExactMemory:
    """The memory of a training step with virtual shards, for an `AotCompiler` to find."""

    steps: ShardedSteps
    sums: RowSums | LongSums
    batch: Any
    """As shapes, with shardings."""

    @classmethod
    def of_step(cls, steps: ShardedSteps, batch: Any) -> "ExactMemory":
        """Of the step for such a batch."""
        kind = LongSums if jax.tree.leaves(batch)[0].shape[0] < steps.layout.count else RowSums
        return cls(
            steps, kind.of_step(steps.programs, steps.layout, steps.state, steps.hparams, shapes_of(batch)), batch
        )

    def compile(self, compile_one: Compile, for_each: CompileForEach, *args: Any) -> StepMemory:
        """The memory of one device, by the compiler of the devices here."""
        del compile_one, args
        steps, device = self.steps, [self.steps.mesh.devices.flat[0]]
        found = {name: for_each(*each, device)[0].memory_analysis() for name, each in self._programs().items()}
        peaks = self._peaks({name: account.temp_size_in_bytes for name, account in found.items()})
        held = device_bytes((steps.state, steps.hparams, self.batch))
        code = sum(account.generated_code_size_in_bytes for account in found.values())
        return StepMemory(arguments=held, temporaries=peaks.most, results=0, code=code, peak=held + peaks.most + code)

    def _programs(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """(jitted, its arguments) of those of a shard that take most, by name."""
        if isinstance(self.sums, RowSums):
            return {"sums": (self.sums.jitted, self.sums.args)}
        shapes, programs = self.sums.shapes, self.sums.shapes.programs
        return {
            "after_back": (jax.jit(programs.after_back), shapes.after_back),
            "before_back": (jax.jit(programs.before_back), shapes.before_back),
            "losses_back": (jax.jit(programs.losses_back), shapes.losses),
            "join_sums": (jax.jit(self.sums.join), self.sums.args),
        }

    def _peaks(self, temporaries: Mapping[str, int]) -> StepPeaks:
        own, steps = self.sums, self.steps
        if isinstance(own, LongSums):
            return long_peaks(own, steps.state, steps.hparams, temporaries)
        return step_peaks(own.totals, own.packed, steps.state, steps.hparams, temporaries["sums"])
