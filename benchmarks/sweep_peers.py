"""Searches to compare, all with `ask` and `tell`: ours, W&B's, and optuna's samplers as its own users call them."""

import atexit
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.sweep import make
from roxxel_dist.sweep.samplers.base import AskTell
from roxxel_dist.sweep.space.sweep_file import sweep_of

OURS, PEERS = "bayes", ("wandb", "tpe", "random")
TORCH, MULTIVARIATE, SMAC = "GPSampler", "multivariate TPE", "SMAC3"

DESIGN = 12
"""SMAC3's points before its model: its own rule is a quarter of the trials that it is to run, which are 50."""


def suggest(trial: Any, parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters of a trial of optuna, on its own distributions."""
    params = {}
    for name, spec in parameters.items():
        if "values" in spec:
            params[name] = trial.suggest_categorical(name, spec["values"])
        elif spec.get("distribution") == "q_uniform":
            params[name] = trial.suggest_float(name, spec["min"], spec["max"], step=spec["q"])
        elif spec.get("distribution") == "normal":
            place = trial.suggest_float(name, 1e-6, 1 - 1e-6)
            params[name] = statistics.NormalDist(spec["mu"], spec["sigma"]).inv_cdf(place)
        elif isinstance(spec["min"], int):
            params[name] = trial.suggest_int(name, spec["min"], spec["max"])
        else:
            log = spec.get("distribution") == "log_uniform_values"
            params[name] = trial.suggest_float(name, spec["min"], spec["max"], log=log)
    return params


class Optuna:
    """One of optuna's samplers, on optuna's own distributions."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], sampler: Any) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._parameters = parameters
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._trials: dict[int, Any] = {}

    def ask(self) -> tuple[int, dict[str, Any]]:
        trial = self._study.ask()
        params = self.suggest(trial)
        self._trials[trial.number] = trial
        return trial.number, params

    def suggest(self, trial: Any) -> dict[str, Any]:
        return suggest(trial, self._parameters)

    def tell(self, trial: int, value: float | None) -> None:
        from optuna.trial import TrialState

        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(self._trials.pop(trial), value, state=state)


class Smac:
    """SMAC3's facade for the search of parameters, which asks for one seed of each configuration.

    Raises ImportError where `smac` is not installed.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], seed: int, trials: int = 1_000_000) -> None:
        from ConfigSpace import ConfigurationSpace, Float, Integer
        from smac import HyperparameterOptimizationFacade, Scenario

        space = ConfigurationSpace(seed=seed)
        for name, spec in parameters.items():
            kind = Integer if isinstance(spec["min"], int) else Float
            space.add(kind(name, (spec["min"], spec["max"])))
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        scenario = Scenario(space, deterministic=True, n_trials=trials, seed=seed, output_directory=Path(folder))
        # Its design is a share of the trials that it is to run: as many as the benchmark has.
        design = HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=DESIGN)
        self._facade = HyperparameterOptimizationFacade(
            scenario, lambda config, seed: 0.0, initial_design=design, overwrite=True, logging_level=False
        )
        self._asked: dict[int, Any] = {}
        self._worst = 0.0

    def ask(self) -> tuple[int, dict[str, Any]]:
        info = self._facade.ask()
        trial = len(self._asked)
        self._asked[trial] = info
        return trial, dict(info.config)

    def tell(self, trial: int, value: float | None) -> None:
        from smac.runhistory import StatusType, TrialValue

        status = StatusType.CRASHED if value is None else StatusType.SUCCESS
        self._worst = max(self._worst, value if value is not None else self._worst)
        cost = self._worst if value is None else value  # an endless one breaks its forest
        self._facade.tell(self._asked[trial], TrialValue(cost=cost, status=status))


def engine(name: str, parameters: Mapping[str, Mapping[str, Any]], seed: int) -> Any:
    """A new engine by its name. Raises ImportError where what it needs is not installed."""
    if name == "tpe":
        from optuna.samplers import TPESampler

        return Optuna(parameters, TPESampler(seed=seed))
    if name == MULTIVARIATE:
        from optuna.samplers import TPESampler

        return Optuna(parameters, TPESampler(seed=seed, multivariate=True, group=True))
    if name == SMAC:
        return Smac(parameters, seed)
    if name == TORCH:
        import torch
        from optuna.samplers import GPSampler

        torch.set_num_threads(1)
        return Optuna(parameters, GPSampler(seed=seed))
    if name == "wandb":
        from sweep_wandb import WandbSampler

        sweep = sweep_of({"parameters": parameters})
        return AskTell(sweep, seed, WandbSampler(sweep))
    return make({"parameters": parameters}, seed, name)


def missing(name: str) -> str | None:
    """Why an engine cannot be run here, or None."""
    try:
        engine(name, {"x": {"min": 0.0, "max": 1.0}}, 0)
    except ImportError as error:
        return str(error)
    return None
