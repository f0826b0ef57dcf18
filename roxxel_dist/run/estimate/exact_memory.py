"""The memory of a step with virtual shards: the program of a shard is compiled, and what is alive beside it added."""

from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.cluster.mesh import batch_sharding
from roxxel_dist.run.estimate.abstract_steps import StepMemory, Steps
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import Layout, rows_sharding
from roxxel_dist.train.exact.memory import StepPeaks, step_peaks
from roxxel_dist.train.exact.step import RowSums
from roxxel_dist.train.step.compile import Compile, CompileForEach
from roxxel_dist.train.step.throughput import device_bytes


@dataclass(frozen=True)
class ExactMemory:
    """The memory of a training step, for an `AotCompiler` to find."""

    steps: Steps
    sums: RowSums
    batch: Any
    """As shapes, with shardings."""

    @classmethod
    def of(cls, steps: Steps, batch: Any) -> "ExactMemory | None":
        """None without virtual shards, and for rows that they cut."""
        of, options = steps.components, steps.components.options
        count, sharding = options.virtual_shards, rows_sharding(batch_sharding(steps.mesh), options.virtual_shards)
        if not count or jax.tree.leaves(batch)[0].shape[0] < count:
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
        sums = RowSums.of(programs, Layout(count, sharding), steps.state, steps.hparams, batch)
        return cls(steps, sums, batch)

    def compiled(self, compile_one: Compile, for_each: CompileForEach, *args: Any) -> StepMemory:
        """The memory, by the compiler of the devices here."""
        del compile_one, args
        return self.memory(for_each(self.sums.jitted, self.sums.args, [self.steps.mesh.devices.flat[0]])[0])

    def memory(self, program: Any) -> StepMemory:
        """Of one device, from the program of a shard."""
        account, steps = program.memory_analysis(), self.steps
        peaks: StepPeaks = step_peaks(
            self.sums.totals, self.sums.packed, steps.state, steps.hparams, account.temp_size_in_bytes
        )
        held, code = device_bytes((steps.state, steps.hparams, self.batch)), account.generated_code_size_in_bytes
        return StepMemory(arguments=held, temporaries=peaks.most, results=0, code=code, peak=held + peaks.most + code)
