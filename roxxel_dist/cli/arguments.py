"""The commands that take every field of a `Config` as a flag: their words as arguments and a Config."""

import dataclasses
import re
from pathlib import Path
from typing import Any, TypeVar

from roxxel_dist.checkpoint.metadata import CheckpointRange, CheckpointRef
from roxxel_dist.cli.parser import build, read
from roxxel_dist.data.files.discovery import check_local
from roxxel_dist.place.directory import CONFIG, check_still_there, default_run_dir
from roxxel_dist.place.run_place import bucket_url, local_run
from roxxel_dist.process.exit_codes import UserError, attempt_number
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.effect import check_effect, chosen, without_effect


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """The arguments of a command that takes every field of a `Config` as a flag."""

    config: str | None = None
    """A YAML file of the fields below. Flags override it."""
    fields: Config = dataclasses.field(default_factory=Config)
    """Every field of a config file."""


ConfigArgsT = TypeVar("ConfigArgsT", bound=ConfigArgs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArgs(ConfigArgs):
    """Train a model through a curriculum."""

    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`. A resumed run uses its own data."""
    run_dir: str | None = None
    """The run directory: a folder, or an address in a bucket (s3://, gs://, az://). Default: a new folder
    runs/run_YYYYMMDD_HHMMSS."""
    local_dir: str | None = None
    """For a run in a bucket: the local folder on each host in which files are written before they are sent. Default:
    ~/.cache/roxxel-dist/runs."""
    resume: bool = False
    """Continue the run in --run_dir from its newest checkpoint. Without a checkpoint the run starts from step 1."""
    amend: bool = False
    """With --resume: accept changed phases or shards from this step on. Tokens that were read are not read again."""
    fork: str | None = None
    """RUN@STEP: start a new run from a kept checkpoint of RUN, with its parameters, moments, random streams and data
    position. Fields that --config and flags do not give are those of RUN. Other phases and schedules apply after that
    step. RUN does not change."""
    anneal: str | None = None
    """RUN@STEP, with --decay_steps N: a decay branch. It forks RUN there, the rate falls to a hundredth over N steps,
    and it ends. RUN has lr_schedule constant or wsd. RUN@A,B,C or RUN@A:B: a branch from each kept checkpoint, as
    trials of a study in --run_dir."""
    skip_steps: str | None = None
    """With --fork: A:B, leave out the data of the steps A to B."""


def parse_train(words: list[str]) -> tuple[TrainArgs, Any]:
    """(arguments, Config) of a `train` command line; raises as `parse_config` does."""
    given = read(TrainArgs, words, "train")
    if given.get("run_dir") == "":
        raise UserError("--run_dir is empty: name a folder, or leave it out for a new one")
    if "amend" in given and "resume" not in given:
        raise UserError("--amend changes a run that is resumed: add --resume and --run_dir")
    if "resume" in given and "run_dir" not in given:
        raise UserError("--resume does not say which run: name its folder with --run_dir")
    if "skip_steps" in given and "fork" not in given:
        raise UserError("--skip_steps leaves rows out in a new run that begins at a checkpoint: add --fork RUN@STEP")
    if "anneal" in given:
        _check_branch(given)
        given.setdefault("lr_schedule", "wsd")
    run = given.get("run_dir") or default_run_dir()
    if bucket_url(run) is None:
        check_local("--run_dir", run)
    runs: list[Path] = []
    if "resume" in given or attempt_number():
        runs.append(local_run(run, given.get("local_dir"), read_only=False))
    if attempt_number():  # a job that its launcher starts again is resumed, as `fit` has it
        check_still_there(runs[0])
    if "fork" in given:
        runs.append(local_run(CheckpointRef.parse(given["fork"]).run))
    if "anneal" in given:
        several = CheckpointRange.parse(given["anneal"])
        runs.append(local_run((several or CheckpointRef.parse(given["anneal"])).run))
    saved = (str(folder / CONFIG) for folder in runs if (folder / CONFIG).exists())
    return _with_config(TrainArgs, given, "train", next(saved, None))


def check_training(args: TrainArgs, config: Config) -> None:
    """Check a new training without jax; one that goes on has its own data and phases, which are compared when they are
    known. Raises ValueError where it would refuse its data sets, blends or phases."""
    if not (args.resume or args.fork or args.anneal or attempt_number()):
        check_new_run(config, args.data_path)


def check_new_run(config: Config, data_path: str | None) -> None:
    """Check a new run. Raises ValueError where its config and data would be refused. Imports no jax."""
    from roxxel_dist.run.curriculum import check_data

    path = config.primary_path(data_path)
    if path is None:
        raise UserError("no data: name a text file, a folder or shards with --data_path PATH")
    check_data(config, path)


def _check_branch(given: dict[str, Any]) -> None:
    """Raises UserError for flags that a decay branch cannot have."""
    for name in ("fork", "skip_steps", "amend", "max_steps", "phases"):
        if name in given:
            raise UserError(f"--anneal begins a fork that ends after --decay_steps: leave --{name} out")
    if given.get("lr_schedule", "wsd") != "wsd":
        raise UserError(f"--lr_schedule is {given['lr_schedule']}, and the rate of --anneal falls as wsd: leave it out")
    if CheckpointRange.parse(given["anneal"]) is None and CheckpointRef.parse(given["anneal"]).step is None:
        raise UserError(f"--anneal is {given['anneal']}: name kept checkpoints, as RUN@1000 or RUN@1000,2000")


def parse_config(
    kind: type[ConfigArgsT], words: list[str], command: str, path: str | None = None
) -> tuple[ConfigArgsT, Config]:
    """(arguments, Config) of a command that takes every field of a Config beside its own flags. `path` is the config of
    the run that is resumed or forked: the fields that neither `--config` nor a flag gives. Raises ValueError for a
    value or a file that cannot be used; a word that is no flag exits with 2 and a message."""
    return _with_config(kind, read(kind, words, command), command, path)


def _with_config(
    kind: type[ConfigArgsT], flags: dict[str, Any], command: str, path: str | None
) -> tuple[ConfigArgsT, Config]:
    model_args = {name.partition(".")[2]: flags.pop(name) for name in [*flags] if name.startswith("model_args.")}
    base = Config.from_yaml(flags["config"]) if flags.get("config") else Config()
    if path:
        saved = Config.from_yaml(path)
        values = saved.to_dict()
        if flags.get("config"):
            del values["max_steps"]  # a config without one trains to the end of its phases
        if flags.get("lr_schedule", "wsd") != "wsd":
            values["decay_steps"] = None  # of the run's wsd, as in `with_defaults`
        base = base.with_defaults(values)
        base.of_run = base.of_run if flags.get("config") else saved.of_run
    args = build(kind, flags, command, kind(fields=base))
    values = args.fields.to_dict()
    defaults = Config().to_dict()
    if model_args:
        values["model_args"] = _merged(values["model_args"] or {}, model_args)
    config = Config.from_dict(values)
    config.defaults = base.defaults
    config.given = base.given | (flags.keys() & values.keys()) | ({"model_args"} if model_args else frozenset())
    if "init_from" not in flags:
        config.of_run = base.of_run
    try:
        config.validate()
    except UserError as error:
        name = str(error).partition(" ")[0]
        if {"phase": "phases"}.get(name, name) in base.given - flags.keys():
            raise UserError(f"{flags['config']}: {error}") from error
        raise
    if command != "sweep":  # its parameters may turn on what a field of the base sets
        from_flags = {name for name in flags.keys() & values.keys() if values[name] != defaults[name]}
        from_flags |= {"epochs", "batch_size"} & flags.keys()
        from_flags |= {"model_args"} if model_args else set()
        # A flag may turn off what the file turns on: the fields that go with it may stay in the file.
        from_file = chosen(base) & without_effect(base.to_dict()).keys()
        names = from_file | from_flags
        if config.init_from is not None and names & without_effect(config.to_dict()).keys():
            from roxxel_dist.weights.base import take_hf_shape

            check_effect(take_hf_shape(config), names, from_flags)  # what the base has may give them their effect
        else:
            check_effect(config, names, from_flags)
    return args, config


def _merged(values: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A mapping with some of its values changed; a dot in a name goes into a mapping within."""
    result = dict(values) if isinstance(values, dict) else {}
    for name, value in changes.items():
        outer, dot, inner = name.partition(".")
        result[outer] = _merged(result.get(outer), {inner: value}) if dot else value
    return result


def step_range(flag: str, text: str | None) -> tuple[int, int] | None:
    """The first and the last step of A:B, which a flag gives, or None. Raises ValueError for any other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise UserError(f"{flag} is {text!r}: write the first step and the last, as in 101:200")
    return int(match[1]), int(match[2])
