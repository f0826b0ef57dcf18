"""How a run is best divided over the devices of a target: its compiler is asked about each layout that makes sense."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.mesh import batch_sharding
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.devices.targets import Target, parse_target
from roxxel_dist.input.stream import Stream
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.batch import saved_metadata
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.estimate.inputs import for_target, open_components, plan_of, spans
from roxxel_dist.run.estimate.problems import checkpointing
from roxxel_dist.run.estimate.target_phases import COMPILED_AT_ONCE, rebuild
from roxxel_dist.run.estimate.target_process import Report
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetStep, measure_step
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.resume import last_step
from roxxel_dist.train.step.batch_layout import batch_layout
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import Steps

TENSOR = (1, 2, 4, 8)
"""Devices along the tensor axis: with more the products of a device are small, and each layer sends more."""
UNDIVIDED: Mapping[str, Any] = {"fsdp": False, "fsdp_devices": 0, "tensor_devices": 1, "expert_devices": 1}


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """The training step of a phase, divided over the devices of the target in one way."""

    fields: Mapping[str, Any]
    """The lines of a config that choose it."""
    text: str
    """How rows and parameters lie."""
    state_bytes: int
    """Of a device, with its part of the batch."""
    step: TargetStep | None
    """What the target's compiler says; None: the state alone is too large, and nothing was compiled."""

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device."""
        return self.step is not None and self.step.fits

    @property
    def order(self) -> tuple[Any, ...]:
        """Its place: those that fit first, then by the roofline of the step, by what is sent, and by memory."""
        of = self.step
        if of is None or of.roofline_seconds is None:
            return not self.fits, math.inf, math.inf, self.state_bytes
        return not self.fits, of.roofline_seconds, sum(of.collectives.values()), of.peak_bytes or math.inf

    @property
    def lines(self) -> str:
        """The lines of a config that choose it, in one line."""
        return ", ".join(f"{name}: {str(value).lower()}" for name, value in self.fields.items()) or "nothing divided"


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """The layouts of the phase that computes most tokens of a run, the best first."""

    target: str
    devices: int
    device_kind: str
    device_bytes: int | None
    phase: int
    """From 1."""
    share: float
    """Of the tokens that the run computes."""
    batch_size: int
    seq_len: int
    layouts: tuple[LayoutCost, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no layout can run; empty where one fits."""
        if any(each.fits for each in self.layouts):
            return ()
        return (
            f"phase {self.phase}: {self.batch_size} rows x {self.seq_len} tokens: its training step fits the devices "
            f"of {self.target} in no layout: use a smaller batch_size or model, a larger grad_accum, or more devices",
        )


def compare_layouts(config: Any, data_path: str | Path | None, request: EstimateRequest) -> LayoutComparison:
    """Compile a run's training step for the target of the request, divided in each sensible way.

    What the config says of fsdp, fsdp_devices, tensor_devices and expert_devices is not looked at. Nothing is written.

    Raises:
        UserError: a mistake in the config, the data or the request; virtual shards, whose step is not one program.
        MissingCompiler: the target's compiler is not installed.
    """
    if request.target is None:
        raise UserError(
            "target is None: name one, such as v5e:4x4 or h100:1x8, because its compiler says what each layout costs"
        )
    parse_target(request.target)
    if config.virtual_shards:
        raise UserError(
            f"layouts is True, and virtual_shards is {config.virtual_shards}: a step of virtual shards is not one "
            f"program, and how they lie is decided by their number; leave one out"
        )
    return for_target(_compare_in_process, dataclasses.replace(config, **UNDIVIDED), data_path, request)


def _compare_in_process(report: Report, target: Target, *args: Any) -> LayoutComparison:
    """`compare_layouts` in a process with the target's environment."""
    config, data_path, request, folder = args
    compiler = TargetCompiler(target, report, request.device_memory_gb)
    with open_components(config, data_path, request, compiler, folder) as (components, _):
        return compare(compiler, components, request.run)


def compare(target: TargetCompiler, components: RunComponents, run: Path | None = None) -> LayoutComparison:
    """The layouts of components, which divide nothing themselves. `run`: whose plan it is, amendments included."""
    with usage_errors():
        saved = None if run is None else saved_metadata(run)
        plan = plan_of(components.curriculum, components.config.seed, saved)
        last = last_step(plan, components.options)
        tokens = {
            (first, stop): plan.predicted_tokens(stop) - plan.predicted_tokens(first)
            for first, stop in spans(plan, last)
        }
        (_, stop), most = max(tokens.items(), key=lambda item: item[1])
        phase, shape = plan.phase(stop - 1), plan.segment(stop - 1).shape
        mesh = components.mesh(target.hosts)
        sharding = batch_sharding(mesh)
        batch = Stream(plan, components.curriculum.datasets, sharding, stop - 1, components.grad_accum).abstract()
        alone = components.steps(mesh, plan.total_steps).on_one_device()
    flops = alone.flops("training", batch)

    # A model of the user's own decides itself what is computed again.
    savers = checkpointing(components.config) if components.config.model is None else []

    def cost(fields: Mapping[str, Any]) -> LayoutCost | None:
        found = None
        for saver in ({}, *savers):
            tried = _cost(target, components, plan, stop - 1, batch, {**fields, **saver}, flops)
            found = tried or found
            if tried is None or tried.fits or tried.step is None:
                break
        return found

    with ThreadPoolExecutor(COMPILED_AT_ONCE, "roxxel-target") as pool:
        try:
            found = [
                each for each in pool.map(cost, ways(components.config, mesh.size, target.hosts)) if each is not None
            ]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the others is begun
            raise
    return LayoutComparison(
        target=target.target.name,
        devices=mesh.size,
        device_kind=mesh.devices.flat[0].device_kind,
        device_bytes=target.device_bytes,
        phase=phase + 1,
        share=most / sum(tokens.values()),
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        layouts=tuple(sorted(found, key=lambda each: each.order)),
    )


def ways(config: Any, devices: int, hosts: int) -> Iterator[dict[str, Any]]:
    """The fields of layouts that make sense on so many devices: parameters whole, cut over the devices of a host, and
    cut over all; each with matrices whole and divided, and of a mixture with its experts on few devices and on many."""
    for tensor in TENSOR:
        if devices % tensor or (tensor > 1 and config.model is not None):
            continue
        divided = {} if tensor == 1 else {"tensor_devices": tensor}
        most, of_host = devices // tensor, devices // hosts // tensor
        yield divided
        if hosts > 1 and of_host > 1:
            yield {"fsdp": True, "fsdp_devices": of_host, **divided}
        if most > 1:
            yield {"fsdp": True, **divided}
    if config.use_moe and config.model is None:
        for experts in sorted({math.gcd(config.n_experts, count) for count in (devices // hosts, devices)} - {1}):
            yield {"expert_devices": experts}
            if devices > experts:
                yield {"fsdp": True, "expert_devices": experts}


def _cost(
    target: TargetCompiler,
    components: RunComponents,
    plan: Plan,
    step: int,
    batch: Any,
    fields: Mapping[str, Any],
    flops: float,
) -> LayoutCost | None:
    """What one layout costs; None where the model or the batch does not allow it."""
    try:
        changed = dataclasses.replace(components.config, **fields)
        changed.validate()
        made = rebuild(changed, components, components.devices)
        steps: Steps = made.steps(made.mesh(target.hosts), plan.total_steps)
        args = steps.args("training", batch)
    except ValueError:
        return None
    held, shape = device_bytes(args), plan.segment(step).shape
    text = str(batch_layout(batch_sharding(steps.mesh), shape.batch_size, shape.seq_len, made.grad_accum, 0))
    cost, found = LayoutCost(fields=fields, text=text, state_bytes=held, step=None), None
    if target.device_bytes is None or held <= target.device_bytes:
        what = f"the training step with {cost.lines}"
        found, _ = measure_step(target, what, steps, "training", batch, flops, steps)
    return dataclasses.replace(cost, step=found)
