"""What laws propose to `bayes`: near the known optimum soon, nothing where the process predicts better, and the same
after a kill of the driver."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from tables import one_test

from roxxel_dist.sweep.driver.decisions import Decisions
from roxxel_dist.sweep.driver.recorded import RecordedSearch
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.samplers.law_proposals import LawProposals, at_the_end
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.journal import History

SETS = ["self", "code", "math"]
DATA = {"mixtures": [{"phases": [1], "datasets": {name: {} for name in SETS}}]}
METRIC = {"name": "mean_loss", "weights": dict(zip(SETS, (2, 1, 1), strict=True))}
WEIGHTS = np.array([0.5, 0.25, 0.25])
SLOPES = np.array([[-2.5, -0.3, 0.2], [-0.1, -3.0, -0.4], [-0.5, -0.2, -4.0]])
ASHA = {"type": "asha", "min_iter": 1, "eta": 3}


def losses(shares: np.ndarray) -> np.ndarray:
    """float64[..., 3]: a log-linear law with a known optimum."""
    return 2.0 + np.exp(np.array([0.5, 0.3, 0.8]) + shares @ SLOPES.T)


def lattice() -> np.ndarray:
    parts = 100
    return np.array([(i, j, parts - i - j) for i in range(parts + 1) for j in range(parts + 1 - i)]) / parts


BEST = float((losses(lattice()) @ WEIGHTS).min())
UNIFORM = float(losses(np.full(3, 1 / 3)) @ WEIGHTS)


class Table:
    """Curves of three reports with a little noise; it notes what each mixture is worth."""

    def __init__(self, noise: float = 0.003) -> None:
        self._rng, self._noise = np.random.default_rng(5), noise
        self.worth: list[float] = []

    def __call__(self, params: dict[str, Any]) -> np.ndarray:
        shares = np.array([params[f"mixture.1.{name}"] for name in SETS])
        true = losses(shares)
        self.worth.append(float(true @ WEIGHTS))
        curve = [true * (1 + 0.4 / report) for report in (1, 2)] + [true]
        return np.array(curve) + self._noise * self._rng.normal(size=(3, 3))


def searched(trials: int, seed: int, **changes: Any) -> tuple[Table, RecordedSearch]:
    table, parameters = Table(), {"method": "bayes", "metric": METRIC, **changes}
    search = RecordedSearch(sweep_of(parameters, DATA), table, seed)
    while len(table.worth) < trials and search.advance(1):
        pass
    return table, search


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_law_finds_the_optimum_of_log_linear_sources(seed: int) -> None:
    """In 14 trials, of which 8 are spread out: 98 % of the possible gain over uniform shares."""
    table, _ = searched(14, seed)
    assert table.worth[0] == pytest.approx(UNIFORM), "natural shares come first, here uniform ones"
    assert min(table.worth) - BEST < 0.02 * (UNIFORM - BEST)


@pytest.mark.long
def test_with_trials_that_were_stopped() -> None:
    """asha: most trials have one report of three, and the law knows where they would have ended."""
    table, search = searched(20, 3, early_terminate=ASHA)
    whole = [trial for trial in search.history.trials.values() if len(trial.reports) == 3]
    assert 3 <= len(whole) < len(search.history.trials) - 3
    assert min(table.worth) - BEST < 0.03 * (UNIFORM - BEST)


def proposes(value: Any, **changes: Any) -> list[tuple[float, ...]]:
    """What the law says after 12 trials of a `value` of (shares, lr)."""
    sweep = sweep_of({"metric": METRIC, "parameters": {"lr": {"min": 0.0, "max": 1.0}}, **changes}, DATA)
    engine = make(sweep, 1, "random")
    for _ in range(12):
        number, params = engine.ask()
        shares = np.array([params[f"mixture.1.{name}"] for name in SETS])
        found = np.broadcast_to(value(shares, params["lr"]), 3)
        engine.tell(number, float(found @ WEIGHTS), [(5, dict(zip(SETS, found.tolist(), strict=True)))])
    history: Any = engine._history  # pyright: ignore[reportAttributeAccessIssue]
    features = {number: np.array(trial.point) for number, trial in history.trials.items()}
    return LawProposals(sweep).points(history, 12, features, (0.25, 0.5, 0.5))


def test_the_better_of_law_and_process_proposes() -> None:
    found = proposes(lambda shares, rate: losses(shares))
    assert len(found) == 2
    assert all(point[0] == 0.25 for point in found), "the other parameters are those that were given"
    assert proposes(lambda shares, rate: 1 + 3 * (rate - 0.3) ** 2) == [], "a law of shares knows no rate"
    assert proposes(lambda shares, rate: losses(shares), metric={**METRIC, "goal": "maximize"}) == []


@pytest.mark.long
def test_a_trial_that_diverged_hides_no_law() -> None:
    right = np.array(proposes(lambda shares, rate: losses(shares)))
    for diverged in (1e3, 1e300):
        numbers = itertools.count()
        found = proposes(lambda shares, rate: losses(shares) if next(numbers) != 3 else np.full(3, diverged))  # noqa: B023
        assert len(found) == 2, diverged
        assert np.abs(np.array(found) - right).max() < 0.25, diverged


@pytest.mark.parametrize("rule", [pytest.param(None, marks=pytest.mark.long), ASHA], ids=["full", "asha"])
def test_a_kill_of_the_driver_changes_no_proposal(rule: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new driver that has read the journal up to any ask asks for the same trial, with the same shares."""
    lines: list[str] = []
    apply = History.apply
    monkeypatch.setattr(History, "apply", lambda self, event: (lines.append(json.dumps(event)), apply(self, event))[1])
    changes = {} if rule is None else {"early_terminate": rule}
    searched(13, 4, **changes)
    monkeypatch.undo()
    sweep = sweep_of({"method": "bayes", "metric": METRIC, **changes}, DATA)
    events = [json.loads(line) for line in lines]
    asked = [number for number, event in enumerate(events) if event["event"] in ("ask", "thaw")]
    assert sum(events[number]["event"] == "ask" for number in asked) >= 13
    for number in asked[9::4]:
        history = History()
        for event in events[:number]:
            history.apply(event)
        again = Decisions(sweep, history, lambda: make(sweep, 4)).next()
        assert again is not None
        assert {key: events[number][key] for key in again} == json.loads(json.dumps(again))


@one_test(
    ("curves", "expected"),
    [
        ([[(9, 2.0)], [(9, 3.0)]], [2.0, 3.0]),
        ([[], [(9, 3.0)]], [math.nan, 3.0]),
        ([[(3, 5.0)], [(3, 4.0), (9, 3.0)]], [4.0, 3.0]),  # one alone: as far ahead as then
        ([[(4, 5.0)], [(3, 4.0), (9, 3.0)]], [math.nan, 3.0]),  # no other has a report there
        (
            [[(3, 8.0)], *([(3, 2.0 * number), (9, number + 1.0)] for number in range(5))],
            [5.0, 1.0, 2.0, 3.0, 4.0, 5.0],  # the line of five
        ),
        ([[(3, 8.0)], *([(3, 2.0), (9, float(number))] for number in range(5))], [8.0, 0.0, 1.0, 2.0, 3.0, 4.0]),
        ([], []),
    ],
)
def test_where_a_stopped_trial_would_have_ended(curves: list[list[tuple[int, float]]], expected: list[float]) -> None:
    found = at_the_end([[(step, {"a": loss}) for step, loss in curve] for curve in curves], ["a"])
    assert found.shape == (len(curves), 1)
    assert found[:, 0].tolist() == pytest.approx(expected, nan_ok=True)
