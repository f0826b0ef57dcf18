"""The memory of a step with virtual shards: programs of a shard are compiled, and what is alive beside them added."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.cluster.mesh import batch_sharding
from roxxel_dist.run.estimate.abstract_steps import StepMemory, Steps
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import Layout, rows_sharding, shapes_of
from roxxel_dist.train.exact.long_shapes import LongSums
from roxxel_dist.train.exact.memory import StepPeaks, long_peaks, step_peaks
from roxxel_dist.train.exact.step import RowSums
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.throughput import device_bytes


@dataclass(frozen=True)
class ExactMemory:
    """The memory of a training step, for an `AotCompiler` to find."""

    steps: Steps
    sums: RowSums | LongSums
    batch: Any
    """As shapes, with shardings."""

    @classmethod
    def of(cls, steps: Steps, batch: Any) -> "ExactMemory | None":
        """None without virtual shards."""
        of, options = steps.components, steps.components.options
        count, sharding = options.virtual_shards, rows_sharding(batch_sharding(steps.mesh), options.virtual_shards)
        if not count:
            return None
        programs = ShardPrograms(
            steps.split,
            of.loss,
            of.optimizer,
            count,
            of.grad_accum,
            steps.compute_dtype,
            options.on_bad_step == "skip",
            steps.in_blocks,
        )
        cuts_rows = jax.tree.leaves(batch)[0].shape[0] < count
        sums = (LongSums if cuts_rows else RowSums).of(
            programs, Layout(count, sharding), steps.state, steps.hparams, shapes_of(batch)
        )
        return cls(steps, sums, batch)

    def compiled(self, compile_one: Compile, for_each: CompileForEach, *args: Any) -> StepMemory:
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
