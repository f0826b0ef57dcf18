"""The engine of W&B's server, from PyPI's `sweeps`, run here."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roxxel_dist.sweep.samplers.base import TrialHistory, one_thread, packages, rng_for
from roxxel_dist.sweep.space.sweep_file import Sweep

OFFERS = 8


@contextmanager
def _quiet() -> Iterator[None]:
    """It warns of what it was written with: an older pydantic, fits that do not converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class WandbSampler:
    """Proposes points for a sweep.

    W&B's engine sees the unit cube through the inverse CDFs of its parameters. It is given the cube itself, and choices
    by their number: so it can search nested parameters and probabilities too, and no value is rounded out of its range.
    """

    def __init__(self, sweep: Sweep) -> None:
        with packages("wandb", "sweeps==0.2.0"), _quiet():
            from sweeps import next_run  # noqa: F401 - a folder `sweeps` can be imported too, and has no such name

        self._kinds = [one.distribution for one in sweep.space.free]
        self._whole = [kind.choices is not None and kind.weights is None for kind in self._kinds]
        parameters: dict[str, Any] = {
            self._name(dim): {"distribution": "int_uniform", "min": 0, "max": len(kind.choices or ()) - 1}
            if whole
            else {"distribution": "uniform", "min": 0.0, "max": 1.0}
            for dim, (kind, whole) in enumerate(zip(self._kinds, self._whole, strict=True))
        }
        self._config = {"method": "bayes", "metric": {"name": "value", "goal": "minimize"}, "parameters": parameters}

    def _name(self, dim: int) -> str:
        return f"p{dim:04d}"

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[list[float]]:
        """Points, as W&B's engine would choose them."""
        import numpy as np

        from sweeps import next_run

        runs = self._runs(history)
        rng = rng_for(history.seed, trial, "wandb")
        for _ in range(OFFERS):
            kept = np.random.get_state()
            np.random.seed(rng.getrandbits(32))  # it draws from numpy's own numbers, and can be told no seed
            try:
                with _quiet(), one_thread():
                    found = next_run(self._config, runs)
            finally:
                np.random.set_state(kept)
            if found is None:
                return
            yield self._point(found.config)

    def _runs(self, history: TrialHistory) -> list[Any]:
        from sweeps import RunState, SweepRun

        runs = []
        for number in sorted(history.trials):
            one = history.trials[number]
            state = RunState.running if not one.told else RunState.failed if one.value is None else RunState.finished
            config = {
                self._name(dim): {"value": kind.index_at(u) if whole else u}
                for dim, (kind, whole, u) in enumerate(zip(self._kinds, self._whole, one.point, strict=True))
            }
            summary = {} if one.value is None else {"value": one.value}
            with _quiet():
                runs.append(SweepRun(name=str(number), state=state, config=config, summaryMetrics=summary))
        return runs

    def _point(self, config: dict[str, Any]) -> list[float]:
        values = [config[self._name(dim)]["value"] for dim in range(len(self._kinds))]
        return [
            kind.to_unit(int(value)) if whole else float(value)
            for kind, whole, value in zip(self._kinds, self._whole, values, strict=True)
        ]
