"""What the steps of each phase cost on a target, and what makes a phase fit that does not."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from roxxel_dist.abstract_steps import StepMemory, Steps, memory_analysis
from roxxel_dist.builders import RunComponents, build_components
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.display import size
from roxxel_dist.target_steps import TargetCompiler, TargetPhase, one_device_flops
from roxxel_dist.train.evaluator import Validation
from roxxel_dist.train.throughput import device_bytes


def _on_one_device(components: RunComponents) -> RunComponents:
    """The same run on the first of the devices, with the same kernel."""
    config = dataclasses.replace(components.config, n_devices=1, tensor_devices=1, fsdp_devices=0)
    return dataclasses.replace(components, config=config, devices=list(components.devices or [])[:1])


def on_target(
    target: TargetCompiler,
    components: RunComponents,
    plan: Plan,
    last_steps: Sequence[int],
    batches: Sequence[Any],
    validation: Validation,
) -> list[tuple[StepMemory | None, TargetPhase]]:
    """For each phase (the memory of its training step or None if it does not fit, what its steps cost), by the target's
    compiler; of a phase there is one step, from 0, and its batch."""
    steps = Steps.of(components, plan.total_steps, target.hosts)
    alone = Steps.of(_on_one_device(components), plan.total_steps, 1)
    found: list[tuple[StepMemory | None, TargetPhase]] = []
    for step, batch in zip(last_steps, batches, strict=True):
        shape, phase = plan.segment(step).shape, plan.phase(step) + 1
        what = f"step of phase {phase} ({shape.batch_size:,} rows x {shape.seq_len:,} tokens)"
        flops = one_device_flops(alone.mesh, *alone.training(batch))
        trained, program = target.measure(f"the training {what}", steps.mesh, *steps.training(batch), flops)
        evaluated = None
        if (validated := validation.batch(shape)) is not None:
            flops = one_device_flops(alone.mesh, *alone.validation(validated))
            evaluated, _ = target.measure(f"the validation {what}", steps.mesh, *steps.validation(validated), flops)
        needs = None if program is None else memory_analysis(program)
        found.append((needs, TargetPhase(**vars(trained), validation=evaluated)))
    return found


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
    if config.model is None and not config.gradient_checkpointing:
        changes.append({"gradient_checkpointing": True})
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
            made = build_components(changed, components.data, devices=components.devices)
            steps = Steps.of(made, plan.total_steps, target.hosts)
        except ValueError:
            continue  # not for this model, or not on these devices
        jitted, args = steps.training(batch)
        if device_bytes(args) > limit:
            continue  # the state alone is too large
        what = f"with {words}, the training step of phase {plan.phase(step) + 1}"
        found, _ = target.measure(what, steps.mesh, jitted, args, 0.0)
        if found.fits:
            return f"with {words} it takes {size(found.peak_bytes or 0)} and fits"
        tried.append(words)
    without = f"tried, and none of them fits: {'; '.join(tried)}. " if tried else ""
    return f"{without}Use a smaller batch_size or model, or more devices"
