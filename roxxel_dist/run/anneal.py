"""A decay branch: a fork of a run whose rate falls over its last steps, so that one run has several ends."""

import copy
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.metadata import (
    CHECKPOINTS,
    CheckpointMetadata,
    CheckpointRange,
    CheckpointRef,
    MetaFile,
    steps_of,
)
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.place.run_place import bucket_run
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.metadata import saved_config
from roxxel_dist.run.past import check_no_program
from roxxel_dist.settings.config import Config
from roxxel_dist.train.step.schedule import LrSchedule
from roxxel_dist.utils.voice import argument


def make_decay_branch(config: Config, trunk: CheckpointRef) -> None:
    """Turn the config of a run that is forked at `trunk` into that of a decay branch.

    After the checkpoint's step the phases of the run go on for `decay_steps` steps, while the rate falls to a hundredth
    of `lr`. Then it ends. Where the run has fewer steps left, its last phase is made longer. Unless they are given,
    `lr` and `lr_scaling` are those of the checkpoint: the run may have been amended with others after it.

    Raises:
        ValueError: no such checkpoint, no `decay_steps`, other phases, or a rate that is not at its peak there.
    """
    metadata, folder = _metadata(trunk)
    check_no_program(folder, saved_config(folder), new=True)
    if config.decay_steps is None:
        raise UserError(f"anneal is {trunk}, and decay_steps is not given: write how many steps the rate falls for")
    kind, settings = metadata.schedule.get("kind"), metadata.schedule.get("settings", {})
    step = trunk.step or 0
    decays = kind not in ("constant", "wsd")
    decays |= kind == "wsd" and step > settings["total_steps"] - settings["decay_steps"]
    if decays or step < settings["warmup_steps"]:
        raise UserError(
            f"anneal is {trunk}: the rate of that run (lr_schedule {kind}) is not at its peak after step {step}. Name "
            f"a step after the warm-up and before the decay, of a run with lr_schedule constant or wsd"
        )
    phases: list[dict[str, Any]] = []
    left = step + config.decay_steps
    shapes = Plan.from_state(metadata.plan).shapes
    for i, shape in enumerate(shapes):
        steps = left if i == len(shapes) - 1 else min(shape.steps, left)
        names = ("batch_size", "seq_len", "blend", "packing")
        phases.append(
            {"steps": steps, **{name: getattr(shape, name) for name in names}, "weights": dict(shape.weights)}
        )
        left -= steps
        if not left:
            break
    if config.phases not in (phases, saved_config(folder).get("phases")):
        raise UserError(
            f"phases is given, and a branch from {trunk} goes on with those of {trunk.run}: leave phases out, or begin "
            f"a run with others ({argument('fork', 'RUN@STEP')})"
        )
    if config.of_run is not None and Path(config.of_run[0]).samefile(folder):  # else the branch is there, with its own
        schedule = LrSchedule.from_dict(metadata.schedule)
        assert schedule is not None
        if not config.given & {"lr", "lr_scaling"}:
            scaling: Any = schedule.scaling
            config.lr, config.lr_scaling = schedule.settings["lr"], scaling
    config.phases, config.lr_schedule, config.max_steps = phases, "wsd", None


def branches_of(config: Config, named: str) -> list[CheckpointRef]:
    """The checkpoints that RUN@A:B or RUN@A,B,C names, each of which can be a branch with this config.

    The config takes the rate of the checkpoints. Raises ValueError where one cannot be a branch, as `make_decay_branch`
    does, and where they have several rates.
    """
    several = CheckpointRange.parse(named)
    assert several is not None
    bucket = bucket_run(several.run)
    kept = steps_of(several.run / CHECKPOINTS) if bucket is None else bucket.checkpoints.saved(read_only=True)
    branches = [CheckpointRef(several.run, step) for step in several.among(kept)]
    rates: dict[tuple[float, Any], CheckpointRef] = {}
    for branch in branches:
        make_decay_branch(made := copy.deepcopy(config), branch)
        rates.setdefault((made.lr, made.lr_scaling), branch)
    if len(rates) > 1:
        shown = ", ".join(f"{rate:g} with lr_scaling {scaling} at {one}" for (rate, scaling), one in rates.items())
        raise UserError(
            f"anneal is {named}: lr was changed between these steps ({shown}): name those of one rate, or lr"
        )
    config.lr, config.lr_scaling = next(iter(rates))
    return branches


def _metadata(trunk: CheckpointRef) -> tuple[CheckpointMetadata, Path]:
    """(what the checkpoint says, the folder of its run). No rank waits for another: each reads it."""
    bucket = bucket_run(trunk.run)
    folder = trunk.run if bucket is None else bucket.pull()
    try:
        if bucket is not None and trunk.step is not None:
            bucket.checkpoints.fetch_meta(trunk.step)
        saved = MetaFile.read(folder / CHECKPOINTS / str(trunk.step))
    except FormatError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"anneal is {trunk}: {trunk.run} has no checkpoint of step {trunk.step} (a run keeps more with keep_every, "
            f"keep_steps or max_to_keep); `roxxel-dist verify {trunk.run}` lists those there are"
        ) from error
    return CheckpointMetadata.from_dict(saved.meta), folder
