"""The components and the plan of a run that is estimated, in this process or in that of a target's compiler; why a
phase cannot run, and what makes it fit.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from roxxel_dist.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.cluster.determinism import make_deterministic, pin_for_run
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.cluster.mesh import simulate_devices
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.devices.targets import check_compiler, parse_target
from roxxel_dist.place.directory import has_config, no_run
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError, pip_install
from roxxel_dist.run.components import RunComponents, build_components, open_corpus, temporary_folder
from roxxel_dist.run.estimate.figures import EstimateRequest, PhaseEstimate
from roxxel_dist.run.estimate.target_process import call_for_target
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetPhase, measure_step, rebuild
from roxxel_dist.run.metadata import data_of, saved_config
from roxxel_dist.run.record import check_resumable, kernel_begun_with
from roxxel_dist.run.report import read_runs
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.step.throughput import device_bytes
from roxxel_dist.utils.display import size
from roxxel_dist.weights.base import add_base


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
            config, note = add_base(config)
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
                    f"as the others, so use a divisor, or change devices"
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


def run_for_target(
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


def _saved(run: Path) -> dict[str, Any]:
    """The config of a run, with its record."""
    read_runs([run])  # raises for a path that is not a run, and suggests the closest run
    if not has_config(run):
        raise UserError(no_run(run))
    return saved_config(run)


def plan_of(curriculum: Curriculum, seed: int, saved: CheckpointMetadata | None) -> Plan:
    """The plan; that of a run, if it is of these phases: it includes amendments and skipped steps."""
    kept = None if saved is None else Plan.from_state(saved.plan)
    if kept is not None and (kept.shapes, kept.seed) == (curriculum.shapes, seed):
        return kept
    return curriculum.plan(seed)


def spans(plan: Plan, last: int) -> list[tuple[int, int]]:
    """[first, stop) of every phase that begins before the step `last`."""
    ends = list(itertools.accumulate(shape.steps for shape in plan.shapes))
    return [(first, min(stop, last)) for first, stop in itertools.pairwise([0, *ends]) if first < last]


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


def checkpointing_changes(config: Any) -> list[dict[str, Any]]:
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
        changes += checkpointing_changes(config)
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
