"""What `bayes` makes of failures, of long searches and of trials that run."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from engines import engine, searched

from roxxel_dist.sweep.samplers.acquisition import choose_scale, fit_failures, standardize, training_subset

SQUARE = {"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}}
NONE = np.empty((0, 2))


def bowl(params: Mapping[str, Any]) -> float:
    return (params["x"] - 0.3) ** 2 + (params["y"] - 0.6) ** 2 + 0.1 * math.sin(5 * params["x"])


LEAST = min(bowl({"x": x, "y": 0.6}) for x in np.linspace(0, 1, 2001))


def test_failures_that_parameters_predict_are_modelled_and_accidents_are_not() -> None:
    rng = np.random.default_rng(1)
    points = rng.random((40, 2))
    region = fit_failures(points, points[:, 0] < 0.35, NONE)
    accidents = fit_failures(points, rng.random(40) < 0.35, NONE)
    assert region is not None
    assert accidents is not None
    assert region.weight > 0.95
    assert accidents.weight < 0.3
    inside, outside = np.array([[0.1, 0.5]]), np.array([[0.9, 0.5]])
    assert region.log_success(outside)[0] - region.log_success(inside)[0] > math.log(3)
    assert abs(accidents.log_success(outside)[0] - accidents.log_success(inside)[0]) < math.log(1.3)
    assert region.blame.mean() > 0.8
    assert accidents.blame.mean() < 0.2


def test_there_is_nothing_to_model_where_all_or_none_fail() -> None:
    points = np.random.default_rng(1).random((5, 2))
    assert fit_failures(points, np.zeros(5, dtype=bool), NONE) is None
    assert fit_failures(points, np.ones(5, dtype=bool), NONE) is None


@pytest.mark.long
def test_accidents_keep_nothing_from_being_found() -> None:
    accidents = random.Random(2)
    rows = searched(engine(SQUARE, seed=2), 30, lambda params: None if accidents.random() < 0.33 else bowl(params))
    assert sum(value is None for _, value in rows) > 5
    assert min(value for _, value in rows if value is not None) < LEAST + 5e-3


@pytest.mark.long
def test_a_long_search_goes_on_with_its_process() -> None:
    """Of 400 trials at random the best is some way off: the next few suggestions are close to the optimum."""
    source, found = engine(SQUARE, "random"), engine(SQUARE)
    for _ in range(400):
        trial, params = source.ask()
        found.restore(trial, params, source.point(trial))
        found.tell(trial, bowl(params))
    assert min(value for _, value in searched(found, 6, bowl) if value is not None) < LEAST + 1e-5


def test_values_are_standardized_and_the_worst_of_them_cut_off() -> None:
    values = standardize([1.0, 2.0, 3.0, 4.0, 1e9])
    assert values.mean() == pytest.approx(0)
    assert values.std() == pytest.approx(1)
    assert values.max() < 2.5
    assert len(standardize([])) == 0
    assert (standardize([5.0, 5.0]) == 0).all()


def test_logarithms_are_chosen_where_they_are_easier_to_predict() -> None:
    """Of values that span orders of magnitude, and not of a plane; either way the order of values is kept."""
    points = np.random.default_rng(4).random((40, 2))
    plane = points @ [1.0, 2.0]
    kept, _ = choose_scale(points, plane)
    assert kept == pytest.approx(standardize(plane))
    steep = np.exp(4 * plane)
    logs, theta = choose_scale(points, steep)
    assert logs != pytest.approx(standardize(steep), abs=0.1)
    assert logs.std() == pytest.approx(1)
    assert (np.argsort(logs) == np.argsort(steep)).all()
    assert theta.shape == (2 + 3,)
    assert (choose_scale(points, np.ones(40))[0] == 0).all()
    assert np.isfinite(choose_scale(points, 1e300 * steep / steep.max())[0]).all()


def test_a_subset_keeps_the_best_and_others_over_time() -> None:
    values = np.random.default_rng(3).permutation(1000).astype(float)
    kept = training_subset(values, 100)
    assert len(set(kept.tolist())) == 100
    assert set(np.argsort(values)[:50]) <= set(kept)
    assert (np.histogram(kept, bins=4, range=(0, 1000))[0] > 10).all()


SIZES = {
    "a diverged one": lambda number, value: 1e300 if number == 3 else value,
    "diverged ones": lambda number, value: 1.7e308 if number in (2, 4) else value,
    "a good one that is wrong": lambda number, value: -1e30 if number == 3 else value,
    "both": {2: -1.7e308, 4: 1.7e308}.get,
    "huge": lambda _, value: value * 1e300,
    "tiny": lambda _, value: value * 1e-300,
}


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == "both" else pytest.mark.long) for size in SIZES]
)
def test_numbers_of_any_size_do_not_blind_it(size: str) -> None:
    search, found = engine(SQUARE, seed=3), list[float]()
    for number in range(26):
        trial, params = search.ask()
        found.append(bowl(params))
        search.tell(trial, SIZES[size](number, found[-1]))
    assert min(found) < LEAST + 0.02


@pytest.mark.parametrize("outlier", [1e6, 1.7e308, -1e30])
def test_one_value_does_not_hide_the_differences_between_others(outlier: float) -> None:
    values = np.random.default_rng(4).random(20)
    found = standardize(np.r_[values, outlier])[:-1]
    assert np.argsort(found).tolist() == np.argsort(values).tolist()
    assert found.std() > 0.25
    points = np.random.default_rng(5).random((21, 2))
    scaled, theta = choose_scale(points, np.r_[values, outlier])
    assert scaled[:-1].std() > 0.25
    assert np.isfinite(theta).all()


def test_most_values_may_be_the_best() -> None:
    values = standardize([0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1e308])
    assert values[5] - values[4] > 0.2
    assert values[6] > values[5]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_trials_that_run_at_once_are_apart(seed: int) -> None:
    search, running = engine(SQUARE, seed=seed), list[tuple[int, dict[str, float]]]()
    nearest = []
    for _ in range(24):
        while len(running) < 8:
            trial, params = search.ask()
            gaps = [max(abs(params[name] - other[name]) for name in SQUARE) for _, other in running]
            nearest.append(min(gaps, default=1.0))
            running.append((trial, params))
        trial, params = running.pop(0)
        search.tell(trial, bowl(params))
    assert min(nearest) > 2e-3


def test_any_number_of_trials_may_run() -> None:
    search, running = engine(SQUARE, seed=1), {}
    rng = random.Random(3)
    for number in range(320):
        point = [rng.random(), rng.random()]
        running[number] = {"x": point[0], "y": point[1]}
        search.restore(number, running[number], point)
        if number < 20:
            search.tell(number, bowl(running[number]))
    _, params = search.ask()
    assert min(max(abs(params[name] - other[name]) for name in SQUARE) for other in running.values()) > 2e-3


@pytest.mark.parametrize("count", [1, 10, 400, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["bayes", "tpe"])
def test_any_number_of_trials_may_have_ended(count: int, method: str) -> None:
    search, rng, seen = engine(SQUARE, method, seed=1), random.Random(3), []
    for number in range(count):
        point = [rng.random(), rng.random()]
        params = {"x": point[0], "y": point[1]}
        search.restore(number, params, point)
        seen.append(bowl(params))
        search.tell(number, seen[-1])
    asked = [bowl(search.ask()[1]) for _ in range(3)]
    if count >= 400:  # near the best, where one of many points is
        assert np.median(asked) < np.quantile(seen, 0.2)


def test_few_values_keep_what_they_say() -> None:
    """The best of five may be far ahead of two that are alike."""
    found = standardize([0.1, 1.0, 1.01, 5.0, 8.0])
    assert np.diff(found)[[0, 2]].min() > 0.25
