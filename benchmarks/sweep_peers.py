"""Searches to compare, all with `ask` and `tell`: ours, W&B's, and optuna's samplers as its own users call them."""

from collections.abc import Mapping
from typing import Any

from roxxel_dist.sweep import make
from roxxel_dist.sweep.samplers.base import AskTell
from roxxel_dist.sweep.space.sweep_file import sweep_of

OURS, PEERS = "bayes", ("wandb", "tpe", "random")
TORCH = "GPSampler"


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
        params = {}
        for name, spec in self._parameters.items():
            if "values" in spec:
                params[name] = trial.suggest_categorical(name, spec["values"])
            else:
                log = spec.get("distribution") == "log_uniform_values"
                params[name] = trial.suggest_float(name, spec["min"], spec["max"], log=log)
        self._trials[trial.number] = trial
        return trial.number, params

    def tell(self, trial: int, value: float | None) -> None:
        from optuna.trial import TrialState

        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(self._trials.pop(trial), value, state=state)


def engine(name: str, parameters: Mapping[str, Mapping[str, Any]], seed: int) -> Any:
    """A new engine by its name. Raises ImportError where what it needs is not installed."""
    if name == "tpe":
        from optuna.samplers import TPESampler

        return Optuna(parameters, TPESampler(seed=seed))
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
