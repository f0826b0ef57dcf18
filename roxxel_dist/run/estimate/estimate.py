"""The `plan` command: an estimate of a run of a Config, without training or allocating.

Steps are compiled from shapes alone, so the model may be larger than the memory of this machine.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.cluster.determinism import enable_compilation_cache, make_deterministic, pin_for_run
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.cluster.mesh import batch_sharding, simulate_devices
from roxxel_dist.cluster.xla_flags import SAVE_MEMORY, UNOPTIMIZED
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.devices.targets import Target, check_compiler, parse_target
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.attention.kernels import score_bytes
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.param_count import count_by_module
from roxxel_dist.place.directory import CONFIG, no_run
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.extras import pip_install
from roxxel_dist.run.batch import saved_metadata
from roxxel_dist.run.components import RunComponents, build_components, open_corpus, temporary_folder
from roxxel_dist.run.estimate.step_memory import ExactMemory, StepMemory, memory_analysis
from roxxel_dist.run.estimate.target_phases import cure, on_target
from roxxel_dist.run.estimate.target_process import Report, call_for_target
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase
from roxxel_dist.run.metadata import data_of, saved_config
from roxxel_dist.run.record import check_resumable, kernel_begun_with
from roxxel_dist.run.report import read_runs
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.exact.layout import can_cut_rows, check_shapes
from roxxel_dist.train.resume import last_step, max_steps_note
from roxxel_dist.train.step.batch_layout import BatchLayout, batch_layout, cut_rows_text
from roxxel_dist.train.step.by_parameter import ParameterGroup, groups_of
from roxxel_dist.train.step.compile import AotCompiler, batch_key
from roxxel_dist.train.step.optimizer import check_update, for_run, schedule_of
from roxxel_dist.train.step.schedule import scaling_note
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import micro_batches
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.train.steps import ShardedSteps, Steps
from roxxel_dist.train.validation.evaluator import Validation
from roxxel_dist.train.validation.validation_rows import ValidationRows
from roxxel_dist.utils.display import size
from roxxel_dist.weights.base import check_weights, find_checkpoint, with_base

USUAL_MFU = 0.4
"""Model FLOPs utilisation if no speed was measured: that of a dense model on a few accelerators."""
SIMULATED = SAVE_MEMORY | UNOPTIMIZED
"""Compiler options for simulated devices, whose code never runs."""


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """The inputs of an estimate, besides config and data."""

    run: Path | None = None
    """A run directory whose data, plan and speed are used."""
    devices: int | None = None
    """CPU devices to simulate; None: the real devices."""
    target: str | None = None
    """Devices that are not here, such as "v5e:4x4" or "h100:2x8": their own compiler compiles every step."""
    processes: int | None = None
    """Processes that share them; None: the real processes."""
    tokens_per_s: float | None = None
    """Over all devices."""
    device_memory_gb: float | None = None
    """Memory of a device in 10^9 bytes; None: as the device reports."""

    def __post_init__(self) -> None:
        for name in ("devices", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1, or left out")
        if self.target is not None:
            parse_target(self.target)
            if self.devices is not None:
                raise UserError(
                    f"target is {self.target}, and devices is {self.devices}: leave one out; a target has its own "
                    f"devices, and those of devices are simulated on CPU"
                )
        for name in ("tokens_per_s", "device_memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} is {value}: it must be above 0, and finite, or left out")


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """One phase, up to the last step of the run."""

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
    """That its steps read."""
    predicted_tokens: int
    """That its steps compute: of each row all but one."""
    flops_per_token: float
    """Floating-point operations of a step for a computed token, forward and backward."""
    flops: float
    """Of all its steps."""
    layout: BatchLayout
    rows_a_process: int
    """Rows of a batch that a process reads, at most."""
    memory: StepMemory | None
    """Of each device; None if the compiler failed because it does not fit."""
    seconds: float | None
    """Of its steps only, without validations, saves and compilations; None if no speed is known."""
    attention: str
    """The attention kernel; for a user-defined model, the kernel in the config."""
    score_bytes: int | None
    """Bytes of each device for the attention scores of a layer; None for a user-defined model."""
    target: TargetPhase | None
    """What its steps cost on the target; None without one."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The estimate of a run. Bytes are of one device."""

    description: str
    """The table of phases, and the steps at which something changes."""
    phases: tuple[PhaseEstimate, ...]
    steps: int
    tokens: int
    """That its steps read."""
    predicted_tokens: int
    """That its steps compute: of each row all but one. Speeds are of these."""
    flops: float
    notes: tuple[str, ...]
    datasets: Mapping[str, Mapping[str, float]]
    """"tokens" to train on and "passes" over them, by name."""
    validation: Mapping[str, int]
    """Tokens by name; "" is the held-out part."""
    validation_rows: ValidationRows
    """Which of them a validation reads: at most `eval_iters` batches of each, of a shape for each length of rows."""
    validated_on: str
    """These batches by phase, in words."""
    vocab_size: int
    parameters: int
    trainable_parameters: int
    """The parameters without those that adapters freeze."""
    parts: Mapping[str, int]
    """Parameters by top-level part of the model."""
    updates: tuple[ParameterGroup, ...]
    """Which optimizer updates which of them."""
    state: Mapping[str, int]
    """Bytes of "parameters", "optimizer", "average" where the run keeps one, and "other"."""
    arrays: tuple[Mapping[str, Any], ...]
    """{"name", "shape", "dtype", "cut", "device_bytes"} of every parameter; cut: an axis of the mesh a dimension."""
    fsdp: bool
    grad_accum: int
    devices: int
    processes: int
    platform: str
    device_kind: str
    simulated: bool
    target: str | None
    memory_limit: int | None
    """Memory of a device in bytes, if known."""
    seconds: float | None
    tokens_per_s: float | None
    """Given, or measured: computed tokens."""
    speed: str
    """Where the time comes from."""
    problems: tuple[str, ...]
    """Reasons why it cannot run."""


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
        return for_target(_estimate_in_process, config, data_path, request)
    with open_components(config, data_path, request, compiler, folder) as (components, notes):
        return _estimate(components, request, notes, compiler)


@contextlib.contextmanager
def open_components(
    config: Any,
    data_path: str | Path | None,
    request: EstimateRequest,
    compiler: TargetCompiler | None,
    folder: Path | None,
) -> Iterator[tuple[RunComponents, list[str]]]:
    """(the components of what would be trained, notes about them); the arguments are those of `estimate`."""
    with contextlib.ExitStack() as held:
        with usage_errors():
            saved = {} if request.run is None else _saved(request.run)
            config, note = with_base(config)
            config = config.with_absolute_paths()
            config.validate()
            if saved:  # what `train` refuses of a resumed run, and takes of one that is amended
                check_resumable(saved, config, amend=True)
            if config.deterministic:
                make_deterministic()
            if request.devices:
                simulate_devices(request.devices)
            pin_for_run(config.virtual_shards, None)
        if compiler is None:
            make_devices()
        with usage_errors():
            devices, here = request.devices, jax.device_count() if compiler is None else len(compiler.devices)
            if devices and here != devices:
                raise UserError(
                    f"devices is {devices}, and the processes of this job have {here}: leave it out, or plan in a "
                    f"process that is not launched"
                )
            if request.processes and here % request.processes:
                raise UserError(
                    f"processes is {request.processes}, which does not divide the {here} device(s): each has as many "
                    f"as the others, so use a divisor, or other --devices"
                )
            path = config.primary_path(data_path) or data_of(saved, request.run)
            if saved.get("init_from") == config.init_from:
                config = dataclasses.replace(config, init_from=None)  # a started run no longer needs its init_from
            notes = [note] if note and not saved else []
            begun_with = kernel_begun_with(saved)
            kernel = begun_with if config.attention == "auto" else config.attention
            if devices and kernel in ("cudnn", "splash"):
                config, begun_with = dataclasses.replace(config, attention="xla"), None
                notes.append(
                    f"attention by {kernel} is not simulated: the memory of phases is that of xla, in its place"
                )
            into = folder / "data" if folder is not None else held.enter_context(temporary_folder(path, "plan"))
            data = held.enter_context(open_corpus(config, path, into))
            on = None if compiler is None else compiler.devices
            components = build_components(config, data, begun_with=begun_with, devices=on)
            notes += filter(None, [components.slower_attention])
            if data.tokenizer is not None:
                data.tokenizer.encode(config.sample_prompt)
        if path is not None and not is_tokens(path):
            notes.append(f"{path} is text: shards of it were made, and are gone")
        yield components, notes


def for_target(
    function: Callable[..., Any], config: Any, data_path: str | Path | None, request: EstimateRequest
) -> Any:
    """`function(report, target, config, data_path, request, folder)` in a process with the target's environment; the
    folder is for shards of text."""
    target = parse_target(request.target or "")
    if "ROXXEL_PROCESS_ID" in os.environ:
        raise UserError(f"target is {target.name}: one process compiles for it, so plan in one that is not launched")
    check_compiler(target, pip_install(target.extra()))
    with interrupt.temporary_folder(".plan-", Path.cwd()) as folder:
        return call_for_target(target, function, config, data_path, request, folder)


def _estimate_in_process(report: Report, target: Target, *args: Any) -> RunEstimate:
    """`estimate` in a process with the target's environment."""
    config, data_path, request, folder = args
    if config.virtual_shards:  # before the compiler makes jax's devices; see `measure_exact`
        pin_for_run(config.virtual_shards, None)
        simulate_devices(target.device_count)
    compiler = TargetCompiler(target, report, request.device_memory_gb)
    return estimate(config, data_path, request, compiler=compiler, folder=folder)


def _saved(run: Path) -> dict[str, Any]:
    """The config of a run, with its record."""
    read_runs([run])  # raises for a path that is not a run, and suggests the closest run
    if not (run / CONFIG).exists():
        raise UserError(no_run(run))
    return saved_config(run)


def _estimate(
    components: RunComponents, request: EstimateRequest, notes: list[str], target: TargetCompiler | None
) -> RunEstimate:
    """The estimate of a run's components. Checks come in the same order as in `Trainer`."""
    if target is None:
        enable_compilation_cache()
    processes = request.processes or (jax.process_count() if target is None else target.hosts)
    with usage_errors():
        mesh = components.mesh(processes if target is not None else request.processes)
        config, curriculum = components.config, components.curriculum
        options, grad_accum, sharding = components.options, components.grad_accum, batch_sharding(mesh)
        check_shapes(
            curriculum.shapes,
            grad_accum,
            options.virtual_shards,
            mesh,
            cuts_rows=can_cut_rows(components.build, components.loss),
        )
        saved = None if request.run is None else saved_metadata(request.run)
        plan = plan_of(curriculum, config.seed, saved)
        optimizer = for_run(components.optimizer, plan.shapes, {} if saved is None else saved.schedule)
        components = dataclasses.replace(components, optimizer=optimizer)
        last = last_step(plan, options)
        notes += _virtual_shards_notes(options.virtual_shards, curriculum, target)
        weights = None if options.init_from is None else find_checkpoint(options.init_from)
        steps = components.steps(mesh, plan.total_steps)
        split, state, hparams = steps.split, steps.state, steps.hparams
        check_update(optimizer, state.params, state.opt_state)
        if weights is not None:
            check_weights(weights, split.of_base(state.params, hparams))
            notes.append(f"the weights are those of {weights}")
        compiler = AotCompiler(mesh, SIMULATED if request.devices else None)
        sets = components.validation, curriculum.primary_streamer
        rows = _validation_rows(components, plan, saved)
        validation = Validation(*sets, steps.evaluate(), compiler, sharding, rows)
        validation.check(*plan.shapes)
        datasets = {**curriculum.datasets, **components.validation}
        steps.check_vocabulary(plan.shapes[0], datasets)
    phase_spans = spans(plan, last)
    batches = [Stream(plan, curriculum.datasets, sharding, stop - 1, grad_accum).abstract() for _, stop in phase_spans]
    if config.model is not None:
        steps.check_model_state(batches[0])
    # Outside usage_errors: an error while tracing is in the model or the loss function, and needs a traceback.
    with contextlib.closing(compiler):
        compiled = (
            _on_devices(compiler, steps, batches)
            if target is None
            else on_target(target, components, steps, plan, [stop - 1 for _, stop in phase_spans], batches, validation)
        )
    notes += filter(None, [scaling_note(schedule_of(optimizer, plan.total_steps), plan.shapes)])
    notes += filter(None, [max_steps_note(plan, options)])
    notes += dict.fromkeys(filter(None, map(steps.accumulation, batches)))
    with usage_errors():
        speed, tokens_per_s, flops_per_s = _speed(request, mesh, bf16=options.bf16_compute or options.use_bf16)

    view = TrainView(split, state, hparams)
    flops_of = view.flops_per_token()
    phases = [
        _phase_on_mesh(
            components,
            plan,
            span,
            sharding,
            processes,
            flops_of=flops_of,
            speeds=(tokens_per_s, flops_per_s),
            memory=needs,
            target=cost,
        )
        for span, (needs, cost) in zip(phase_spans, compiled, strict=True)
    ]
    params: dict[str, Any] = {**view.frozen, **view.params}
    other = {name: leaf for name, leaf in hparams.items() if name not in split.frozen.names}
    limit = _memory_limit(mesh, request, target)
    problems = [
        _problem(phase, limit, config, mesh.size)
        if target is None
        else _target_problem(phase, target, components, plan, batch)
        for phase, batch in zip(phases, batches, strict=True)
    ]
    device = mesh.devices.flat[0]
    return RunEstimate(
        description=plan.describe(),
        phases=tuple(phases),
        steps=last,
        tokens=plan.tokens(last),
        predicted_tokens=plan.predicted_tokens(last),
        flops=sum(phase.flops for phase in phases),
        notes=tuple(notes),
        datasets=_datasets(plan, last),
        validation=dict(rows.tokens),
        validation_rows=rows,
        validated_on=rows.by_phase(plan.shapes),
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
        grad_accum=grad_accum,
        devices=mesh.size,
        processes=processes,
        platform=device.platform,
        device_kind=device.device_kind,
        simulated=request.devices is not None,
        target=request.target,
        memory_limit=limit,
        seconds=sum(phase.seconds or 0.0 for phase in phases) if tokens_per_s or flops_per_s else None,
        tokens_per_s=tokens_per_s,
        speed=speed,
        problems=tuple(filter(None, problems)),
    )


def _virtual_shards_notes(count: int, curriculum: Curriculum, target: TargetCompiler | None) -> list[str]:
    """What virtual shards change in the estimate, and how they cut rows."""
    if not count:
        return []
    texts = [cut_rows_text(count, shape.batch_size, shape.seq_len) for shape in curriculum.shapes]
    cuts = [f"phase {i + 1}: virtual_shards is {count}, {text}" for i, text in enumerate(texts) if text]
    if target is not None:
        return [
            "memory is that of the largest of the programs of a step: what else is alive then, such as gradients of "
            "other shards, comes to it",
            *cuts,
        ]
    return cuts


def _phase_on_mesh(
    components: RunComponents,
    plan: Plan,
    span: tuple[int, int],
    sharding: NamedSharding,
    processes: int,
    *,
    flops_of: Callable[[int], float],
    speeds: tuple[float | None, float | None],
    memory: StepMemory | None,
    target: TargetPhase | None,
) -> PhaseEstimate:
    """The estimate of a phase; `speeds` are tokens and FLOPs in a second, of which one is known or none."""
    first, stop = span
    tokens_per_s, flops_per_s = speeds
    shape = plan.segment(stop - 1).shape
    computed = plan.predicted_tokens(stop) - plan.predicted_tokens(first)
    flops_per_token = flops_of(shape.seq_len - 1)
    shards = components.options.virtual_shards
    layout = batch_layout(sharding, shape.batch_size, shape.seq_len, components.grad_accum, shards)
    flops, seconds = computed * flops_per_token, None
    if tokens_per_s:
        seconds = computed / tokens_per_s
    elif flops_per_s:
        seconds = flops / (flops_per_s * layout.pieces * layout.together)
    return _phase(
        components,
        plan,
        span,
        layout,
        processes,
        tokens=plan.tokens(stop) - plan.tokens(first),
        predicted_tokens=computed,
        flops_per_token=flops_per_token,
        flops=flops,
        seconds=seconds,
        memory=memory,
        target=target,
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


def _phase(
    components: RunComponents, plan: Plan, span: tuple[int, int], layout: BatchLayout, processes: int, **costs: Any
) -> PhaseEstimate:
    """The estimate of the steps of `span`, [first, stop)."""
    (first, stop), shape = span, plan.segment(span[1] - 1).shape
    own_rows = shape.batch_size // layout.row_pieces * -(-layout.row_pieces // processes)
    if layout.shards:
        own_rows = shape.batch_size  # each device holds all
    return PhaseEstimate(
        phase=plan.phase(stop - 1) + 1,
        first_step=first + 1,
        steps=stop - first,
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        weights={name: share / sum(each for _, each in shape.weights) for name, share in shape.weights},
        blend=shape.blend,
        packing=shape.packing,
        layout=layout,
        rows_a_process=own_rows,
        attention=components.kernel,
        score_bytes=_score_bytes(shape, layout, components),
        **costs,
    )


def _memory_limit(mesh: Mesh, request: EstimateRequest, target: TargetCompiler | None) -> int | None:
    """The memory of a device in bytes, if known."""
    if target is not None:
        return target.device_bytes
    if request.device_memory_gb:
        return int(request.device_memory_gb * 1e9)
    stats = [each.memory_stats() or {} for each in mesh.local_devices]
    return min(filter(None, (stat.get("bytes_limit") for stat in stats)), default=None)


def plan_of(curriculum: Curriculum, seed: int, saved: CheckpointMetadata | None) -> Plan:
    """The plan; that of a run, if it is of these phases: it includes amendments and skipped steps."""
    kept = None if saved is None else Plan.from_state(saved.plan)
    if kept is not None and (kept.shapes, kept.seed) == (curriculum.shapes, seed):
        return kept
    return curriculum.plan(seed)


def _validation_rows(components: RunComponents, plan: Plan, saved: CheckpointMetadata | None) -> ValidationRows:
    """The rows of a validation: as the run has them, if it began."""
    tokens = {name: data.num_tokens for name, data in components.validation.items()}
    begun = {} if saved is None else saved.validation
    known = {"batches": (), **begun, "eval_iters": components.options.eval_iters, "tokens": tokens}
    return ValidationRows.from_dict(known).with_phases(plan.shapes)


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


def _on_devices(
    compiler: AotCompiler, steps: Steps, batches: Sequence[Any]
) -> list[tuple[StepMemory | None, TargetPhase | None]]:
    """For each phase (the memory of its training step, None), by the compiler of the devices here."""
    return [(_step_memory(compiler, steps, batch), None) for batch in batches]


def _step_memory(compiler: AotCompiler, steps: Steps, batch: Any) -> StepMemory | None:
    """The memory of a step; None if the compiler fails because it does not fit."""
    exact = ExactMemory.of_step(steps, batch) if isinstance(steps, ShardedSteps) else None
    step: Any = exact or steps.train
    compiler.prepare(batch_key(batch), step, steps.state, steps.hparams, batch)
    try:
        found = compiler.get(batch_key(batch))
        return found if exact else memory_analysis(found)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return None


def spans(plan: Plan, last: int) -> list[tuple[int, int]]:
    """[first, stop) of every phase that begins before the step `last`."""
    ends = list(itertools.accumulate(shape.steps for shape in plan.shapes))
    return [(first, min(stop, last)) for first, stop in itertools.pairwise([0, *ends]) if first < last]


def _speed(request: EstimateRequest, mesh: Mesh, *, bf16: bool) -> tuple[str, float | None, float | None]:
    """(where it comes from, tokens/s over all devices if known, else FLOP/s of one device if known)."""
    if request.tokens_per_s:
        return "given", request.tokens_per_s, None
    if request.run is not None and (measured := read_runs([request.run])[0].numbers()["tokens_per_s"]):
        return f"measured in {request.run}, the median of what it logged", measured, None
    peak = peak_flops(mesh.devices.flat[0].device_kind) if bf16 else None
    if peak is None:
        return "unknown: give --tokens_per_s", None, None
    of_peak = f"at an MFU of {USUAL_MFU:.0%} of the {peak / 1e12:,.0f} TFLOP/s (bfloat16) of each device"
    return f"estimated, {of_peak}", None, USUAL_MFU * peak


def _datasets(plan: Plan, last: int) -> dict[str, dict[str, float]]:
    """Readable tokens of each data set, and passes over them after `last` steps."""
    segment = plan.segment(last - 1)
    reached, sets = segment.after(last - segment.first_step), {}
    for name, source in plan.amendments[-1].sources.items():
        units, cursor = source.units, reached[name]
        passes = cursor.pass_index + 1 - (cursor.remaining.size - cursor.used) / units.count
        sets[name] = {"tokens": units.tokens, "passes": passes}
    return sets


def _target_problem(
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


def _problem(phase: PhaseEstimate, limit: int | None, config: Any, devices: int) -> str | None:
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
