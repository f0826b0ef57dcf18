"""How a run is best divided over the devices of a target: its compiler is asked about each layout that makes sense.

A compiler of accelerators takes minutes for a deep model, and most layouts are far from the best. So the order in which
they are compiled, and what cannot fit, is found without it: from the parts of arrays that devices hold and send.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import EXPERT, TENSOR, batch_sharding, row_axes
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.devices.targets import Target, hosts_of, parse_target
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.experts.exchange import ROOM
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.curriculum import saved_metadata
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.estimate.inputs import checkpointing_changes, open_components, plan_of, run_for_target, spans
from roxxel_dist.run.estimate.target_process import Report
from roxxel_dist.run.estimate.target_steps import COMPILED_AT_ONCE, TargetCompiler, TargetStep, measure_step, rebuild
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.resume import last_step
from roxxel_dist.train.step.batch_layout import batch_layout
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import Steps

TENSOR_SIZES = (1, 2, 4, 8)
"""Devices along the tensor axis: with more the products of a device are small, and each layer sends more."""
MOST_COMPILED = 8
"""Layouts that fit, of which the step is compiled."""
BUDGET_S = 480.0
"""CPU time of all compilations, four minutes of two cores: no further one begins that would probably end later."""
DEEP = 12
"""Of a model with more blocks the steps are compiled with scan_layers, one block for all: a compiler of TPUs takes 35 s
for a step and 6 s for each block, one of GPUs 5 s and 1 s, and 3 s for each block of experts."""
TOUCHED = 24
"""How often a block reads or writes a number of each token and feature that devices along "tensor" do not share: norms,
residuals and their gradients, as compilers fuse them."""
KEPT = {False: 4, "products": 3, True: 1}
"""Numbers of each token and feature that a block keeps for the backward pass at least, by `gradient_checkpointing`."""
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
    """What the target's compiler says; None: nothing was compiled."""
    estimated_seconds: float | None = None
    """About what a step takes, by FLOPs, bytes of arrays and bytes sent: the order in which layouts are compiled."""
    is_open: bool = False
    """Whether nothing was compiled although it may fit: enough layouts with a lower estimate were."""

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device."""
        return self.step is not None and self.step.fits

    @property
    def order(self) -> tuple[Any, ...]:
        """Its place: those that fit, then those not compiled; by the roofline of the step, what is sent, and memory."""
        of, group = self.step, 0 if self.fits else 1 if self.is_open else 2
        if of is None or of.roofline_seconds is None:
            return group, math.inf if of is not None else self.estimated_seconds or math.inf, math.inf, self.state_bytes
        return group, of.roofline_seconds, sum(of.collectives.values()), of.peak_bytes or math.inf

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
    return run_for_target(_compare_in_process, dataclasses.replace(config, **UNDIVIDED), data_path, request)


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

    asked = _Question(target, components, plan, stop - 1, batch, flops)
    scanned = scanned_fields(components.config)
    made = [asked.prepared(fields | scanned) for fields in ways(components.config, mesh.size, target.hosts)]
    left = sorted((each for each in made if each is not None), key=lambda each: each.cost.estimated_seconds or 0)
    found, longest = list[LayoutCost](), 0.0
    with ThreadPoolExecutor(COMPILED_AT_ONCE, "roxxel-target") as pool:
        try:
            while left and (wanted := MOST_COMPILED - sum(each.fits for each in found)) > 0:
                begun = time.process_time()
                if begun + longest > BUDGET_S and found:
                    break
                now = min(wanted, COMPILED_AT_ONCE)
                found += pool.map(asked.compiled, left[:now])
                del left[:now]
                longest = max(longest, time.process_time() - begun)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the others is begun
            raise
    found += [dataclasses.replace(each.cost, is_open=asked.may_fit(each)) for each in left]
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


def scanned_fields(config: Any) -> dict[str, Any]:
    """What makes the program of a deep model as short as that of one block, with the same numbers."""
    is_deep = config.num_blocks > DEEP and config.model is None
    return {"scan_layers": True} if is_deep and not config.scan_layers else {}


def ways(config: Any, devices: int, hosts: int) -> Iterator[dict[str, Any]]:
    """The fields of layouts that make sense on so many devices: parameters whole, cut over the devices of a host, and
    cut over all; each with matrices whole and divided, and of a mixture with its experts on few devices and on many."""
    for tensor in TENSOR_SIZES:
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


class _Candidate(NamedTuple):
    """A layout before its step is compiled."""

    cost: LayoutCost
    config: Any
    steps: Steps
    args: tuple[Any, ...]


class _Question(NamedTuple):
    """What is asked of the compiler: one step of a run."""

    target: TargetCompiler
    components: RunComponents
    plan: Plan
    step: int
    batch: Any
    flops: float
    """On one device."""

    def prepared(self, fields: Mapping[str, Any]) -> _Candidate | None:
        """A layout; None where the model or the batch does not allow it."""
        try:
            config = dataclasses.replace(self.components.config, **fields)
            config.validate()
            made = rebuild(config, self.components, self.components.devices)
            steps: Steps = made.steps(made.mesh(self.target.hosts), self.plan.total_steps)
            args = steps.args("training", self.batch)
        except ValueError:
            return None
        shape = self.plan.segment(self.step).shape
        text = str(batch_layout(batch_sharding(steps.mesh), shape.batch_size, shape.seq_len, made.grad_accum, 0))
        about = None if config.model is not None else estimated_seconds(config, steps.mesh, args, self.flops)
        cost = LayoutCost(fields=fields, text=text, state_bytes=device_bytes(args), step=None, estimated_seconds=about)
        return _Candidate(cost, config, steps, args)

    def may_fit(self, way: _Candidate) -> bool:
        """Whether what the step needs at least fits the memory of a device."""
        own = way.config.model is not None
        least = way.cost.state_bytes if own else least_bytes(way.config, way.steps.mesh, way.args)
        return self.target.device_bytes is None or least <= self.target.device_bytes

    def compiled(self, way: _Candidate) -> LayoutCost:
        """What a layout costs, where it does not fit with as much computed again as lets it fit, or all."""
        found = way.cost
        # A model of the user's own decides itself what is computed again.
        for saver in ({}, *(checkpointing_changes(self.components.config) if way.config.model is None else ())):
            tried = self.prepared({**way.cost.fields, **saver}) if saver else way
            if tried is None or not self.may_fit(tried):
                continue
            if found.step is not None and time.process_time() > BUDGET_S:
                return dataclasses.replace(way.cost, is_open=True)
            what = f"the training step with {tried.cost.lines}"
            step, _ = measure_step(self.target, what, tried.steps, "training", self.batch, self.flops, tried.steps)
            found = dataclasses.replace(tried.cost, step=step)
            if found.fits:
                break
        return found


class _Links:
    """What a device sends in collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sent = self.network = 0.0
        self._hosts = dict(zip(mesh.devices.flat, hosts_of(list(mesh.devices.flat)), strict=True))

    def add(self, axes: Sequence[str], passes: float, whole: float) -> None:
        """Add a ring along these axes, in which an array of `whole` bytes goes round so often: 2 for a sum."""
        place = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        group = list(self.mesh.devices[place].flat) if axes else []
        if len(group) <= 1:
            return
        self.sent += passes * whole * (len(group) - 1) / len(group)
        members = Counter(self._hosts[device] for device in group)
        if len(members) > 1:
            self.network += passes * whole * (len(members) - 1) / len(members) / max(members.values())


def _tokens(mesh: Mesh, batch: Any) -> float:
    """Of a device."""
    rows, length = jax.tree.leaves(batch)[0].shape
    pieces = mesh.size // mesh.shape.get(TENSOR, 1)
    return rows * length / pieces


def estimated_seconds(config: Any, mesh: Mesh, args: tuple[Any, ...], flops: float) -> float | None:
    """About what a step of the built-in model takes; None for devices that no table knows.

    Args:
        config: of the run.
        mesh: of the layout.
        args: (state, hparams, batch) of the step, as shapes with shardings.
        flops: of the same step on one device.
    """
    known = accelerator(mesh.devices.flat[0].device_kind)
    if known is None:
        return None
    state, _, batch = args
    links, used = _Links(mesh), 0.0
    rows, numbers = row_axes(mesh), 2 if config.bf16_compute or config.use_bf16 else 4
    for leaf in state.params.values():
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in leaf.sharding.spec)
        cut = {axis for entry in entries for axis in entry if axis}
        gathered = [axis for axis in rows if axis in cut and axis != EXPERT]
        own = math.prod(leaf.sharding.shard_shape(leaf.shape))
        whole = own * math.prod(mesh.shape[axis] for axis in gathered)
        used += whole * numbers
        links.add(gathered, 2, whole * numbers)  # parameters, forward and backward
        links.add(gathered, 1, whole * 4)
        links.add([axis for axis in rows if axis not in cut], 2, own * 4.0)
    tokens = _tokens(mesh, batch) * config.dim * numbers
    links.add([TENSOR], 2 * 4 * config.num_blocks, tokens)
    if config.use_moe:
        room = ROOM if config.expert_capacity_factor is None else config.expert_capacity_factor
        links.add([EXPERT], 4 * config.num_blocks, tokens * min(config.top_k_mlp * room, config.n_experts))
    touched = 2 * device_bytes(args) + 3 * used + TOUCHED * config.num_blocks * tokens
    return sum(known.seconds(flops / mesh.size, touched, links.sent, links.network))


def least_bytes(config: Any, mesh: Mesh, args: tuple[Any, ...]) -> float:
    """Memory of a device that a step of the built-in model needs at least: its state, and what a micro-batch keeps."""
    numbers = 2 if config.bf16_compute or config.use_bf16 else 4
    kept = KEPT[config.gradient_checkpointing] * config.num_blocks * config.dim * numbers
    tensor = mesh.shape.get(TENSOR, 1)
    return device_bytes(args) + kept * _tokens(mesh, args[-1]) / max(1, config.grad_accum) / tensor
