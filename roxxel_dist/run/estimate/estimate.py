"""The `plan` command: an estimate of a run of a Config, without training or allocating.

Steps are compiled from shapes alone, so the model may be larger than the memory of this machine.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.cluster.determinism import enable_compilation_cache, pin_for_run
from roxxel_dist.cluster.mesh import batch_sharding, simulate_devices
from roxxel_dist.cluster.xla_flags import SAVE_MEMORY, UNOPTIMIZED
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.devices.targets import Target, is_too_large
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.attention.kernels import score_bytes
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import count_by_module
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.curriculum import saved_metadata
from roxxel_dist.run.estimate.figures import EstimateRequest, PhaseEstimate, RunEstimate
from roxxel_dist.run.estimate.inputs import open_components, plan_of, problem, run_for_target, spans, target_problem
from roxxel_dist.run.estimate.target_process import Report
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase, measure_phases
from roxxel_dist.run.report import read_runs
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.exact.layout import can_cut_rows, check_shapes
from roxxel_dist.train.resume import last_step, max_steps_note
from roxxel_dist.train.step.batch_layout import BatchLayout, batch_layout, cut_rows_text
from roxxel_dist.train.step.by_parameter import groups_of
from roxxel_dist.train.step.compile import AotCompiler, StepMemory
from roxxel_dist.train.step.optimizer import check_update, for_run, schedule_of
from roxxel_dist.train.step.schedule import scaling_note
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import micro_batches
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import Steps
from roxxel_dist.train.validation.evaluator import Validation, ValidationRows
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.base import check_weights, find_checkpoint

SIMULATED = SAVE_MEMORY | UNOPTIMIZED
"""Compiler options for simulated devices, whose code never runs."""


def estimate(
    config: Any,
    data_path: str | Path | None,
    request: EstimateRequest,
    *,
    compiler: TargetCompiler | None = None,
    folder: Path | None = None,
) -> RunEstimate:
    """Estimate a run of `config` on the data.

    Shards of text are made in a temporary folder. Nothing else is written, except compiled programs. With a target all
    of it is done by a process of its own, which ends with it.

    Args:
        config: a `Config`; it is not changed.
        data_path: a text file, a folder of text, or shards.
        request: the run, the devices and the speed.
        compiler: of the target, in a process of its own.
        folder: for shards of text in such a process.

    Raises:
        UserError: a mistake in the config, the data or the request, with the message of `train`.
        MissingCompiler: the target's compiler is not installed.
    """
    if request.target is not None and compiler is None:
        return run_for_target(_estimate_in_process, config, data_path, request)
    with open_components(config, data_path, request, compiler, folder) as (components, notes):
        return _estimate(components, request, notes, compiler)


def _estimate_in_process(report: Report, target: Target, *args: Any) -> RunEstimate:
    """`estimate` in a process with the target's environment."""
    config, data_path, request, folder = args
    if config.virtual_shards:  # before the compiler makes jax's devices; see `Steps.simulated`
        pin_for_run(config.virtual_shards, None)
        simulate_devices(target.device_count)
    compiler = TargetCompiler(target, report, request.device_memory_gb)
    return estimate(config, data_path, request, compiler=compiler, folder=folder)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A run whose checks are done, and of which nothing is compiled yet."""

    components: RunComponents
    plan: Plan
    last: int
    """The last step."""
    steps: Steps
    sharding: NamedSharding
    """Of a batch."""
    compiler: AotCompiler
    validation: Validation
    rows: ValidationRows
    notes: tuple[str, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[first, stop) of every phase."""
        return spans(self.plan, self.last)

    @property
    def batches(self) -> list[Any]:
        """A batch of every phase, as shapes."""
        datasets, grad_accum = self.components.curriculum.datasets, self.components.grad_accum
        return [Stream(self.plan, datasets, self.sharding, stop - 1, grad_accum).abstract() for _, stop in self.spans]


def _plan(components: RunComponents, request: EstimateRequest, mesh: Mesh) -> _Planned:
    """The checks of a run, in the same order as in `Trainer`. Raises ValueError."""
    config, curriculum, options = components.config, components.curriculum, components.options
    cuts_rows = can_cut_rows(components.build, components.loss)
    check_shapes(curriculum.shapes, components.grad_accum, options.virtual_shards, mesh, cuts_rows=cuts_rows)
    saved = None if request.run is None else saved_metadata(request.run)
    plan = plan_of(curriculum, config.seed, saved)
    optimizer = for_run(components.optimizer, plan.shapes, {} if saved is None else saved.schedule)
    components = dataclasses.replace(components, optimizer=optimizer)
    texts = [cut_rows_text(options.virtual_shards, each.batch_size, each.seq_len) for each in curriculum.shapes]
    notes = [
        f"phase {i + 1}: virtual_shards is {options.virtual_shards}, {text}" for i, text in enumerate(texts) if text
    ]
    weights = None if options.init_from is None else find_checkpoint(options.init_from)
    steps = components.steps(mesh, plan.total_steps)
    state, hparams, sharding = steps.state, steps.hparams, batch_sharding(mesh)
    check_update(optimizer, state.params, state.opt_state)
    if weights is not None:
        check_weights(weights, steps.split.of_base(state.params, hparams))
        notes.append(f"the weights are those of {weights}")
    compiler = AotCompiler(mesh, SIMULATED if request.devices else None)
    rows = _validation_rows(components, plan, saved)
    sets = components.validation, curriculum.primary_streamer
    validation = Validation(*sets, steps.evaluate(), compiler, sharding, rows)
    validation.check(*plan.shapes)
    steps.check_vocabulary(plan.shapes[0], {**curriculum.datasets, **components.validation})
    return _Planned(
        components=components,
        plan=plan,
        last=last_step(plan, options),
        steps=steps,
        sharding=sharding,
        compiler=compiler,
        validation=validation,
        rows=rows,
        notes=tuple(notes),
    )


def _costs(
    planned: _Planned, target: TargetCompiler | None, batches: Sequence[Any]
) -> Sequence[tuple[StepMemory | None, TargetPhase | None]]:
    """For each phase (the memory of its training step or None if it does not fit, what its steps cost on a target)."""
    steps, plan = planned.steps, planned.plan
    if target is not None:
        last_steps = [stop - 1 for _, stop in planned.spans]
        return measure_phases(target, planned.components, steps, plan, last_steps, batches, planned.validation)

    def memory(batch: Any) -> StepMemory | None:
        try:
            return steps.memory(planned.compiler, batch)
        except jax.errors.JaxRuntimeError as error:
            if not is_too_large(str(error)):
                raise
        return None

    return [(memory(batch), None) for batch in batches]


def _estimate(
    components: RunComponents, request: EstimateRequest, notes: list[str], target: TargetCompiler | None
) -> RunEstimate:
    """The estimate of a run's components."""
    if target is None:
        enable_compilation_cache()
    processes = request.processes or (jax.process_count() if target is None else target.hosts)
    with usage_errors():
        mesh = components.mesh(processes if target is not None else request.processes)
        planned = _plan(components, request, mesh)
    components, plan, steps, batches = planned.components, planned.plan, planned.steps, planned.batches
    config, options, optimizer = components.config, components.options, components.optimizer
    # Outside usage_errors: an error while tracing is in the model or the loss function, and needs a traceback.
    if config.model is not None:
        steps.check_model_state(batches[0])
    with contextlib.closing(planned.compiler):
        costs = _costs(planned, target, batches)
    more = scaling_note(schedule_of(optimizer, plan.total_steps), plan.shapes), max_steps_note(plan, options)
    notes = [*notes, *planned.notes, *filter(None, [*more, *dict.fromkeys(map(steps.accumulation, batches))])]
    with usage_errors():
        speed = Speed.of_request(request, mesh, bf16=options.bf16_compute or options.use_bf16)

    split, state, hparams = steps.split, steps.state, steps.hparams
    view = TrainView(split, state, hparams)
    flops_of = view.flops_per_token()
    phases = [
        phase_estimate(
            components,
            plan,
            span,
            planned.sharding,
            processes,
            flops_of=flops_of,
            speed=speed,
            memory=memory,
            target=cost,
        )
        for span, (memory, cost) in zip(planned.spans, costs, strict=True)
    ]
    params: dict[str, Any] = {**view.frozen, **view.params}
    other = {name: leaf for name, leaf in hparams.items() if name not in split.frozen.names}
    limit = _memory_limit(mesh, request, target)
    problems = [
        problem(phase, limit, config, mesh.size)
        if target is None
        else target_problem(phase, target, components, plan, batch)
        for phase, batch in zip(phases, batches, strict=True)
    ]
    device, seconds = mesh.devices.flat[0], [phase.seconds for phase in phases]
    return RunEstimate(
        description=plan.describe(),
        phases=tuple(phases),
        steps=planned.last,
        tokens=plan.tokens(planned.last),
        predicted_tokens=plan.predicted_tokens(planned.last),
        flops=sum(phase.flops for phase in phases),
        notes=tuple(notes),
        datasets=_datasets(plan, planned.last),
        validation=dict(planned.rows.tokens),
        validation_rows=planned.rows,
        validated_on=planned.rows.by_phase(plan.shapes),
        vocab_size=components.vocab_size,
        parameters=sum(leaf.size for leaf in params.values()),
        trainable_parameters=sum(leaf.size for leaf in view.params.values()),
        parts=count_by_module(params),
        updates=groups_of(config.optimizer, state.params, split.params.matrices, view.frozen),
        state={
            "parameters": device_bytes((state.params, view.frozen)),
            "optimizer": device_bytes(view.optimizer),
            **({"average": device_bytes(view.evaluated)} if view.evaluated is not view.params else {}),
            "other": device_bytes((state.step, state.rest, state.health, other)),
        },
        arrays=_arrays(params),
        fsdp=options.fsdp,
        grad_accum=components.grad_accum,
        devices=mesh.size,
        processes=processes,
        platform=device.platform,
        device_kind=device.device_kind,
        simulated=request.devices is not None,
        target=request.target,
        memory_limit=limit,
        seconds=None if None in seconds else sum(each or 0.0 for each in seconds),
        tokens_per_s=speed.tokens_per_s,
        speed=speed.source,
        problems=tuple(filter(None, problems)),
    )


def _arrays(params: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """`RunEstimate.arrays` of parameters by name."""
    return tuple(
        {
            "name": name,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "cut": [None if axis is None else str(axis) for axis in leaf.sharding.spec],
            "device_bytes": device_bytes(leaf),
        }
        for name, leaf in params.items()
    )


def _memory_limit(mesh: Mesh, request: EstimateRequest, target: TargetCompiler | None) -> int | None:
    """The memory of a device in bytes, if known."""
    if target is not None:
        return target.device_bytes
    if request.device_memory_gb:
        return int(request.device_memory_gb * 1e9)
    stats = [each.memory_stats() or {} for each in mesh.local_devices]
    return min(filter(None, (stat.get("bytes_limit") for stat in stats)), default=None)


def _validation_rows(components: RunComponents, plan: Plan, saved: CheckpointMetadata | None) -> ValidationRows:
    """The rows of a validation: as the run has them, if it began."""
    tokens = {name: data.num_tokens for name, data in components.validation.items()}
    begun = {} if saved is None else saved.validation
    known = {"batches": (), **begun, "eval_iters": components.options.eval_iters, "tokens": tokens}
    return ValidationRows.from_dict(known).with_phases(plan.shapes)


def _datasets(plan: Plan, last: int) -> dict[str, dict[str, float]]:
    """Readable tokens of each data set, and passes over them after `last` steps."""
    segment = plan.segment(last - 1)
    reached, sets = segment.after(last - segment.first_step), {}
    for name, source in plan.amendments[-1].sources.items():
        units, cursor = source.units, reached[name]
        passes = cursor.pass_index + 1 - (cursor.remaining.size - cursor.used) / units.count
        sets[name] = {"tokens": units.tokens, "passes": passes}
    return sets


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
        """The speed as given, as measured in the run, or as usual on such devices."""
        if request.tokens_per_s:
            return cls(source="given", tokens_per_s=request.tokens_per_s)
        if (run := request.run) is not None and (measured := read_runs([run])[0].numbers()["tokens_per_s"]):
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
