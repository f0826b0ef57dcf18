"""What the steps of each phase cost on a target."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.run.components import RunComponents, build_components
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase, TargetStep, measure_step
from roxxel_dist.settings.config import Config
from roxxel_dist.train.step.compile import StepMemory
from roxxel_dist.train.steps import Kind, Steps
from roxxel_dist.train.validation.evaluator import Validation

COMPILED_AT_ONCE = 2
"""The compilers use few threads each; more programs at once would need more memory than most machines have."""


def on_target(
    target: TargetCompiler,
    components: RunComponents,
    steps: Steps,
    plan: Plan,
    last_steps: Sequence[int],
    batches: Sequence[Any],
    validation: Validation,
) -> list[tuple[StepMemory | None, TargetPhase]]:
    """For each phase (the memory of its training step or None if it does not fit, what its steps cost), by the target's
    compiler; of a phase there is one step, from 0, and its batch."""
    alone, shapes = steps.on_one_device(), [plan.segment(step).shape for step in last_steps]

    def make_simulated(mesh: Mesh) -> Steps:
        # Kernels of the target cannot be traced for simulated devices; they change no number of calls.
        config = dataclasses.replace(components.config, attention="xla")
        return rebuild(config, components).steps(mesh, plan.total_steps)

    simulated = steps.simulated(make_simulated)

    def measure(what: str, kind: Kind, batch: Any) -> tuple[TargetStep, StepMemory | None]:
        return measure_step(target, what, steps, kind, batch, alone.flops(kind, batch), simulated)

    with ThreadPoolExecutor(COMPILED_AT_ONCE, "roxxel-target") as pool:
        trained, validated, programs = list[Future[Any]](), list[Future[Any] | None](), dict[Any, Future[Any]]()
        for step, shape, batch in zip(last_steps, shapes, batches, strict=True):
            what = f"step of phase {plan.phase(step) + 1} ({shape.batch_size:,} rows x {shape.seq_len:,} tokens)"
            trained.append(pool.submit(measure, f"the training {what}", "training", batch))
            rows, key = validation.batch(shape), validation.text(shape)
            if rows is not None and key not in programs:  # phases with rows of one length share it
                programs[key] = pool.submit(measure, f"the validation {what}", "validation", rows)
            validated.append(programs.get(key))
        found: list[tuple[StepMemory | None, TargetPhase]] = []
        try:
            for training, other in zip(trained, validated, strict=True):
                step, needs = training.result()
                evaluated = None if other is None else other.result()[0]
                found.append((needs, TargetPhase(**vars(step), validation=evaluated)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the others is begun
            raise
    return found


def rebuild(config: Config, components: RunComponents, devices: Sequence[Any] | None = None) -> RunComponents:
    """The components of a changed config, with the schedule of those that there are."""
    made = build_components(config, components.data, devices=devices)
    return dataclasses.replace(made, optimizer=components.optimizer)
