"""W&B's own search, from PyPI's `sweeps` 0.2.0, as a sampler: a peer of `bayes`."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from roxxel_dist.sweep.samplers.base import TrialHistory, rng_for
from roxxel_dist.sweep.space.sweep_file import Sweep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it was written with an older pydantic
    from sweeps import RunState, SweepRun, next_run

OFFERS = 8


class WandbSampler:
    """Proposes points for a sweep.

    W&B's search sees the unit cube through the inverse CDFs of its parameters. It is given the cube itself, and choices
    by their index: so it can search nested parameters and probabilities too, and no value is rounded out of its range.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._kinds = [parameter.distribution for parameter in sweep.space.free]
        self._is_index = [kind.choices is not None and kind.weights is None for kind in self._kinds]
        parameters: dict[str, Any] = {
            _name(dim): {"distribution": "int_uniform", "min": 0, "max": len(kind.choices or ()) - 1}
            if is_index
            else {"distribution": "uniform", "min": 0.0, "max": 1.0}
            for dim, (kind, is_index) in enumerate(zip(self._kinds, self._is_index, strict=True))
        }
        self._config = {"method": "bayes", "metric": {"name": "value", "goal": "minimize"}, "parameters": parameters}

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[list[float]]:
        """Points, as W&B's search would choose them."""
        rng = rng_for(history.seed, trial, "wandb")
        for _ in range(OFFERS):
            state = np.random.get_state()
            np.random.seed(rng.getrandbits(32))  # it draws from numpy's own numbers, and can be told no seed
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of fits that do not converge
                    run = next_run(self._config, self._runs(history))
            finally:
                np.random.set_state(state)
            if run is None:
                return
            values = [run.config[_name(dim)]["value"] for dim in range(len(self._kinds))]
            yield [
                kind.to_unit(int(value)) if is_index else float(value)
                for kind, is_index, value in zip(self._kinds, self._is_index, values, strict=True)
            ]

    def _runs(self, history: TrialHistory) -> list[Any]:
        runs = []
        for number, trial in sorted(history.trials.items()):
            state = RunState.failed if trial.value is None else RunState.finished
            config = {
                _name(dim): {"value": kind.index_at(u) if is_index else u}
                for dim, (kind, is_index, u) in enumerate(zip(self._kinds, self._is_index, trial.point, strict=True))
            }
            summary = {} if trial.value is None else {"value": trial.value}
            state = state if trial.ended else RunState.running
            runs.append(SweepRun(name=str(number), state=state, config=config, summaryMetrics=summary))
        return runs


def _name(dim: int) -> str:
    return f"p{dim:04d}"
