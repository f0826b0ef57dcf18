"""The scheduler that models the curves: its regressions from rung to rung, and searches on recorded curves."""

import math
from typing import Any

import numpy as np
import pytest

from roxxel_dist.sweep.journal import History
from roxxel_dist.sweep.recorded import RecordedSearch, replay
from roxxel_dist.sweep.schedulers.freeze_thaw import Curves, FreezeThaw, rungs_to
from roxxel_dist.sweep.space.sweep_file import sweep_of

SWEEP: dict[str, Any] = {
    "method": "bayes",
    "metric": {"name": "loss", "goal": "minimize"},
    "parameters": {"x": {"min": 0.0, "max": 1.0}},
    "early_terminate": {"type": "freeze_thaw"},
}
REPORTS = 20


def falling(params: dict[str, Any]) -> list[float]:
    return [(params["x"] - 0.3) ** 2 + 1 / report for report in range(1, REPORTS + 1)]


def test_rungs_are_powers_of_three_and_the_whole_curve() -> None:
    assert [rungs_to(length) for length in (1, 2, 9, 20)] == [[1], [1, 2], [1, 3, 9], [1, 3, 9, 20]]


def test_ends_follow_the_trials_that_went_on() -> None:
    """Each rung is half of the one before and 1 less, without noise."""
    first = np.linspace(0.0, 10.0, 40)
    whole = np.stack([first, first / 2 - 1, first / 4 - 1.5], 1)
    values = whole.copy()
    values[25:, 1:] = np.nan
    values[20:, 2:] = np.nan
    curves = Curves(values)
    np.testing.assert_allclose(curves.ends(), whole[:, 2], atol=0.5)
    variances = curves.variances()
    assert variances[0] == math.inf
    assert variances[1] > variances[2] > variances[3] == 0.0


@pytest.mark.parametrize("workers", [1, 4])
def test_trials_pause_at_rungs_alone_and_the_best_ends(workers: int) -> None:
    search = RecordedSearch(sweep_of(SWEEP), falling, seed=1)
    while search.history.steps < 10 * REPORTS and search.advance(workers):
        paused = [len(trial.reports) for trial in search.history.paused.values()]
        assert set(paused) <= {1, 3, 9}
    assert len(search.history.trials) > 10
    assert search.history.best is not None
    assert search.history.best.state == "done"
    assert search.best < 1 / REPORTS + 0.001


@pytest.mark.parametrize(
    ("changed", "table", "best"),
    [
        pytest.param({"parameters": {"x": {"value": 0.3}}}, falling, 1 / REPORTS, id="one configuration"),
        pytest.param({"run_cap": 1}, falling, None, id="one trial"),
        pytest.param({"run_cap": 3}, falling, None, id="three trials"),
        pytest.param({}, lambda params: [1.0] * 9, 1.0, id="all alike"),
        pytest.param({}, lambda params: [params["x"]], None, id="one report"),
        pytest.param({}, lambda params: [params["x"], math.nan], None, id="all fail"),
        pytest.param({}, lambda params: [1e300 * params["x"], 2.0], None, id="huge"),
        pytest.param({}, lambda params: [1 - params["x"]] * (1 + int(9 * params["x"])), None, id="different lengths"),
    ],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 4])
def test_any_curves_give_a_search(changed: dict[str, Any], table: Any, best: float | None, workers: int) -> None:
    result = replay({**SWEEP, **changed}, table, seed=0, budget_steps=100, workers=workers)
    assert len(result.best)
    assert best is None or result.best[-1] == best
    if "run_cap" in changed:
        assert len(result.best) >= REPORTS, "one trial has ended at least"


def test_small_budget_still_trains_a_trial_to_its_end() -> None:
    sweep = sweep_of({**SWEEP, "parameters": {name: {"min": 0.0, "max": 1.0} for name in "wxyz"}})
    search = RecordedSearch(
        sweep,
        lambda params: [sum((value - 0.3) ** 2 for value in params.values()) + 1 / n for n in range(1, REPORTS + 1)],
        seed=0,
        max_steps=3 * REPORTS,
    )
    while search.history.steps < 3 * REPORTS and search.advance(workers=2):
        pass
    assert search.history.count("done")


def test_a_trial_goes_on_until_one_has_ended() -> None:
    history = History()
    reported = {0.8: [0.95], 0.6: [0.98], 0.9: [0.96], 0.2: [1.35, 0.68], 0.5: [1.0], 0.7: [0.95, 0.6]}
    for number, (x, values) in enumerate(reported.items()):  # the longer ones reported before they heard of their pause
        event = {"trial": number, "time": 0.0, "seconds": None, "more": {}}
        history.apply({**event, "event": "ask", "params": {"x": x}, "point": [x]})
        for step, value in enumerate(values, 1):
            history.apply({**event, "event": "report", "step": step, "value": value})
        history.apply({**event, "event": "pause", "step": len(values), "value": values[-1], "rule": "", "reason": ""})
    assert FreezeThaw({}, sweep_of(SWEEP), 0).choose(history, can_ask=False) is not None
