"""The estimate of each phase of a run: rows, work and time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh, NamedSharding

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.model.attention.kernels import score_bytes
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.estimate.figures import EstimateRequest, PhaseEstimate
from roxxel_dist.run.estimate.target_steps import TargetPhase
from roxxel_dist.run.report import read_runs
from roxxel_dist.train.step.batch_layout import BatchLayout, batch_layout
from roxxel_dist.train.step.compile import StepMemory
from roxxel_dist.train.step.step import micro_batches
from roxxel_dist.utils.voice import argument

USUAL_MFU = 0.4
"""Model FLOPs utilisation if no speed was measured: that of a dense model on a few accelerators."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a run is, if that is known: tokens, or else FLOPs, in a second."""

    source: str
    """Where the time comes from."""
    tokens_per_s: float | None = None
    """Computed ones, over all devices."""
    flops_per_s: float | None = None
    """Of one device."""

    @classmethod
    def of_request(cls, request: EstimateRequest, mesh: Mesh, *, bf16: bool) -> "Speed":
        """As given, as measured in the run, or as usual on such devices."""
        if request.tokens_per_s:
            return cls(source="given", tokens_per_s=request.tokens_per_s)
        if (run := request.run) is not None and (measured := _measured(run)):
            return cls(source=f"measured in {run}, the median of what it logged", tokens_per_s=measured)
        peak = peak_flops(mesh.devices.flat[0].device_kind) if bf16 else None
        if peak is None:
            return cls(source=f"unknown: give {argument('tokens_per_s', 'NUMBER')}")
        of_peak = f"at an MFU of {USUAL_MFU:.0%} of the {peak / 1e12:,.0f} TFLOP/s (bfloat16) of each device"
        return cls(source=f"estimated, {of_peak}", flops_per_s=USUAL_MFU * peak)

    def seconds(self, tokens: int, flops: float, devices: int) -> float | None:
        """What so many computed tokens take; None where nothing is known."""
        if self.tokens_per_s:
            return tokens / self.tokens_per_s
        return flops / (self.flops_per_s * devices) if self.flops_per_s else None


def _measured(run: Path) -> float | None:
    return read_runs([run])[0].numbers()["tokens_per_s"]


def phase_estimate(
    components: RunComponents,
    plan: Plan,
    span: tuple[int, int],
    sharding: NamedSharding,
    processes: int,
    *,
    flops_of: Callable[[int], float],
    speed: Speed,
    memory: StepMemory | None,
    target: TargetPhase | None,
) -> PhaseEstimate:
    """The estimate of the steps of `span`, [first, stop); `flops_of` is `TrainView.flops_per_token`."""
    (first, stop), shape = span, plan.segment(span[1] - 1).shape
    computed = plan.predicted_tokens(stop) - plan.predicted_tokens(first)
    flops_per_token = flops_of(shape.seq_len - 1)
    shards = components.options.virtual_shards
    layout = batch_layout(sharding, shape.batch_size, shape.seq_len, components.grad_accum, shards)
    rows = shape.batch_size // layout.row_pieces * -(-layout.row_pieces // processes)
    return PhaseEstimate(
        phase=plan.phase(stop - 1) + 1,
        first_step=first + 1,
        steps=stop - first,
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        weights={name: share / sum(each for _, each in shape.weights) for name, share in shape.weights},
        blend=shape.blend,
        packing=shape.packing,
        tokens=plan.tokens(stop) - plan.tokens(first),
        predicted_tokens=computed,
        flops_per_token=flops_per_token,
        flops=computed * flops_per_token,
        layout=layout,
        rows_a_process=shape.batch_size if layout.shards else rows,  # with shards each device holds all
        memory=memory,
        seconds=speed.seconds(computed, computed * flops_per_token, layout.pieces * layout.together),
        attention=components.kernel,
        score_bytes=_score_bytes(shape, layout, components),
        target=target,
    )


def _score_bytes(shape: Shape, layout: BatchLayout, components: RunComponents) -> int | None:
    """Bytes of each device for the attention scores of a layer, for a micro-batch."""
    kernel = components.kernel
    if components.config.model is not None or kernel == "auto":
        return None
    config = components.config.part(ModelConfig)
    heads = config.heads()[0]
    heads = heads // layout.together if heads % layout.together == 0 else heads
    rows = shape.batch_size // micro_batches(components.grad_accum, shape.batch_size)
    packed = shape.packing == "documents"
    return score_bytes(kernel, rows, heads, shape.seq_len - 1, config.widest_window, packed=packed) // layout.pieces
