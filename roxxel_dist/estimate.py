"""What training a config costs, found out in a second: nothing is compiled, and nothing allocated.

One phase of a run that has not begun: its work, its memory, its time.

What a run of a Config would be: its steps, parameters, memory and time, found out without training or allocating.

What a run would be, as text for people.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.builders import RunComponents, build_components, folder_for_now, open_corpus
from roxxel_dist.cluster.determinism import enable_compilation_cache, make_deterministic, pin_threads
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.cluster.mesh import batch_sharding, simulate_devices
from roxxel_dist.config import usage_errors
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.inspect_batch import saved_plan
from roxxel_dist.model.param_count import by_part
from roxxel_dist.report import duration, read_runs
from roxxel_dist.run_directory import CONFIG
from roxxel_dist.run_metadata import data_of, saved_config
from roxxel_dist.stream import Stream
from roxxel_dist.train.ahead import Layout, StepMemory, arrays, layout, look_ahead, memory_limit, memory_of
from roxxel_dist.train.compile import AotCompiler, batch_key
from roxxel_dist.train.evaluator import Validation
from roxxel_dist.train.init_from import check_weights, find_checkpoint, with_base
from roxxel_dist.train.resume import last_step, max_steps_note
from roxxel_dist.train.throughput import device_bytes, peak_flops
from roxxel_dist.train.train_state import TrainView
from roxxel_dist.train.train_step import check_batches, check_vocabulary, make_eval_step, make_step

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


def step_memory(
    compiler: AotCompiler, step: Callable[..., Any], state: Any, settings: Any, stream: Stream
) -> StepMemory | None:
    """What the stream's next step needs of each device: compiled, not run. None where it does not fit."""
    batch = stream.abstract()
    compiler.prepare(batch_key(batch), step, state, settings, batch)
    try:
        return memory_of(compiler.get(batch_key(batch)))
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


SIMULATED = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""How steps are compiled for simulated devices: in an order that saves memory, as compilers for accelerators choose and
the one for CPU does not; and with no effort for code that never runs, in half the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is made for, beside config and data."""

    run: Path | None = None
    """A run directory whose data, plan and speed are taken."""
    devices: int | None = None
    """CPU devices to simulate; those that are there where None."""
    processes: int | None = None
    """Processes that share them; those that do where None."""
    tokens_per_s: float | None = None
    """Over all devices."""
    device_memory_gb: float | None = None
    """10^9 bytes that a device has; what it says where None."""

    def __post_init__(self) -> None:
        for name in ("devices", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1, or left out")
        for name in ("tokens_per_s", "device_memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}: it must be above 0, and finite, or left out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a run would be. Bytes are of one device."""

    description: str
    """The table of phases, and the steps at which something changes."""
    phases: tuple[PhaseOutlook, ...]
    steps: int
    tokens: int
    flops: float
    notes: tuple[str, ...]
    datasets: Mapping[str, Mapping[str, float]]
    """"tokens" to train on and "passes" over them, by name."""
    validation: Mapping[str, int]
    """Tokens by name; "" is what is held out."""
    vocab_size: int
    parameters: int
    trainable_parameters: int
    """Of them: all but what is frozen beside adapters."""
    parts: Mapping[str, int]
    """Parameters by top-level part of the model."""
    state: Mapping[str, int]
    """Bytes of "parameters", "optimizer" and "other"."""
    arrays: tuple[Mapping[str, Any], ...]
    """Every parameter, as `train.ahead.arrays` tells."""
    fsdp: bool
    grad_accum: int
    devices: int
    processes: int
    platform: str
    device_kind: str
    simulated: bool
    memory_limit: int | None
    """Bytes that a device has, where that is known."""
    seconds: float | None
    tokens_per_s: float | None
    """The speed that the time is told for."""
    speed: str
    """Where it comes from."""
    problems: tuple[str, ...]
    """Why it cannot run."""


def outlook(config: Any, data_path: str | Path | None, asked: Asked) -> Outlook:
    """What a run of `config` on the data would be.

    Text is made into shards in a folder that is gone afterwards; nothing else is written, beside compiled programs.
    Programs are compiled from shapes alone, so the model may be larger than the memory of this machine.

    Args:
        config: a `Config`; it is left as it is.
        data_path: a text file, a folder of text, or shards.
        asked: what it is made for.

    Raises:
        UsageError: the config, the data or what is asked do not allow it, as `train` would say.
    """
    with usage_errors():
        saved = _saved(asked.run)
        config, told = with_base(config)
        config = config.with_absolute_paths()
        config.validate()
        if config.deterministic:
            make_deterministic()
        if asked.devices:
            simulate_devices(asked.devices)
    pin_threads()
    initialize()
    with contextlib.ExitStack() as held:
        with usage_errors():
            _check_shares(asked)
            path = config.primary_path(data_path) or data_of(saved, asked.run)
            if saved.get("init_from") == config.init_from:
                config = dataclasses.replace(config, init_from=None)  # what a run has begun with, it needs no more
            folder = held.enter_context(folder_for_now(path, "plan"))
            made = build_components(config, held.enter_context(open_corpus(config, path, folder)))
            if made.data.tokenizer is not None:
                made.data.tokenizer.encode(config.sample_prompt)
        notes = (told,) if told and not saved else ()
        notes += () if path is None or is_tokens(path) else (f"{path} is text: shards of it were made, and are gone",)
        return _look(made, asked, notes)


def _saved(run: Path | None) -> dict[str, Any]:
    """The config of a run, with its record."""
    if run is None:
        return {}
    read_runs([run])  # its message for what is no run names the nearest that is
    if not (run / CONFIG).exists():
        raise ValueError(f"{run} has no {CONFIG}: a run of a bare Trainer has no config to plan with")
    return saved_config(run)


def _check_shares(asked: Asked) -> None:
    if asked.devices and jax.device_count() != asked.devices:
        raise ValueError(
            f"devices is {asked.devices}, and the processes of this job have {jax.device_count()}: leave it out, or "
            f"plan in a process that is not launched"
        )
    if asked.processes and jax.device_count() % asked.processes:
        raise ValueError(
            f"processes is {asked.processes}, which does not divide the {jax.device_count()} device(s): each has "
            f"as many as the others, so use a divisor, or other --devices"
        )


def _look(made: RunComponents, asked: Asked, notes: tuple[str, ...]) -> Outlook:
    """The outlook of a recipe. What cannot be is found in the order in which a `Trainer` finds it."""
    enable_compilation_cache()
    with usage_errors():
        mesh = made.mesh(asked.processes)
        options, curriculum = made.options, made.curriculum
        check_batches(curriculum.shapes, made.grad_accum)
        plan = _plan(made, asked.run)
        weights = None if options.init_from is None else find_checkpoint(options.init_from)
        parts, state, settings = look_ahead(made.build, made.optimizer, mesh, options, plan.total_steps)
        if weights is not None:
            check_weights(weights, parts.of_base(state.params, settings))
            notes = (*notes, f"the weights are those of {weights}")
        sharding = batch_sharding(mesh)
        compiler = AotCompiler(mesh, SIMULATED if asked.devices else None)
        dtype = jnp.bfloat16 if options.bf16_compute else None
        validation = Validation(
            made.validation, curriculum.primary_streamer, make_eval_step(parts, made.loss, dtype), compiler, sharding,
            options.eval_iters,
        )  # fmt: skip
        validation.check(*plan.shapes)
        datasets = {**curriculum.datasets, **made.validation}
        check_vocabulary(parts, made.loss, state, settings, mesh, plan.shapes[0], datasets)
        step = make_step(
            parts, made.loss, made.optimizer, state, sharding,
            grad_accum=made.grad_accum, compute_dtype=dtype, skip_bad=options.on_bad_step == "skip",
        )  # fmt: skip
    last = last_step(plan, options)
    steps = spans(plan, last)
    try:
        # Not within: what fails while a step is traced is the model's or the loss function's, and needs its traceback.
        memory = [
            step_memory(compiler, step, state, settings, Stream(plan, curriculum.datasets, sharding, stop - 1))
            for _, stop in steps
        ]
    finally:
        compiler.close()
    if last < plan.total_steps:
        notes = (*notes, f"max_steps ends the run after step {last:,} of {plan.total_steps:,}")
    if note := max_steps_note(plan, options):
        notes = (*notes, note)
    with usage_errors():
        speed = _speed(asked, mesh, bf16=options.bf16_compute or options.use_bf16)
    told = [
        look_at(
            plan, span, one, sharding=sharding, grad_accum=made.grad_accum,
            processes=asked.processes or jax.process_count(),
            flops=TrainView(parts, state, settings).flops_per_token(), speed=speed,
        )
        for span, one in zip(steps, memory, strict=True)
    ]  # fmt: skip
    model = TrainView(parts, state, settings)
    other = {name: leaf for name, leaf in settings.items() if name not in parts.frozen.names}
    bytes_of = {
        "parameters": device_bytes((state.params, model.frozen)),
        "optimizer": device_bytes(state.opt_state),
        "other": device_bytes((state.step, state.rest, state.health, other)),
    }
    return _outlook(made, asked, plan, mesh, told, speed, model, bytes_of, notes)


def _plan(made: RunComponents, run: Path | None) -> Plan:
    """What the run follows: amendments and what was left out are in the plan that a run saved."""
    plan = made.curriculum.plan(made.config.seed)
    kept = None if run is None else saved_plan(run)
    same = kept is not None and (kept.shapes, kept.seed) == (plan.shapes, plan.seed)
    return kept if kept is not None and same else plan


def _speed(asked: Asked, mesh: Mesh, *, bf16: bool) -> Speed:
    if asked.tokens_per_s:
        return Speed(source="given", tokens_per_s=asked.tokens_per_s)
    if asked.run is not None and (measured := read_runs([asked.run])[0].numbers()["tokens_per_s"]):
        return Speed(source=f"measured in {asked.run}, the median of what it logged", tokens_per_s=measured)
    return usual_speed(mesh, bf16=bf16)


def _outlook(
    made: RunComponents,
    asked: Asked,
    plan: Plan,
    mesh: Mesh,
    phases: Sequence[PhaseOutlook],
    speed: Speed,
    model: TrainView,
    state: Mapping[str, int],
    notes: tuple[str, ...],
) -> Outlook:
    params = {**model.frozen, **model.params}
    limit = int(asked.device_memory_gb * 1e9) if asked.device_memory_gb else memory_limit(mesh.local_devices)
    last = sum(phase.steps for phase in phases)
    seconds = [phase.seconds for phase in phases if phase.seconds is not None]
    found = [problem(phase, limit, cures(made.config, mesh.size)) for phase in phases]
    return Outlook(
        description=plan.describe(),
        phases=tuple(phases),
        steps=last,
        tokens=plan.tokens(last),
        flops=sum(phase.flops for phase in phases),
        notes=notes,
        datasets=_datasets(plan, last),
        validation={name: data.num_tokens for name, data in made.validation.items()},
        vocab_size=made.vocab_size,
        parameters=sum(leaf.size for leaf in params.values()),
        trainable_parameters=sum(leaf.size for leaf in model.params.values()),
        parts=by_part(params),
        state=state,
        arrays=tuple(arrays(params)),
        fsdp=made.config.fsdp,
        grad_accum=made.grad_accum,
        devices=mesh.size,
        processes=asked.processes or jax.process_count(),
        platform=mesh.devices.flat[0].platform,
        device_kind=mesh.devices.flat[0].device_kind,
        simulated=asked.devices is not None,
        memory_limit=limit,
        seconds=sum(seconds) if len(seconds) == len(phases) else None,
        tokens_per_s=speed.tokens_per_s,
        speed=speed.source,
        problems=tuple(one for one in found if one),
    )


def _datasets(plan: Plan, last: int) -> dict[str, dict[str, float]]:
    """Tokens that can be read, and passes over them, of each data set when `last` steps are done."""
    segment = plan.segment(last - 1)
    reached, found = segment.after(last - segment.first_step), {}
    for name, source in plan.amendments[-1].sources.items():
        units, at = source.units, reached[name]
        passes = at.pass_index + 1 - (at.pool.size - at.used) / units.count
        found[name] = {"tokens": units.tokens, "passes": passes}
    return found


SHARED = {"rows": "its rows are cut over {0} devices", "tokens": "its rows are cut along the tokens over {0} devices"}


def table(found: Outlook, *, every_array: bool = False) -> str:
    """All of an outlook in sections.

    Args:
        found: the outlook.
        every_array: whether each parameter gets a line, or all of them one.
    """
    parts = {
        "phases": [found.description, *found.notes],
        "data": _data(found),
        "model": _model(found),
        "devices": _devices(found),
        "memory of a device": _memory(found),
        "sharding": _sharding(found, every_array),
        "compute": _compute(found),
        "time": _time(found),
    }
    return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in parts.items())


def _data(found: Outlook) -> list[str]:
    lines = [
        f"{name}: {one['tokens']:,} tokens to train on, {one['passes']:.2f} passes"
        for name, one in found.datasets.items()
    ]
    held = [f"{name or 'held out'}: {tokens:,} tokens" for name, tokens in found.validation.items() if tokens]
    return [*lines, "validation: " + (", ".join(held) or "none"), f"vocabulary: {found.vocab_size:,}"]


def _model(found: Outlook) -> list[str]:
    rows = [[name, f"{count:,}", f"{count / found.parameters:.1%}"] for name, count in found.parts.items()]
    if (trained := found.trainable_parameters) < found.parameters:
        rows.append(["of them trained", f"{trained:,}", f"{trained / found.parameters:.2%}"])
    return _aligned([["parameters", f"{found.parameters:,}", ""], *rows])


def _devices(found: Outlook) -> list[str]:
    of = f" in {found.processes} processes" if found.processes > 1 else ""
    made = (
        ", simulated" if found.simulated else f" ({found.device_kind})" if found.device_kind != found.platform else ""
    )
    lines = [f"{found.devices} {found.platform} device(s){of}{made}"]
    for phase in found.phases:
        how = SHARED.get(phase.layout.cut, "each device has all of it").format(phase.layout.pieces)
        if (together := phase.layout.together) > 1:
            how += f", {together} devices for each"
        groups = phase.layout.pieces + phase.layout.repeated
        who = "devices" if together == 1 else "groups of devices"
        again = f"; {phase.layout.repeated} of {groups} {who} repeat the work of others: use a batch_size "
        again += f"that divides by {groups * found.grad_accum}"
        micro = f", in {found.grad_accum} micro-batches" if found.grad_accum > 1 else ""
        reads = f"; a process reads {phase.rows_a_process} of {phase.batch_size} rows" if found.processes > 1 else ""
        lines.append(
            f"phase {phase.phase}: a batch of {phase.batch_size:,} rows x {phase.seq_len:,} tokens{micro}: {how}"
            + (again if phase.layout.repeated else "")
            + reads
        )
    return lines


def _memory(found: Outlook) -> list[str]:
    by = ", ".join(f"{name} {size(count)}" for name, count in found.state.items())
    rows = [["", "state and batch", "temporaries", "results", "in all", "of its memory"]]
    for phase in found.phases:
        rows.append([f"phase {phase.phase}", *_needs(phase, found.memory_limit)])
    lines = [f"state: {by}", *_aligned(rows)]
    if found.memory_limit is None:
        lines.append("what a device has is not known: give --device_memory_gb")
    else:
        lines.append(f"a device has {size(found.memory_limit)}")
    if found.platform == "cpu":
        what = (
            "the state is exact; temporaries are an estimate for an accelerator, whose compiler has kernels of its own"
        )
        lines.append(f"by XLA's account of the compiled step, for CPU: {what}")
    else:
        lines.append(f"by XLA's account of the compiled step, for {found.device_kind}")
    return lines


def _needs(phase: PhaseOutlook, limit: int | None) -> list[str]:
    needs = phase.memory
    if needs is None:
        return ["", "", "", "does not fit", ""]
    share = "unknown" if limit is None else f"{needs.peak / limit:.0%}"
    return [size(needs.arguments), size(needs.temporaries), size(needs.results + needs.code), size(needs.peak), share]


def _sharding(found: Outlook, every_array: bool) -> list[str]:
    cut = [one for one in found.arrays if any(one["cut"])]
    held, whole = sum(one["device_bytes"] for one in found.arrays), len(found.arrays) - len(cut)
    what = "fsdp: " if found.fsdp else "" if cut else "no fsdp: "
    lines = [
        f"{what}{len(cut)} of {len(found.arrays)} arrays of parameters are cut over the devices, {whole} are whole on "
        f"each; a device holds {size(held)} of parameters"
    ]
    if every_array:
        rows = [["array", "shape", "type", "cut", "on a device"]]
        rows += [[one["name"], _shape(one), one["dtype"], _cut(one), size(one["device_bytes"])] for one in found.arrays]
        return [*lines, *_aligned(rows)]
    ways = Counter((_shape(one), _cut(one)) for one in cut)
    rows = [[f"{count} arrays of", shape, how] for (shape, how), count in ways.items()]
    return [*lines, *(_aligned(rows) if rows else [])]


def _shape(array: Mapping[str, Any]) -> str:
    return " x ".join(map(str, array["shape"])) or "1"


def _cut(array: Mapping[str, Any]) -> str:
    found = [f"dimension {i} over {axis}" for i, axis in enumerate(array["cut"]) if axis]
    return ", ".join(found) or "whole"


def _compute(found: Outlook) -> list[str]:
    rows = [["", "FLOPs a token", "a step", "in all"]]
    for phase in found.phases:
        each = phase.flops_per_token
        rows.append([f"phase {phase.phase}", f"{each:.3g}", f"{phase.flops / phase.steps:.3g}", f"{phase.flops:.3g}"])
    rows.append(["all", "", "", f"{found.flops:.3g}"])
    return _aligned(rows)


def _time(found: Outlook) -> list[str]:
    if found.seconds is None:
        return [found.speed]
    speed = found.tokens_per_s or found.tokens / found.seconds
    by_phase = ", ".join(f"phase {one.phase} {duration(one.seconds or 0.0)}" for one in found.phases)
    return [
        f"{duration(found.seconds)} for {found.tokens:,} tokens at {speed:,.0f} tokens/s ({found.speed}): {by_phase}",
        "steps alone: validations, saves and compilations come on top",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one run."""

    steps: int
    tokens: int
    flops: float
    """Forward and backward, of all steps."""
    parameters: int


def cost(config: Any, data_path: str | Path | None) -> Cost:
    """Steps, tokens, operations and parameters of a trial of a sweep.

    Text is made into shards in a folder that is gone afterwards.

    Raises:
        UsageError: the config or the data do not allow the run.
    """
    with usage_errors(), contextlib.ExitStack() as held:
        config, _ = with_base(config)
        config = config.with_absolute_paths()
        config.validate()
        pin_threads()
        initialize()
        path = config.primary_path(data_path)
        folder = held.enter_context(folder_for_now(path, "cost"))
        made = build_components(config, held.enter_context(open_corpus(config, path, folder)), trial=True)
        options, plan = made.options, made.curriculum.plan(made.config.seed)
        parts, state, settings = look_ahead(made.build, made.optimizer, made.mesh(), options, plan.total_steps)
        model = TrainView(parts, state, settings)
        flops_of, last = model.flops_per_token(), last_step(plan, options)
        pieces = [
            (plan.tokens(stop) - plan.tokens(first), flops_of(plan.segment(stop - 1).shape.seq_len))
            for first, stop in spans(plan, last)
        ]
        sizes = [leaf.size for leaf in {**model.frozen, **model.params}.values()]
        return Cost(
            steps=last,
            tokens=plan.tokens(last),
            flops=sum(tokens * each for tokens, each in pieces),
            parameters=sum(sizes),
        )
