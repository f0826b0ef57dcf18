"""The command that searches for the best configuration."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from roxxel_dist.cli.arguments import ConfigArgs, flags_in, parse_config
from roxxel_dist.config import usage_errors
from roxxel_dist.launcher.output.console import info

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArgs(ConfigArgs):
    """Search for the best configuration: many trainings, each a trial of its own in a Ray task.

    With no account and no server the search is made here, in a Ray of its own on this machine. The same command again
    goes on with the study. The fields below are what every trial begins from.
    """

    sweep_config: str | None = None
    """A W&B sweep: YAML with method, metric, parameters …; a study that is there has its own."""
    extras: str | None = None
    """A second YAML file for what W&B's has no words for: derived, constraints, when, resources."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`; a study remembers its own."""
    count: int | None = None
    """Trials in all, those of earlier starts included; run_cap of the YAML where not given, else until Ctrl-C."""
    study: str | None = None
    """Where the study is kept; studies/NAME, after the file or the id, where not given. What is there goes on."""
    workers: int | None = None
    """Trials that run at once; 1 where not given."""
    method: str | None = None
    """bayes, tpe, random or grid; the method of the YAML where not given."""
    sweep_seed: int = 0
    """Of the search; the trials' own is `seed`."""
    ray_address: str | None = None
    """A Ray cluster: `auto` on one of its nodes or in a Ray job, or HOST:PORT of its head. A Ray of its own here where
    not given."""
    insecure: bool = False
    """Use the cluster also without a token: whoever reaches such a one can run programs as you."""
    hosts_per_trial: int = 1
    """Nodes of each trial."""
    procs_per_host: int = 1
    """Processes of each trial on each of its nodes."""
    cpus_per_trial: float | None = None
    """CPUs that Ray keeps for a trial on each of its nodes; `resources` of --extras, or one a process, if not given."""
    gpus_per_trial: int | None = None
    """GPUs of each trial, over all its nodes; all that are there where not given."""
    max_trial_time: str | None = None
    """End a trial that takes longer, and take its best value so far: seconds, or such as 90m, 2h, 1d."""
    max_failures: int = 5
    """Failed trials in a row that end the sweep."""
    sweep_id: str | None = None
    """ENTITY/PROJECT/ID of a sweep on a W&B server: its trials are asked for there."""
    dry_run: bool = False
    """Print trials, devices and hours, and run nothing but some steps of one trial."""


def sweep(words: list[str]) -> int:
    """Search for the best configuration, in trials that are Ray tasks."""
    with usage_errors(), ExitStack() as held:
        args, config, told = _read(words)
        from roxxel_dist.sweep.run import Session
        from roxxel_dist.sweep.study import settings

        server = _server(args, config, told)
        if "wandb" not in told and config.wandb == "off":
            # Uploaded later with `wandb sync`, or never. A study that is there has decided already.
            config.wandb = settings(Path(args.study or "")).get("wandb", "offline")
        definition = args.sweep_config if server in (None, "") else held.enter_context(_defined(str(server)))
        wanted = _wanted(args, server, config.wandb_project if "wandb_project" in told else None)
        session = Session(wanted, definition, args.extras, config, args.data_path)
        if args.dry_run:
            print(session.forecast())
            return 0
        session.begin()
    return session.run()


def _server(args: SweepArgs, config: Any, told: set[str]) -> str | None:
    """The sweep of a W&B server that shall lead: its id, "" for a new one; None where the search is made here."""
    from roxxel_dist.sweep.study import base_file
    from roxxel_dist.sweep.wandb_bridge.server import logged_in

    if args.sweep_id is not None:
        if args.sweep_config is not None:
            raise ValueError("--sweep_id is a sweep that a server has already: leave --sweep_config out")
        from roxxel_dist.sweep.wandb_bridge.server import create_or_join

        return create_or_join(args.sweep_id, config.wandb_project if "wandb_project" in told else None)
    if config.wandb == "online":
        return ""
    if "wandb_project" not in told or "wandb" in told or base_file(Path(args.study or "")) is not None:
        return None
    if find_spec("wandb") is not None and logged_in():
        info("W&B knows you: the sweep is made there, and its server chooses (--wandb offline searches here)")
        return ""
    info("no W&B login: the search is made here, and runs are written offline (`wandb sync` uploads them)")
    return None


@contextmanager
def _defined(server: str) -> Iterator[str]:
    """A file with what a W&B server has of a sweep."""
    import yaml

    from roxxel_dist.sweep.wandb_bridge.server import definition

    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(definition(server), file, sort_keys=False)
        file.flush()
        yield file.name


def _wanted(args: SweepArgs, server: str | None, project: str | None) -> Any:
    """What was asked for, with what follows from it."""
    from roxxel_dist.sweep.options import Wanted

    gpus, hosts = args.gpus_per_trial, args.hosts_per_trial
    if gpus is not None and (gpus < 1 or hosts < 1 or gpus % hosts):
        raise ValueError(f"--gpus_per_trial {gpus}: must be a multiple of --hosts_per_trial {hosts}, at least 1 each")
    return Wanted(
        study=Path(args.study or ""), count=args.count, workers=1 if args.workers is None else args.workers,
        wandb_sweep=server, wandb_project=project, method=args.method, seed=args.sweep_seed,
        ray_address=args.ray_address, insecure=args.insecure, hosts=hosts, procs_per_host=args.procs_per_host,
        cpus_per_host=args.cpus_per_trial, gpus_per_host=None if gpus is None else gpus // hosts,
        max_time_s=seconds(args.max_trial_time), max_failures=args.max_failures,
    )  # fmt: skip


def _read(words: list[str]) -> tuple[SweepArgs, Any, set[str]]:
    """(arguments, what trials begin from, the names of the flags that were given)."""
    from roxxel_dist.sweep.study import base_file

    told = dict(flags_in(words))
    study = Path(told["study"]) if "study" in told else default_study(told.get("sweep_config"), told.get("sweep_id"))
    args, config = parse_config(SweepArgs, words, "sweep", base_file(study))
    if args.sweep_config is None and args.study is None and args.sweep_id is None:
        raise ValueError("what shall be searched? name a file with --sweep_config, or a study with --study")
    return dataclasses.replace(args, study=str(study)), config, set(told)


def default_study(sweep_config: str | None, sweep_id: str | None) -> Path:
    """Where a study is kept whose folder was not named: after its file, or its id on a W&B server."""
    name = Path(sweep_config).stem if sweep_config else (sweep_id or "").rpartition("/")[2]
    return Path("studies") / (name or "sweep")


def seconds(text: str | None) -> float | None:
    """90m as 5400.0. Raises ValueError for what is no time."""
    if text is None:
        return None
    unit = text[-1:].lower()
    number = text[:-1] if unit in UNITS else text
    try:
        found = float(number) * UNITS.get(unit, 1.0)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError(f"--max_trial_time {text}: write seconds, or such as 90m, 2h or 1d")
    return found
