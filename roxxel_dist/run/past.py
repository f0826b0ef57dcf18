"""The place that a run continues from, the data read until then, and decay branches: forks whose rate falls."""

import copy
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from roxxel_dist.checkpoint.metadata import (
    CHECKPOINTS,
    CheckpointMetadata,
    CheckpointRange,
    CheckpointRef,
    MetaFile,
    read_cursor,
    steps_of,
)
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute, is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.place.directory import CONFIG, TOKENIZER, check_run_folder, check_still_there, is_of_program
from roxxel_dist.place.run_place import bucket_run, local_run
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import MissingFileError, UserError
from roxxel_dist.run.metadata import RunMetadata, data_of, saved_config
from roxxel_dist.run.record import forked_from
from roxxel_dist.settings.config import Config
from roxxel_dist.train.step.schedule import LrSchedule
from roxxel_dist.utils.voice import argument


@dataclass(frozen=True, kw_only=True)
class Past:
    """The place that a run continues from: its own checkpoint, the run that it is forked from, or nothing."""

    saved: dict[str, Any]
    """The config that its directory holds; empty for a new run."""
    fork: CheckpointRef | None
    """The checkpoint that it is, or was, forked from."""
    skip_steps: tuple[int, int] | None
    """The steps whose rows the fork leaves out."""
    config: dict[str, Any]
    """`saved`, or that of the run which a new one is forked from."""

    @property
    def new_fork(self) -> CheckpointRef | None:
        """The checkpoint that a new run is forked from."""
        return None if self.saved else self.fork

    @classmethod
    def read(
        cls, run: Path, resume: bool, fork: str | None, skip_steps: tuple[int, int] | None, *, in_bucket: bool
    ) -> Self:
        """The run to continue from. Raises UserError for one that cannot be continued in this way."""
        check_still_there(run)
        if not in_bucket:
            check_run_folder(run)  # before a config there is read that is not of a run
        saved = saved_config(run) if resume else {}
        if not in_bucket and resume:
            check_no_program(run, saved, new=False)
        parent, skipped = forked_from(fork, skip_steps, saved, run)
        config = saved_config(local_run(parent.run)) if parent and not saved else saved
        past = cls(saved=saved, fork=parent, skip_steps=skipped, config=config)
        if past.new_fork is not None:
            check_no_program(local_run(past.new_fork.run), past.config, new=True)
        if merged := RunMetadata.from_config(past.config).merged_from:
            place = parent.run if parent and not saved else run
            raise UserError(
                f"{place} is merged from checkpoints of {merged['run']} and has no moments to go on with: begin a new "
                f"run with its weights ({argument('init_from', place)})"
            )
        return past

    def is_other_data(self, config: Config, data_path: str | Path | None) -> bool:
        """Whether a resumed run gets other data than it has read so far."""
        before, path = RunMetadata.from_config(self.saved), config.primary_path(data_path)
        if path is None or before.data_path is None:
            return False
        if os.path.realpath(absolute(path)) == os.path.realpath(before.data_path):
            return False
        if not is_tokens(path):
            return True
        with Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as data:
            return data.fingerprint != before.corpus

    def data_path(
        self, run: Path, config: Config, data_path: str | Path | None, resume: bool, is_other_data: bool
    ) -> str | Path | None:
        """The path of the primary data set: as given, or as the earlier run recorded it."""
        path = config.primary_path(data_path) or data_of(self.config, self.new_fork and self.new_fork.run)
        if resume and not self.config and path is None:
            near = difflib.get_close_matches(
                run.name, [file.parent.name for file in run.parent.glob(f"*/{CONFIG}") if file.parent != run]
            )
            hint = f"did you mean {run.parent / near[0]}?" if near else "check run_dir"
            raise MissingFileError(f"there is no run {run}: {hint}; a new one needs {argument('data_path', 'PATH')}")
        if is_other_data and not is_tokens(path or ""):
            raise UserError(
                f"data_path is {path}, and {run} was started with {RunMetadata.from_config(self.saved).data_path}: "
                f"leave it out, or make shards of the text with the run's {TOKENIZER} and `roxxel-dist data build`, "
                f"and amend the run with them ({argument('amend')})"
            )
        return path


def check_no_program(run: Path, saved: Mapping[str, Any], *, new: bool) -> None:
    """Raises UserError for a run that a program's `Trainer` of parts trains: that program alone has its parts. `saved`
    is its config, empty where its model is none of ours; `new` says that another run begins at a checkpoint."""
    program = RunMetadata.from_config(saved).program
    if program is None and not is_of_program(run):
        return
    by = program or "a program of yours"
    cursor = read_cursor(run)
    if new:
        how = (
            f"fork it in that program, with Trainer(..., origin=ResumeSpec(fork=CheckpointRef(Path({str(run)!r}), STEP)"
            f")) of roxxel_dist.checkpoint.metadata"
        )
        how += f"; or begin a run with its weights: init_from {run}@STEP" if saved else ""
    elif cursor.get("finished"):
        how = (
            f"it is finished after step {cursor.get('step')}. To train longer, start that program again with a larger "
            f"max_steps, or with longer phases and amend. For a new run, name another run_dir"
        )
    else:
        how = (
            "start that program again; it continues from the newest checkpoint. For a new run with `train`, name "
            "another run_dir"
        )
    raise UserError(f"{run} was trained by {by}, with a Trainer of parts: {how}")


def check_nothing_new(run: Path, config: Config, step: int, before: Mapping[str, Any]) -> None:
    """Raises UserError for changes to a finished run; `before` has the old values of the changed fields."""
    if not before:
        return
    changes = [f"{name} {old} -> {getattr(config, name, 'other data')}" for name, old in before.items()]
    raise UserError(
        f"{run} is finished after step {step}, and a change would do nothing ({', '.join(changes)}): leave it out. "
        f"To continue, give a larger max_steps while its phases have steps left, or longer phases and "
        f"{argument('amend')}. "
        f"Or start a new run from a kept checkpoint with {argument('fork', 'RUN@STEP')}"
    )


def make_decay_branch(config: Config, trunk: CheckpointRef) -> None:
    """Turn the config of a run that is forked at `trunk` into that of a decay branch.

    After the checkpoint's step the phases of the run go on for `decay_steps` steps, while the rate falls to a hundredth
    of `lr`. Then it ends. Where the run has fewer steps left, its last phase is made longer. Unless they are given,
    `lr` and `lr_scaling` are those of the checkpoint: the run may have been amended with others after it. Raises
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
    kept = steps_of(several.run / CHECKPOINTS) if bucket is None else bucket.checkpoints.list_saved(read_only=True)
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
