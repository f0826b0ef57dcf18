"""The components and the plan of a run that is estimated, in this process or in that of a target's compiler."""

import contextlib
import dataclasses
import itertools
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
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.extras import pip_install
from roxxel_dist.run.components import RunComponents, build_components, open_corpus, temporary_folder
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.estimate.target_process import call_for_target
from roxxel_dist.run.estimate.target_steps import TargetCompiler
from roxxel_dist.run.metadata import data_of, saved_config
from roxxel_dist.run.record import check_resumable, kernel_begun_with
from roxxel_dist.run.report import read_runs
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.weights.base import with_base


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
