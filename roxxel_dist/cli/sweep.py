"""The command that searches for the best configuration."""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from roxxel_dist.cli.arguments import ConfigArgs, TrainArgs, parse_config
from roxxel_dist.cli.parser import HELP
from roxxel_dist.data.files.discovery import absolute, check_local
from roxxel_dist.launcher.job.spec import flags_in, split_flags
from roxxel_dist.launcher.output import info
from roxxel_dist.place.directory import CONFIG, DEFINITION
from roxxel_dist.place.run_place import bucket_url, local_run
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError, attempt_number
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.sweep.driver.options import SweepOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArgs(SweepOptions, ConfigArgs):
    """Search for the best configuration. Each trial is a training of its own, in a Ray task.

    The search needs no account and no server: by default it runs in a private Ray on this machine. The same command
    again continues the study. The fields below are the config of every trial, which the parameters of the sweep change.
    """

    def __post_init__(self) -> None:
        """Checked where `sweep` makes SweepOptions of it: with the folder of the study."""


def sweep(words: list[str]) -> int:
    """Search for the best configuration, in trials that are Ray tasks."""
    if "confirm" in flags_in(words) and not HELP.intersection(words):
        return confirm(words)
    with ExitStack() as held:
        search = _prepared(words, held)
        if search is None:
            return 0
        from roxxel_dist.sweep.driver import run
        from roxxel_dist.view.web.page import write_study

        return run.search(search, write_study)


CHOSEN = ("config", "count", "data_path", "extras", "method", "sweep_config", "sweep_id", "transfer_to")
"""Flags that a confirmation cannot have: the study decides them."""


def confirm(words: list[str]) -> int:
    """Train the best mixture of a study, and its baselines, for longer: a study in the folder of that one."""
    from roxxel_dist.sweep.report.confirmation import confirmation
    from roxxel_dist.sweep.report.mixture import expected_confirmation
    from roxxel_dist.sweep.report.text import best_config
    from roxxel_dist.sweep.study.confirm import EXPECTED, FOLDER, Expected
    from roxxel_dist.sweep.study.folder import StudyDir, read_study

    with ExitStack() as held:
        with usage_errors():
            flags = flags_in(words)
            factor = _factor(flags)
            bucket = study_bucket({**flags, "dry_run": ""}, held)  # the study itself is only read
            study = read_study(flags["study"]) if bucket is None else read_study(bucket.path, bucket.url)
            if bucket is not None:
                bucket.fetch_confirmation()
            place = study.path / FOLDER if bucket is None else bucket.url.join(FOLDER)
            begun = Expected.read(study.path) if StudyDir(study.path / FOLDER).is_there else None
            if begun is not None and begun.factor != factor:
                raise UserError(
                    f"--confirm {factor}: {place} was begun with --confirm {begun.factor}: use that, or remove {place}"
                )
        rest = [word for name, _, group in split_flags(words) if name not in ("confirm", "study") for word in group]
        more = ["--study", str(place)]
        if not StudyDir(study.path / FOLDER).is_there:
            with usage_errors():
                if bucket is not None and study.done:
                    bucket.fetch_file(f"{study.run_dir(study.done[0]).relative_to(study.path).as_posix()}/{CONFIG}")
                _, best = best_config(study, f"--confirm {factor}")
                begun = expected_confirmation(study, best, factor)
            if "dry_run" not in flags:
                begun.write(study.path)
                if bucket is not None:
                    bucket.send(study.path / EXPECTED)
            more += _definition_to_confirm(study, begun, best, held.enter_context(TemporaryDirectory()))
            more += [] if "wandb" in flags else ["--wandb", StudyDir(study.path).settings().get("wandb", "offline")]
        try:
            code = sweep([*more, *rest])
        finally:
            if bucket is not None:
                bucket.fetch_confirmation()
            if not StudyDir(study.path / FOLDER).is_there:  # the start was refused
                Path(study.path, EXPECTED).unlink(missing_ok=True)
                if bucket is not None and "dry_run" not in flags:
                    bucket.remove(EXPECTED)
        if "dry_run" not in flags and (found := confirmation(study)) is not None:
            print("\n".join(["", *found.text()]))
        return code


def _definition_to_confirm(study: Any, begun: Any, best: Any, folder: str) -> list[str]:
    """The flags of the sweep that trains what is expected, whose files are written into a folder."""
    from roxxel_dist.settings.config import load_yaml
    from roxxel_dist.sweep.study.confirm import lengthen_config
    from roxxel_dist.sweep.study.folder import DATA_PATH, StudyDir

    metric = load_yaml(study.path / DEFINITION).get("metric")
    search = {"method": "grid", **({"metric": metric} if metric else {}), "parameters": begun.values}
    return _flags_of(folder, search, lengthen_config(best, begun.factor), StudyDir(study.path).metadata(DATA_PATH))


def write_yaml(folder: str | Path, name: str, content: Mapping[str, Any]) -> str:
    """Write a file of YAML, in the order of the keys; returns its path."""
    import yaml

    file = Path(folder, name)
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(file)


def _flags_of(folder: str, search: Mapping[str, Any], config: Any, data_path: str | None) -> list[str]:
    """The flags of a sweep whose files are written into a folder."""
    config.save_yaml(Path(folder, "base.yaml"))
    words = ["--sweep_config", write_yaml(folder, "sweep.yaml", search), "--config", str(Path(folder, "base.yaml"))]
    return [*words, *(["--data_path", data_path] if data_path else [])]


def _factor(flags: Mapping[str, str]) -> int:
    """The number of --confirm. Raises UserError where it is none, or other flags do not go with it."""
    text = flags["confirm"]
    if not text.isdecimal() or not int(text):
        given = text or "has no value"
        raise UserError(f"--confirm {given}: must be a whole number, 1 or more times the steps of a trial")
    if (name := next((name for name in CHOSEN if name in flags), None)) is not None:
        raise UserError(f"--confirm {int(text)} trains what the study has found: leave --{name} out")
    if flags.get("study") is None:
        raise UserError(f"--confirm {int(text)} does not say of which study: name its folder with --study")
    return int(text)


def anneal(named: str, args: TrainArgs, config: Any) -> int:
    """A decay branch from each checkpoint that `train --anneal RUN@A,B` names, as trials of a study."""
    from roxxel_dist.run.metadata import data_of, saved_config
    from roxxel_dist.run.past import branches_of

    if attempt_number() or "ROXXEL_RUN_ID" in os.environ:
        raise UserError(f"--anneal {named} is a study, which starts its own processes: leave the launcher out")
    if args.run_dir is None:
        raise UserError(f"--anneal {named} is a study: name its folder with --run_dir")
    if config.wandb == "online":
        raise UserError("--wandb is online, and the branches of --anneal write offline: use --wandb offline")
    interrupt.end()
    with TemporaryDirectory() as folder:
        with usage_errors():
            branches = branches_of(config, named)
            run = local_run(branches[0].run)
            path = args.data_path or data_of(saved_config(run), run)
        values = [f"{absolute(one.run)}@{one.step}" for one in branches]
        metric = {"name": "val_loss", "goal": "minimize"}
        search = {"method": "grid", "metric": metric, "parameters": {"anneal": {"values": values}}}
        return sweep([*_flags_of(folder, search, config, path), "--study", args.run_dir, "--wandb", config.wandb])


def _prepared(words: list[str], held: ExitStack) -> Any:
    """The sweep that can begin; None where it was only to be shown. `held` keeps what it needs until it has ended."""
    from roxxel_dist.sweep.study.folder import StudyDir

    with usage_errors():
        if HELP.intersection(words):  # before the lock of a study is taken
            parse_config(SweepArgs, words, "sweep", None)
        flags = flags_in(words)
        named: dict[str, Any] = {name: flags.get(name) for name in ("study", "sweep_config", "sweep_id")}
        bucket = study_bucket(flags, held)
        study = StudyDir(SweepOptions(**named).folder) if bucket is None else bucket.files
        if bucket is None and "dry_run" not in flags:
            held.enter_context(study.hold(info))
        args, config = parse_config(SweepArgs, words, "sweep", study.base_file)
        if args.sweep_config is None and args.study is None and args.sweep_id is None:
            raise UserError("nothing to search: name a file with --sweep_config, or a study with --study")
        from roxxel_dist.sweep.driver import run
        from roxxel_dist.sweep.wandb_server import definition

        given: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(SweepOptions)}
        given["study"] = study.place
        options = SweepOptions(**given)
        project = config.wandb_project if "wandb_project" in flags else None
        server = _server(options, config, set(flags), project, is_new=study.base_file is None)
        if "wandb" not in flags and config.wandb == "off":
            # Uploaded later with `wandb sync`, or never. A study that is there has decided already.
            config.wandb = study.settings().get("wandb", "offline")
        path = options.sweep_config
        if server:
            path = write_yaml(held.enter_context(TemporaryDirectory()), "sweep.yaml", definition(server))
        search = run.open_sweep(options, path, config, server, bucket)
        if options.dry_run:
            print(run.preview(search))
            return None
        return run.create_study(search, project)


def study_bucket(flags: Mapping[str, Any], held: ExitStack) -> Any:
    """The bucket of the study that flags name, held until `held` ends; None where it is in a folder."""
    if (url := bucket_url(flags.get("study"))) is None:
        check_local("--study", flags.get("study"))
        return None
    from roxxel_dist.objects.store import TIMEOUT_S
    from roxxel_dist.sweep.driver.bucket import driver_bucket, reader_bucket

    timeout_s = float(flags.get("store_timeout") or TIMEOUT_S)
    if "dry_run" in flags:
        return held.enter_context(reader_bucket(url, timeout_s))
    return held.enter_context(driver_bucket(url, info, flags.get("cache_dir"), timeout_s))


def _server(options: SweepOptions, config: Any, flags: set[str], project: str | None, *, is_new: bool) -> str | None:
    """The sweep of a W&B server that shall lead: its id, "" for a new one; None where the search is made here."""
    from roxxel_dist.sweep.wandb_server import create_or_join, has_login

    if options.sweep_id is not None:
        if options.sweep_config is not None:
            raise UserError("--sweep_id names a sweep that is on a server: leave --sweep_config out")
        return create_or_join(options.sweep_id, project)
    if config.wandb == "online":
        return ""
    if project is None or "wandb" in flags or not is_new:
        return None
    if find_spec("wandb") is not None and has_login():
        info("W&B login found: its server chooses the trials (with --wandb offline, this machine does)")
        return ""
    info("no W&B login: this machine chooses the trials, and runs are written offline (`wandb sync` uploads them)")
    return None
