"""A sweep that can be run: what is searched, from what, and how."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from roxxel_dist.place.directory import is_study
from roxxel_dist.settings.config import SECTIONS, Config
from roxxel_dist.sweep.driver.bucket import StudyBucket
from roxxel_dist.sweep.driver.options import SweepOptions, TrialResources
from roxxel_dist.sweep.samplers import Engine, make
from roxxel_dist.sweep.space.extras import SEED, SIDE, SIDES
from roxxel_dist.sweep.space.sweep_file import Parameter, Params, Sweep
from roxxel_dist.sweep.space.trial_phases import is_of_phases
from roxxel_dist.sweep.space.values import as_text
from roxxel_dist.sweep.study.folder import CORPUS, IDENTITY, LOGS, TRIALS, StudyDir
from roxxel_dist.sweep.study.journal import History, read_history
from roxxel_dist.sweep.trial.corpus import shards_of
from roxxel_dist.sweep.trial.process import TrialTask
from roxxel_dist.sweep.trial.trial import config_of
from roxxel_dist.utils.display import counted

ANNEAL = "anneal"
"""The parameter of a sweep that is no field of a Config: RUN@STEP, from which each trial is a decay branch."""
NO_FIELDS = frozenset({ANNEAL, SIDE})
"""Parameters that are no fields of a Config."""
KNOWN_CONFIGS = 1000
"""Configs of trials that are kept: one is asked for when it is proposed and when its task is made."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A sweep that can be run: what is searched, from what, and how. `open_sweep` makes it."""

    options: SweepOptions
    definition: str | None
    """The file of the sweep, where one was given."""
    config: Any
    """The `Config` that trials begin from."""
    study: StudyDir
    sweep: Sweep
    data_path: str | None
    server: str | None
    """The sweep of a W&B server that leads: its id there, "" for one that is not made yet; None: the search is here."""
    directory: str
    """The folder in which programs and models of the user's own are found: where the study began, wherever it is taken
    up."""
    program: list[str] | None
    """The words of a program of the user's own."""
    resources: TrialResources
    bucket: StudyBucket | None = None
    """The study's, of which `study` is the copy."""
    wide: Any = None
    """The `Config` of the wider model that gets the best parameters, read before the search begins."""
    is_new: bool = False
    """Whether this start has made the study."""
    _configs: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The configs of `trial_config`, by parameters."""

    @cached_property
    def base(self) -> dict[str, Any]:
        """`config` by field."""
        return self.config.to_dict()

    @property
    def sides(self) -> list["SweepRun"]:
        """The sweep from the config of each side of a comparison; of a search this one alone."""
        if self.sweep.versus is None:
            return [self]
        configs = [Config.from_dict({**self.base, **self.sweep.versus.fields(side)}) for side in SIDES]
        return [replace(self, config=config) for config in configs]

    @property
    def method(self) -> str:
        """The method that chooses parameters."""
        return f"W&B sweep {self.server}" if self.server else self.options.method or self.sweep.method

    @property
    def count(self) -> int | None:
        """Trials in all; None where there is no end."""
        size, is_grid = self.sweep.space.size, (self.options.method or self.sweep.method) == "grid"
        grid = size + len(self.sweep.space.baselines) if size is not None and is_grid else None
        return min((n for n in (self.options.count, self.sweep.run_cap, grid) if n is not None), default=None)

    @property
    def searched(self) -> list[str]:
        """The names of the parameters that have more than one value, shares included."""
        return list(self.sweep.space.names)

    @cached_property
    def swept(self) -> set[str]:
        """The names of all parameters, of derived ones too; of nested ones the outermost."""
        names = {parameter.path[0] for parameter in self.sweep.space.parameters} | set(self.sweep.rules.derived)
        return {name for name in names if not is_of_phases(name)}

    @property
    def swept_fields(self) -> set[str]:
        """The fields of a Config that are parameters."""
        names = {field_of(parameter) for parameter in self.sweep.space.parameters} | set(self.sweep.rules.derived)
        return {name for name in names if not is_of_phases(name)}

    @property
    def varied_fields(self) -> set[str]:
        """The fields of a Config that are not the same in all trials: those that are derived, or that `when` leaves
        out in some, too."""
        free = {field_of(parameter) for parameter in self.sweep.space.free}
        return free | (self.swept_fields & {*self.sweep.rules.derived, *self.sweep.rules.when})

    @property
    def description(self) -> str:
        """The method and the search space, in a line."""
        if (compared := self.sweep.versus) is not None:
            names = " against ".join(f"{side} ({compared.names[side]})" for side in SIDES)
            return f"{names} by {self.sweep.metric}, interval of {compared.level:.0%}, whole trainings alone"
        words = " ".join(word for word in self.program or () if not word.startswith("${"))
        program, sweep = f" of {words}" if words else "", self.sweep
        searched = counted(len(self.searched), "parameter")
        return f"{self.method} search over {searched}{program}, {sweep.goal} {sweep.metric}"

    @property
    def extent(self) -> str:
        """The number of trials that there are to be, in a line."""
        begun, size, workers = len(self.history().trials), self.sweep.space.size, self.options.workers
        line = "trials until Ctrl-C" if self.count is None else counted(self.count, "trial")
        line += f", {begun} of them begun before" if begun else ""
        if self.sweep.versus is not None and self.count is not None:
            line = f"{counted(self.count // 2, 'pair')} at most"
            line += f", {counted(begun, 'trial')} begun before" if begun else ""
            size = None
        line += "" if size is None else f"; the space has {size:,} points"
        return line + (f"; {workers} at once" if workers > 1 else "")

    def history(self) -> History:
        """The trials of the study so far."""
        return read_history(self.study.path) if is_study(self.study.path) else History()

    def trial_config(self, params: Mapping[str, Any]) -> Any:
        """The Config of a trial, made once for equal parameters. Raises ValueError for parameters that are none."""
        key = as_text(dict(params))
        if key not in self._configs:
            if len(self._configs) >= KNOWN_CONFIGS:
                self._configs.clear()
            if self.sweep.versus is not None:
                changes = self.sweep.versus.fields(params[SIDE])
                made = Config.from_dict({**self.base, **changes, SEED: params[SEED]})
                made.validate()
            else:
                fields = {name: value for name, value in params.items() if name != ANNEAL}
                made = config_of(self.base, fields, self.swept - {ANNEAL}, self.sweep.data.groups)
            self._configs[key] = made
        return self._configs[key]

    def sampler(self) -> Engine:
        """A new sampler of the search here; it proposes no parameters of which no Config can be made."""
        accept = None if self.program else self._accept
        return make(self.sweep, self.options.sweep_seed, self.options.method, accept=accept)

    def _accept(self, params: Params) -> None:
        """Raises ValueError for parameters that no trial can be made of."""
        self.trial_config(params)
        if self.sweep.rules.budget is not None:
            self.sweep.rules.budget.check_plan(params)

    def task_of(self, trial: int, params: Params, attempt: int) -> dict[str, Any]:
        """The task of a worker: one attempt of a trial."""
        folder, log = self.study.path.absolute(), f"{trial}.log"
        if self.bucket is not None:  # each host has a cache of its own, and keeps the log of the attempts that it runs
            folder, log = Path(f"{self.bucket.url.name}-{self.study.metadata(IDENTITY)}"), f"{trial}.{attempt}.log"
        corpus, data = None, self.data_path  # a program of the user's knows its data
        config, anneal = self.base, params.get(ANNEAL)
        if self.program is None and self.server is None:
            made = self.trial_config(params)
            config, params = made.to_dict(), {}  # the worker gets the config as it was checked
            shards = shards_of(made, data, folder / CORPUS)
            if shards is not None:
                corpus, data = {"text": data, "folder": str(folder / CORPUS)}, str(shards)
        return asdict(
            TrialTask(
                trial=trial,
                params=params,
                attempt=attempt,
                run_dir=str(folder / TRIALS / str(trial)),
                log=str(folder / LOGS / log),
                metric=self.sweep.metric,
                goal=self.sweep.goal,
                weights=self.sweep.logged,
                config=config,
                data_path=data,
                corpus=corpus,
                program=self.program,
                **self.resources.ranks,
                max_time_s=self.options.max_time_s,
                directory=self.directory,
                swept=sorted(self.swept),
                wandb_sweep=self.server,
                bucket=None if self.bucket is None else str(self.bucket.url),
                anneal=anneal,
            )
        )


def field_of(parameter: Parameter) -> str:
    """The field of a Config that a parameter is; of one in a section the name within it."""
    first, *rest = parameter.path
    return rest[0] if rest and first in SECTIONS else first
