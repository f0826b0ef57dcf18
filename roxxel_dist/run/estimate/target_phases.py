"""What the steps of each phase cost on a target, and what makes a phase fit that does not."""

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.run.components import RunComponents, build_components
from roxxel_dist.run.estimate.exact_cost import measure_exact, simulated_mesh
from roxxel_dist.run.estimate.step_memory import StepMemory, memory_analysis
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase, one_device_flops
from roxxel_dist.settings.config import Config
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import Steps
from roxxel_dist.train.validation.evaluator import Validation
from roxxel_dist.utils.display import size

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
    train, evaluate = (steps.train, alone.train), (steps.evaluate(), alone.evaluate())

    simulated: tuple[Any, ...] = ()
    if not steps.is_one_program:
        # Kernels of the target cannot be traced for simulated devices; they change no number of calls.
        config = dataclasses.replace(components.config, attention="xla")
        parts, mesh = rebuilt(config, components), simulated_mesh(steps.mesh)
        plain = parts.steps(mesh, plan.total_steps)
        simulated = plain.train, plain.evaluate()

    def measure(what: str, kind: int, args: tuple[Any, ...], args_alone: tuple[Any, ...]) -> Any:
        step, step_alone = (train, evaluate)[kind]
        flops = one_device_flops(alone.mesh, step_alone, args_alone)
        if simulated:
            return measure_exact(target, what, step, simulated[kind], args, flops)
        return target.measure(what, steps.mesh, step, args, flops)

    with ThreadPoolExecutor(COMPILED_AT_ONCE, "roxxel-target") as pool:
        trained, validated, programs = list[Future[Any]](), list[Future[Any] | None](), dict[Any, Future[Any]]()
        for step, shape, batch in zip(last_steps, shapes, batches, strict=True):
            what = f"step of phase {plan.phase(step) + 1} ({shape.batch_size:,} rows x {shape.seq_len:,} tokens)"
            args = steps.training_args(batch), alone.training_args(batch)
            trained.append(pool.submit(measure, f"the training {what}", 0, *args))
            rows, key = validation.batch(shape), validation.text(shape)
            if rows is not None and key not in programs:  # phases with rows of one length share it
                args = steps.validation_args(rows), alone.validation_args(rows)
                programs[key] = pool.submit(measure, f"the validation {what}", 1, *args)
            validated.append(programs.get(key))
        found: list[tuple[StepMemory | None, TargetPhase]] = []
        try:
            for training, other in zip(trained, validated, strict=True):
                step, program = training.result()
                needs = None if program is None else memory_analysis(program)
                evaluated = None if other is None else other.result()[0]
                found.append((needs, TargetPhase(**vars(step), validation=evaluated)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the others is begun
            raise
    return found


def rebuilt(config: Config, components: RunComponents, devices: Sequence[Any] | None = None) -> RunComponents:
    """The components of a changed config, with the schedule of those that there are."""
    made = build_components(config, components.data, devices=devices)
    return dataclasses.replace(made, optimizer=components.optimizer)


def checkpointing(config: Any) -> list[dict[str, Any]]:
    """The changes of a config with the built-in model that compute more blocks again, the cheapest first."""
    levels = {False: ("products", True), "products": (True,), True: ()}[config.gradient_checkpointing]
    return [{"gradient_checkpointing": level} for level in levels]


def _changes(config: Any, rows: int, devices: int) -> list[dict[str, Any]]:
    """Changes of a config that save memory of its steps, the cheapest in speed first; the last ones have several."""
    pieces = max(1, devices // config.tensor_devices)
    most = rows // pieces if rows % pieces == 0 else rows
    changes: list[dict[str, Any]] = []
    if config.model is None and config.loss is None and not config.loss_chunk:
        changes.append({"loss_chunk": "auto"})
    if devices > 1 and not config.fsdp:
        changes.append({"fsdp": True})
    if config.grad_accum < most:
        changes.append({"grad_accum": most})
    if config.model is None:
        changes += checkpointing(config)
    every = {name: value for change in changes for name, value in change.items()}
    changes += [every] if len(changes) > 1 else []
    tensor = math.gcd(devices, 4)
    if config.model is None and config.tensor_devices == 1 and tensor > 1:
        changes.append({**every, "fsdp": True, "tensor_devices": tensor})
    return changes


def cure(target: TargetCompiler, components: RunComponents, plan: Plan, step: int, batch: Any) -> str:
    """Which change makes a phase's training step fit: each is compiled, until one does."""
    shape, tried = plan.segment(step).shape, list[str]()
    config, limit = components.config, target.device_bytes or 0
    for change in _changes(config, shape.batch_size, len(target.devices)):
        words = ", ".join(f"{name} {str(value).lower()}" for name, value in change.items())
        try:
            changed = dataclasses.replace(config, **change)
            changed.validate()
            made = rebuilt(changed, components, components.devices)
            steps = made.steps(made.mesh(target.hosts), plan.total_steps)
        except ValueError:
            continue  # not for this model, or not on these devices
        args = steps.training_args(batch)
        if device_bytes(args) > limit:
            continue  # the state alone is too large
        what = f"with {words}, the training step of phase {plan.phase(step) + 1}"
        found, _ = target.measure(what, steps.mesh, steps.train, args, 0.0)
        if found.fits:
            return f"with {words} it takes {size(found.peak_bytes or 0)} and fits"
        tried.append(words)
    without = f"tried, and none of them fits: {'; '.join(tried)}; " if tried else ""
    return f"{without}use a smaller batch_size or model, or more devices"
