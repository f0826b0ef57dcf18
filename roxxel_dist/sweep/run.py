"""A sweep from its command line: study, engine, trials, and what a person sees of them."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import FIELD_TYPES, SECTIONS, UsageError, flat_fields, load_yaml, unknown, usage_errors
from roxxel_dist.sweep.dry_run import Plan, forecast, trials
from roxxel_dist.sweep.execution.corpus import shards_of
from roxxel_dist.sweep.execution.trial import config_of
from roxxel_dist.sweep.journal import History, read_history
from roxxel_dist.sweep.live_view import Screen
from roxxel_dist.sweep.options import Wanted
from roxxel_dist.sweep.report.html import write_report
from roxxel_dist.sweep.report.text import table
from roxxel_dist.sweep.samplers import Engine, SpaceExhausted, make
from roxxel_dist.sweep.space.sweep_file import Params, nearest
from roxxel_dist.sweep.study import (
    CORPUS,
    DATA_PATH,
    DIRECTORY,
    LOGS,
    REPORT,
    SERVER,
    TRIALS,
    is_study,
    leader,
    look,
    read_study,
    recorded,
    take_back,
    write_down,
)
from roxxel_dist.sweep.wandb_bridge.program import command_of
from roxxel_dist.sweep.wandb_bridge.server import ServerSampler

LOGGED = (
    "val_loss", "train_loss", "train_eval_loss", "train_bal", "val_bal", "ms_per_step", "tokens_per_s", "tokens",
    "phase", "lr", "grad_norm", "update_norm", "vram_gb", "ram_gb", "mfu",
)  # fmt: skip
"""What a training logs; besides, with `/`, losses by data set."""
MANY = 200
"""Trials whose pictures take seconds."""


class Session:
    """A study that is searched.

    Args:
        wanted: what was asked for.
        sweep_config: W&B's YAML; None goes on with the study's own.
        extras: the second YAML file.
        config: the `Config` that trials begin from.
        data_path: the data.

    Raises:
        ValueError: something cannot be; nothing was started then.
    """

    def __init__(
        self, wanted: Wanted, sweep_config: str | None, extras: str | None, config: Any, data_path: str | None
    ) -> None:
        self._wanted = wanted
        if config.wandb != "off" and find_spec("wandb") is None:
            raise ValueError("W&B is not installed: pip install 'roxxel-dist[sweep]', or use --wandb off")
        config = config.with_absolute_paths()
        self._server = leader(wanted.study, wanted.wandb_sweep)
        self._sweep, self._data = look(wanted.study, sweep_config, extras, config, data_path)
        self._share = wanted.share(self._sweep.rules.resources)
        self._definition = {} if sweep_config is None else load_yaml(sweep_config)
        self._write_down = lambda told: write_down(wanted.study, sweep_config, extras, config, told)
        self._is_new = False
        self._made: list[Path] = []
        self._base = config.to_dict()
        # Programs and models of one's own are found from where the study began, wherever it is taken up.
        began = recorded(wanted.study, DIRECTORY)
        self._directory = began if began and os.path.isdir(began) else os.getcwd()
        self._program = command_of(self._sweep.program, self._sweep.command, self._directory)
        self._check_data(config.primary_path(self._data))
        self._names = [one.name for one in self._sweep.space.free]
        self._swept = {one.path[0] for one in self._sweep.space.parameters} | set(self._sweep.rules.derived)
        self._count = min(
            (one for one in (wanted.count, self._sweep.run_cap, self._grid()) if one is not None), default=None
        )
        self._check_names()
        self._check_metric()
        self._engine: Engine = ServerSampler() if self._server is not None else self._make()

    def _check_names(self) -> None:
        """Raises ValueError for a parameter that no config has: every trial would fail."""
        for name in () if self._program else sorted(self._swept):
            if name not in FIELD_TYPES and name not in SECTIONS:
                raise ValueError(f"parameters: {unknown(name, list(FIELD_TYPES), 'field')}")

    def _check_metric(self) -> None:
        """Raises ValueError for a metric that no training has; a loss or a model of one's own may have any."""
        base, metric = flat_fields(self._base), self._sweep.metric
        own = {name for name in ("loss", "model") if base.get(name) is not None} | ({"loss", "model"} & self._swept)
        if self._program or self._server is not None or own or metric in LOGGED or "/" in metric:
            return
        raise ValueError(f"metric.name: no training logs {metric!r}: {nearest(metric, LOGGED)}")

    def _check_data(self, path: Any) -> None:
        """Raises ValueError where there is no data: every trial would fail."""
        if path is None and self._program is None and self._server is None:
            raise ValueError("no data: name a text file, a folder or shards with --data_path, or `self` in datasets")
        if path is not None and not os.path.exists(path):
            raise ValueError(f"--data_path {path}: no such file or folder")

    def _grid(self) -> int | None:
        return self._sweep.space.size if (self._wanted.method or self._sweep.method) == "grid" else None

    @property
    def _method(self) -> str:
        return f"W&B sweep {self._server}" if self._server else self._wanted.method or self._sweep.method

    def _make(self) -> Engine:
        accept = None if self._program else self._config
        return make(self._sweep, self._wanted.seed, self._wanted.method, accept=accept)

    def _config(self, params: Mapping[str, Any]) -> Any:
        """The Config of a trial. Raises ValueError for parameters that are none."""
        return config_of(self._base, params, self._swept)

    def task_of(self, trial: int, params: Params, attempt: int) -> dict[str, Any]:
        """All that a worker must know of a trial, as plain values."""
        wanted = self._wanted
        folder = wanted.study.absolute()
        corpus, data = None, self._data  # a program of one's own knows its data
        if self._program is None and self._server is None:
            config = self._config(params)
            shards = shards_of(config, self._data, folder / CORPUS)
            made = shards is not None and shards.is_relative_to(folder)
            corpus = {"text": self._data, "folder": str(folder / CORPUS)} if made else None
            data = str(shards) if made else self._data
        return {
            "trial": trial,
            "params": params,
            "attempt": attempt,
            "run_dir": str(folder / TRIALS / str(trial)),
            "log": str(folder / LOGS / f"{trial}.log"),
            "metric": self._sweep.metric,
            "goal": self._sweep.goal,
            "config": self._base,
            "corpus": corpus,
            "data_path": data,
            "program": self._program,
            "hosts": wanted.hosts,
            "procs_per_host": wanted.procs_per_host,
            "gpus_per_host": self._share.gpus,
            "cpus_per_host": self._share.cpus,
            "insecure": wanted.insecure,
            "max_time_s": wanted.max_time_s,
            "ray_address": wanted.ray_address,
            "directory": self._directory,
            "environment": {},
            "sweep": {
                "names": sorted(self._swept),
                "name": self._sweep.name or folder.name,
                "wandb": self._server,
            },
        }

    def begin(self) -> None:
        """Make the study, and the sweep on a server that shall lead it. Raises ValueError where that cannot be."""
        if self._server is None and not is_study(self._wanted.study):
            try:
                self._make().ask()
            except SpaceExhausted as error:  # before anything was run: no trial can be made
                raise ValueError(str(error)) from error
        if self._server == "":
            from roxxel_dist.sweep.wandb_bridge.server import create_or_join

            self._server = create_or_join(self._definition, self._wanted.wandb_project)
        folder = self._wanted.study.absolute()
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        self._is_new = self._write_down({DATA_PATH: self._data, DIRECTORY: self._directory, SERVER: self._server})

    def run(self) -> int:
        """Search; returns the exit code: 0 at the end, 1 where it cannot go on as it is, 42 where it was asked to end.

        Raises:
            UsageError: something cannot be, or the study is held; nothing was started then.
        """
        from roxxel_dist.launcher.backends.ray.cluster import ClusterError

        wanted = self._wanted
        with Screen(self._count, wanted.workers, self._names) as screen:
            for line in self._notes():
                screen.say(line)
            try:
                with usage_errors():
                    ending = self._search(screen)
            except ClusterError as problem:
                self._take_back()
                screen.say(str(problem))
                return EXIT_PREFLIGHT
            except UsageError:
                self._take_back()
                raise
        self._tell(ending.reason)
        return ending.code

    def _take_back(self) -> None:
        """Leave nothing of a first start in which nothing ran."""
        if self._is_new and self._server is None and not self._plan().history.trials:
            take_back(self._wanted.study, self._made)

    def _search(self, screen: Screen) -> Any:
        from roxxel_dist.sweep.controller import Options, run_sweep
        from roxxel_dist.sweep.execution.trial import run
        from roxxel_dist.sweep.wandb_bridge.server import agent_trial

        body = run if self._server is None else agent_trial
        wanted = self._wanted
        options = Options(
            count=wanted.count, workers=wanted.workers, max_failures=wanted.max_failures,
            resources=self._share.task, ray_address=wanted.ray_address, insecure=wanted.insecure,
            method=self._method, seed=wanted.seed,
        )  # fmt: skip
        return run_sweep(
            wanted.study, self._sweep, self._engine, body, self.task_of, options,
            on_change=screen.show, say=screen.say,
        )  # fmt: skip

    def _notes(self) -> list[str]:
        """What a person should know before it begins."""
        found = [f"study {self._wanted.study}: {self._what()}, {trials(self._plan())}"]
        cap = self._sweep.run_cap
        if cap is not None and (self._wanted.count or 0) > cap:
            found.append(f"--count {self._wanted.count} is more than the run_cap of the sweep's file: it ends at {cap}")
        names = {"tokenizer_type", "vocab_size"} & set(self._names)
        if names and self._program is None and self._sweep.metric == "val_loss":
            found.append(
                f"val_loss is per token, and {' and '.join(sorted(names))} changes what a token is: trials with other "
                "tokenizers cannot be compared by it"
            )
        return found

    def _tell(self, reason: str) -> None:
        """The last words: why it ended, the best, the page."""
        study = read_study(self._wanted.study)
        print(f"{table(study)}\n\n{reason}", flush=True)
        if len(study.done) >= MANY:
            print(f"making the page of {len(study.done):,} trials …", flush=True)
        try:
            page, missing = write_report(study, study.path / REPORT)
        except OSError as error:  # the sweep has ended all the same, and the journal has all
            page, missing = f"not written ({error.strerror}): roxxel-dist report {study.path} makes it", ""
        print("\n".join([f"page: {page}", *([missing] if missing else [])]))
        if study.done and self._program is None:
            print(f"train the best: roxxel-dist report {study.path} --best_config best.yaml")

    def _what(self) -> str:
        sweep = self._sweep
        words = [word for word in self._program or () if not word.startswith("${")]
        program = f" of {' '.join(words)}" if words else ""
        return f"{self._method} search over {len(self._names)} parameters{program}, {sweep.goal} {sweep.metric}"

    def _plan(self) -> Plan:
        wanted = self._wanted
        return Plan(
            study=wanted.study, what=self._what(), count=self._count, size=self._sweep.space.size,
            workers=wanted.workers, hosts=wanted.hosts, procs_per_host=wanted.procs_per_host,
            gpus_per_host=self._share.gpus, ray_address=wanted.ray_address, max_time_s=wanted.max_time_s,
            history=read_history(wanted.study) if is_study(wanted.study) else History(),
        )  # fmt: skip

    def forecast(self) -> str:
        """Trials, devices and hours; nothing runs but some steps of one. Raises UsageError where none could run."""
        config_of = None if self._program else self._config
        return forecast(self._plan(), self._make(), config_of, self._data)
