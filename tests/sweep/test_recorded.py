"""A search on recorded curves."""

import math
from typing import Any

import numpy as np
import pytest

from roxxel_dist.sweep import replay
from roxxel_dist.sweep.driver.recorded import RecordedSearch
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.set_losses import set_losses

SWEEP: dict[str, Any] = {
    "method": "random",
    "metric": {"name": "loss", "goal": "minimize"},
    "parameters": {"lr": {"min": 0.0, "max": 1.0}},
}
REPORTS = 9
RULES = [
    {"type": "hyperband", "min_iter": 1, "eta": 3},
    {"type": "asha", "min_iter": 1, "eta": 3},
]


class Table:
    """Curves that fall to (lr - 0.3) ** 2; it notes for which rates it was asked."""

    steps_per_report = 10

    def __init__(self) -> None:
        self.rates: list[float] = []

    def __call__(self, params: dict[str, Any]) -> list[float]:
        self.rates.append(params["lr"])
        return [(params["lr"] - 0.3) ** 2 + 1 / report for report in range(1, REPORTS + 1)]


def test_full_trials_spend_the_budget_and_keep_the_best() -> None:
    table = Table()
    result = replay(SWEEP, table, seed=1, budget_steps=185)
    assert result.steps.dtype == np.int64
    assert result.best.dtype == np.float64
    assert result.steps.tolist() == list(range(10, 181, 10))
    assert len(table.rates) == 2  # of nine reports each
    assert result.best[-1] == min((rate - 0.3) ** 2 for rate in table.rates) + 1 / 9


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["type"])
def test_a_seed_decides_and_schedulers_look_at_more_trials(rule: dict[str, Any], workers: int) -> None:
    sweep = {**SWEEP, "early_terminate": rule}
    first, again, other, full = Table(), Table(), Table(), Table()
    results = [replay(sweep, table, seed=2, budget_steps=600, workers=workers) for table in (first, again)]
    replay(sweep, other, seed=3, budget_steps=600, workers=workers)
    whole = replay(SWEEP, full, seed=2, budget_steps=600, workers=workers)
    assert first.rates == again.rates
    assert first.rates != other.rates
    assert np.array_equal(results[0].best, results[1].best)
    assert len(first.rates) > len(full.rates)
    assert results[0].steps.tolist() == whole.steps.tolist() == list(range(10, 601, 10))


def test_a_run_cap_ends_it_and_a_goal_of_more_is_the_same() -> None:
    sweep = {**SWEEP, "run_cap": 3, "early_terminate": {"type": "asha", "min_iter": 1, "eta": 2}}
    capped = replay(sweep, Table(), seed=1, budget_steps=10_000)
    assert REPORTS + 2 <= len(capped.steps) < 3 * REPORTS
    more = {**sweep, "metric": {"name": "loss", "goal": "maximize"}}
    table = Table()
    turned = replay(more, lambda params: [-value for value in table(params)], seed=1, budget_steps=10_000)
    assert turned.best.tolist() == (-capped.best).tolist()


def test_a_value_that_is_no_number_fails_its_trial() -> None:
    result = replay({**SWEEP, "run_cap": 2}, lambda params: [3.0, math.nan, 1.0], seed=0, budget_steps=100)
    assert result.steps.tolist() == [1, 2, 3, 4]
    assert result.best.tolist() == [3.0] * 4


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="workers: 0 must be 1 or more"):
        replay(SWEEP, Table(), seed=0, budget_steps=10, workers=0)
    with pytest.raises(ValueError, match="table: the curve of"):
        replay(SWEEP, lambda params: [], seed=0, budget_steps=10)


def test_a_mean_over_data_sets_has_the_losses_of_each() -> None:
    """The recorded table gives them by report and set; the history has the mean, and what laws are fitted to."""
    weights = {"code": 3, "math": 1}
    sweep = sweep_of(SWEEP | {"metric": {"name": "mean_loss", "weights": weights}})
    assert sweep.logged == {"val_loss/code": 0.75, "val_loss/math": 0.25}
    search = RecordedSearch(sweep, lambda params: [[report, 2 * report] for report in (4.0, params["lr"])], seed=1)
    while len(search.history.trials) < 3 and search.advance(1):
        pass
    trial = search.history.trials[0]
    rate = trial.params["lr"]
    assert trial.reports == [(1, 0.75 * 4 + 0.25 * 8), (2, pytest.approx(1.25 * rate))]
    assert trial.losses == {1: {"code": 4.0, "math": 8.0}, 2: {"code": rate, "math": 2 * rate}}
    found = set_losses(search.history, sweep)
    assert (found.names, found.weights.tolist(), found.keys) == (("code", "math"), [0.75, 0.25], ())
    assert found.losses[0].tolist() == [rate, 2 * rate]
    for curve in ([1.0, 2.0], [[1.0], [2.0]], []):
        with pytest.raises(ValueError, match=r"must be rows of 2 numbers, in the order of `weights`"):
            replay(sweep, lambda params, curve=curve: curve, seed=1, budget_steps=9)
