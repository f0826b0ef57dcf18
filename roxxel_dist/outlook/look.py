"""What a run of a Config would be: its steps, parameters, memory and time, found out without training or allocating."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.assemble import Recipe, folder_for_now, open_corpus, recipe
from roxxel_dist.cluster.determinism import enable_compilation_cache, make_deterministic, pin_threads
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.cluster.mesh import batch_sharding, simulate_devices
from roxxel_dist.config import usage_errors
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.lineage import data_of, saved_config, with_base
from roxxel_dist.model.parts import by_part
from roxxel_dist.outlook.phase import PhaseOutlook, Speed, cures, look_at, problem, spans, step_memory, usual_speed
from roxxel_dist.reading import absolute_paths, primary_path, saved_plan
from roxxel_dist.report.runs import read_runs
from roxxel_dist.run_directory import CONFIG
from roxxel_dist.stream import Stream
from roxxel_dist.train.ahead import arrays, look_ahead, memory_limit
from roxxel_dist.train.base import check_weights, checkpoint_named
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.follow import end_of, longer_than_its_phases
from roxxel_dist.train.hardware import device_bytes
from roxxel_dist.train.model_state import ModelState
from roxxel_dist.train.phase_programs import PhasePrograms, check_batches
from roxxel_dist.train.programs import Programs

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
        config = dataclasses.replace(config, **absolute_paths(config))
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
            path = primary_path(config, data_path) or data_of(saved, asked.run)
            if saved.get("init_from") == config.init_from:
                config = dataclasses.replace(config, init_from=None)  # what a run has begun with, it needs no more
            folder = held.enter_context(folder_for_now(path, "plan"))
            made = recipe(config, held.enter_context(open_corpus(config, path, folder)))
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


def _look(made: Recipe, asked: Asked, notes: tuple[str, ...]) -> Outlook:
    """The outlook of a recipe. What cannot be is found in the order in which a `Trainer` finds it."""
    enable_compilation_cache()
    with usage_errors():
        mesh = made.mesh(asked.processes)
        options, curriculum = LoopOptions(**made.options), made.curriculum
        check_batches(curriculum.shapes, made.grad_accum)
        plan = _plan(made, asked.run)
        weights = None if options.init_from is None else checkpoint_named(options.init_from)
        parts, state, settings = look_ahead(made.build, made.optimizer, mesh, options, plan.total_steps)
        if weights is not None:
            check_weights(weights, parts.of_base(state.params, settings))
            notes = (*notes, f"the weights are those of {weights}")
        sharding = batch_sharding(mesh)
        programs = Programs(mesh, SIMULATED if asked.devices else None)
        phases = PhasePrograms(
            programs, parts, state, settings, loss_fn=made.loss, optimizer=made.optimizer,
            train=curriculum.primary_streamer, sets=made.validation, sharding=sharding, grad_accum=made.grad_accum,
            options=options,
        )  # fmt: skip
        phases.check(plan.shapes)
        phases.check_vocabulary(plan.shapes[0], {**curriculum.datasets, **made.validation})
    last = end_of(plan, options)
    steps = spans(plan, last)
    try:
        # Not within: what fails while a step is traced is the model's or the loss function's, and needs its traceback.
        memory = [
            step_memory(programs, phases, Stream(plan, curriculum.datasets, sharding, stop - 1)) for _, stop in steps
        ]
    finally:
        programs.close()
    if last < plan.total_steps:
        notes = (*notes, f"max_steps ends the run after step {last:,} of {plan.total_steps:,}")
    if note := longer_than_its_phases(plan, options):
        notes = (*notes, note)
    with usage_errors():
        speed = _speed(asked, mesh, bf16=options.bf16_compute or options.use_bf16)
    told = [
        look_at(
            plan, span, one, sharding=sharding, grad_accum=made.grad_accum,
            processes=asked.processes or jax.process_count(),
            flops=ModelState(parts, state, settings).flops_per_token(), speed=speed,
        )
        for span, one in zip(steps, memory, strict=True)
    ]  # fmt: skip
    model = ModelState(parts, state, settings)
    other = {name: leaf for name, leaf in settings.items() if name not in parts.frozen.names}
    bytes_of = {
        "parameters": device_bytes((state.params, model.frozen)),
        "optimizer": device_bytes(state.opt_state),
        "other": device_bytes((state.step, state.rest, state.health, other)),
    }
    return _outlook(made, asked, plan, mesh, told, speed, model, bytes_of, notes)


def _plan(made: Recipe, run: Path | None) -> Plan:
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
    made: Recipe,
    asked: Asked,
    plan: Plan,
    mesh: Mesh,
    phases: Sequence[PhaseOutlook],
    speed: Speed,
    model: ModelState,
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
        vocab_size=made.config.vocab_size,
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
