"""A search on recorded curves."""

from typing import Any

import numpy as np
import pytest

from roxxel_dist.sweep import replay

SWEEP: dict[str, Any] = {
    "method": "random",
    "metric": {"name": "loss", "goal": "minimize"},
    "parameters": {"lr": {"min": 0.0, "max": 1.0}},
}


class Table:
    steps_per_report = 10

    def __init__(self) -> None:
        self.rates: list[float] = []

    def __call__(self, params: dict[str, Any]) -> list[float]:
        self.rates.append(params["lr"])
        return [params["lr"] + 1 / report for report in range(1, 10)]


def test_full_trials_spend_the_budget_and_keep_the_best() -> None:
    table = Table()
    result = replay(SWEEP, table, seed=1, budget_steps=185)
    assert result.steps.dtype == np.int64
    assert result.best.dtype == np.float64
    assert result.steps.tolist() == list(range(10, 181, 10))
    assert len(table.rates) == 2  # of nine reports each
    assert result.best[-1] == min(table.rates) + 1 / 9


def test_a_seed_decides_and_hyperband_stops_trials() -> None:
    rule = {**SWEEP, "early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 3}}
    first, again, full = Table(), Table(), Table()
    results = [replay(rule, table, seed=2, budget_steps=900, workers=4) for table in (first, again)]
    replay(SWEEP, full, seed=2, budget_steps=900, workers=4)
    assert first.rates == again.rates
    assert np.array_equal(results[0].best, results[1].best)
    assert len(first.rates) > len(full.rates)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="workers: 0 must be 1 or more"):
        replay(SWEEP, Table(), seed=0, budget_steps=10, workers=0)
    with pytest.raises(ValueError, match="table: the curve of"):
        replay(SWEEP, lambda params: [], seed=0, budget_steps=10)
