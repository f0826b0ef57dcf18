"""One phase of a run that has not begun: its work, its memory, its time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.stream import Stream
from roxxel_dist.train.ahead import Layout, StepMemory, layout, memory_of
from roxxel_dist.train.hardware import peak_flops
from roxxel_dist.train.phase_programs import PhasePrograms
from roxxel_dist.train.programs import Programs

USUAL_MFU = 0.4
"""The share of the peak that the time is told for where nobody has measured: of a dense model on a few accelerators."""
NO_ROOM = "RESOURCE_EXHAUSTED"
"""How XLA says that a program does not fit."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a run would be, and how that is known."""

    source: str
    tokens_per_s: float | None = None
    """Over all devices."""
    device_flops_per_s: float | None = None
    """Of one device, where the other is not known."""

    def seconds(self, tokens: int, flops: float, devices: int) -> float | None:
        """What so much work takes on so many devices; None where nothing is known."""
        if self.tokens_per_s:
            return tokens / self.tokens_per_s
        return flops / (self.device_flops_per_s * devices) if self.device_flops_per_s else None


def usual_speed(mesh: Mesh, *, bf16: bool) -> Speed:
    """What the kind of the devices tells of their speed."""
    device = mesh.devices.flat[0]
    peak = peak_flops(device.device_kind) if bf16 else None
    if peak is None:
        return Speed(source="unknown: give --tokens_per_s")
    told = f"estimated, at an MFU of {USUAL_MFU:.0%} of the {peak / 1e12:,.0f} TFLOP/s (bfloat16) of each device"
    return Speed(source=told, device_flops_per_s=USUAL_MFU * peak)


@dataclass(frozen=True, kw_only=True)
class PhaseOutlook:
    """One phase, as far as the run goes."""

    phase: int
    """From 1."""
    first_step: int
    """From 1."""
    steps: int
    batch_size: int
    seq_len: int
    weights: Mapping[str, float]
    """Shares by data set."""
    blend: str
    packing: str
    tokens: int
    flops_per_token: float
    """Floating-point operations of a step for a token, forward and backward."""
    flops: float
    """Of all its steps."""
    layout: Layout
    rows_a_process: int
    """Rows of a batch that a process reads, at most."""
    memory: StepMemory | None
    """Of each device; None where the compiler gave up because it does not fit."""
    seconds: float | None
    """Of its steps alone, without validations, saves and compilations."""


def spans(plan: Plan, last: int) -> list[tuple[int, int]]:
    """[first, stop) of every phase that begins before the step `last`."""
    found, first = [], 0
    for shape in plan.shapes:
        if first < last:
            found.append((first, min(first + shape.steps, last)))
        first += shape.steps
    return found


def step_memory(programs: Programs, phases: PhasePrograms, stream: Stream) -> StepMemory | None:
    """What the stream's next step needs of each device: compiled, not run. None where it does not fit."""
    try:
        return memory_of(programs.get(phases.prepare_step(stream)))
    except jax.errors.JaxRuntimeError as error:
        if NO_ROOM not in str(error):
            raise
        return None


def look_at(
    plan: Plan,
    span: tuple[int, int],
    memory: StepMemory | None,
    *,
    sharding: NamedSharding,
    grad_accum: int,
    processes: int,
    flops: Callable[[int], float],
    speed: Speed,
) -> PhaseOutlook:
    """The outlook of the phase that has the steps [first, stop) of a plan.

    Args:
        plan: what the run follows.
        span: of the phase.
        memory: of its step.
        sharding: of a batch.
        grad_accum: micro-batches a step.
        processes: how many share the devices.
        flops: (tokens a row) -> operations of a step for a token.
        speed: of the run.
    """
    first, stop = span
    shape = plan.segment(stop - 1).shape
    shared = layout(sharding, shape.batch_size, shape.seq_len, grad_accum)
    tokens, each = plan.tokens(stop) - plan.tokens(first), flops(shape.seq_len)
    of_all = sum(weight for _, weight in shape.weights)
    mine = -(-shared.pieces // processes) if shared.cut == "rows" else shared.pieces
    return PhaseOutlook(
        phase=plan.phase(stop - 1) + 1,
        first_step=first + 1,
        steps=stop - first,
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        weights={name: weight / of_all for name, weight in shape.weights},
        blend=shape.blend,
        packing=shape.packing,
        tokens=tokens,
        flops_per_token=each,
        flops=tokens * each,
        layout=shared,
        rows_a_process=shape.batch_size * mine // shared.pieces,
        memory=memory,
        seconds=speed.seconds(tokens, tokens * each, shared.pieces * shared.together),
    )


def size(count: float) -> str:
    """Bytes for people, in units of 10^3."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:,.2f} {unit}"
    return f"{count:.0f} B"


def problem(phase: PhaseOutlook, limit: int | None, cures: Sequence[str]) -> str | None:
    """Why a phase cannot run on devices of `limit` bytes; None where it can, or nobody knows."""
    has = "" if limit is None else f", and a device has {size(limit)}"
    if phase.memory is None:
        needs = "its step does not fit, says the compiler"
    elif limit is not None and phase.memory.peak > limit:
        found = phase.memory
        needs = (
            f"its step needs {size(found.peak)} of each device ({size(found.arguments)} state and batch, "
            f"{size(found.temporaries)} temporaries)"
        )
    else:
        return None
    return (
        f"phase {phase.phase}: {phase.batch_size} rows x {phase.seq_len} tokens: {needs}{has}: use {', '.join(cures)}"
    )


def cures(config: Any, devices: int) -> list[str]:
    """What a person could change, so that a step needs less memory."""
    found = ["a smaller batch_size, a larger grad_accum"]
    if config.model is None and not config.gradient_checkpointing:
        found.append("gradient_checkpointing")
    if devices > 1 and not config.fsdp:
        found.append("fsdp")
    if not (config.use_bf16 or config.bf16_compute):
        found.append("use_bf16 or bf16_compute")
    return [*found, "or more devices"]
