"""Why a phase cannot run, and what makes it fit."""

import dataclasses
import math
from typing import Any

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.estimate.figures import PhaseEstimate
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase, measure_step, rebuild
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.utils.display import size


def target_problem(
    phase: PhaseEstimate, target: TargetCompiler, components: RunComponents, plan: Plan, batch: Any
) -> str | None:
    """Why a phase cannot run on the target, and what makes it fit; None if it can."""
    step, what = phase.target, "training"
    if isinstance(step, TargetPhase) and step.fits:
        step, what = step.validation, "validation"
    if step is None or step.fits:
        return None
    needs = "more" if step.peak_bytes is None else size(step.peak_bytes)
    advice = "use a smaller batch_size or model, or more devices"
    if what == "training" and not components.options.virtual_shards:
        advice = cure(target, components, plan, phase.first_step - 1, batch)
    return (
        f"phase {phase.phase}: {phase.batch_size} rows x {phase.seq_len} tokens: its {what} step does not fit: it "
        f"needs {needs} of each device, and one of {target.target.name} has {size(step.device_bytes or 0)}: {advice}"
    )


def problem(phase: PhaseEstimate, limit: int | None, config: Any, devices: int) -> str | None:
    """Why a phase cannot run on devices of `limit` bytes, and how to change it; None if it can, or if that is
    unknown."""
    memory = phase.memory
    if memory is None:
        needs = "its step does not fit, says the compiler"
    elif limit is not None and memory.peak > limit:
        needs = (
            f"its step needs {size(memory.peak)} of each device ({size(memory.arguments)} state and batch, "
            f"{size(memory.temporaries)} temporaries)"
        )
    else:
        return None
    has = "" if limit is None else f", and a device has {size(limit)}"
    cures = ["a smaller batch_size, a larger grad_accum"]
    cures += ["gradient_checkpointing"] if config.model is None and not config.gradient_checkpointing else []
    cures += ["fsdp"] if devices > 1 and not config.fsdp else []
    cures += ["use_bf16 or bf16_compute"] if not (config.use_bf16 or config.bf16_compute) else []
    return (
        f"phase {phase.phase}: {phase.batch_size} rows x {phase.seq_len} tokens: {needs}{has}: use "
        f"{', '.join(cures)}, or more devices"
    )


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
            made = rebuild(changed, components, components.devices)
            steps = made.steps(made.mesh(target.hosts), plan.total_steps)
        except ValueError:
            continue  # not for this model, or not on these devices
        if device_bytes(steps.args("training", batch)) > limit:
            continue  # the state alone is too large
        what = f"with {words}, the training step of phase {plan.phase(step) + 1}"
        found, _ = measure_step(target, what, steps, "training", batch, 0.0, steps)
        if found.fits:
            return f"with {words} it takes {size(found.peak_bytes or 0)} and fits"
        tried.append(words)
    without = f"tried, and none of them fits: {'; '.join(tried)}; " if tried else ""
    return f"{without}use a smaller batch_size or model, or more devices"
