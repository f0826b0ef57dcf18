"""Engines: what they ask for is good, is never asked twice, and follows from the history alone."""

import json
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MIXED, engine, loss, named, searched
from hypothesis import given, settings
from hypothesis import strategies as st

from roxxel_dist import sweep as sweep_package
from roxxel_dist.sweep.samplers import SpaceExhausted
from roxxel_dist.sweep.space.sweep_file import sweep_of

SEARCHING = ("bayes", "tpe", "random")


@pytest.mark.parametrize("method", SEARCHING)
def test_a_search_finds_what_is_good_and_repeats_nothing(method: str) -> None:
    found = engine(MIXED, method)
    rows = searched(found, 30)
    assert len({named(params) for params, _ in rows}) == 30
    assert all(params["seed"] == 7 and set(params["moe"]) == {"use", "experts"} for params, _ in rows)
    assert all(len(found.point(trial)) == 6 for trial in range(30))
    known = [value for _, value in rows if value is not None]
    if method == "bayes":
        assert min(known) < 0.1
        assert sum(value is None for _, value in rows[10:]) <= 6
    else:
        assert min(known) < 1.2


@pytest.mark.parametrize("goal", ["minimize", "maximize"])
def test_the_goal_decides_what_is_better(goal: str) -> None:
    found = engine({"x": {"min": 0.0, "max": 1.0}}, goal=goal)
    rows = searched(found, 14, lambda params: params["x"])
    assert max(params["x"] for params, _ in rows) > 0.9 if goal == "maximize" else min(p["x"] for p, _ in rows) < 0.1
    best = sum(params["x"] for params, _ in rows[-4:]) / 4
    assert best > 0.6 if goal == "maximize" else best < 0.4


@pytest.mark.parametrize("method", SEARCHING)
def test_recalled_in_any_order_it_goes_on_as_before(method: str) -> None:
    first, count = engine(MIXED, method, seed=3), 16
    asked, told = {}, {}
    for turn in range(count):
        trial, params = first.ask()
        asked[trial] = params
        if turn % 4 == 3:  # four at once, and two of them told late
            for one in (turn - 3, turn - 1):
                told[one] = loss(asked[one])
                first.tell(one, told[one])
    points = {trial: json.loads(json.dumps(first.point(trial))) for trial in asked}
    expected = first.ask()
    for chance in (random.Random(1), random.Random(2)):
        again = engine(MIXED, method, seed=3)
        late = []
        for trial in chance.sample(list(asked), count):
            again.restore(trial, json.loads(json.dumps(asked[trial])), points[trial])
            if trial in told and chance.random() < 0.5:
                again.tell(trial, told[trial])
            elif trial in told:
                late.append(trial)
        for trial in late:
            again.tell(trial, told[trial])
        assert again.ask() == expected
    assert engine(MIXED, method, seed=4).ask() != engine(MIXED, method, seed=3).ask()


def test_a_sweep_is_a_mapping_or_a_file(tmp_path: Path) -> None:
    parameters = {"lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1}, "dim": {"values": [8, 16]}}
    sweep = {"method": "random", "parameters": parameters, "metric": {"name": "acc", "goal": "maximize"}}
    for method in (None, *SEARCHING, "grid"):
        parameters["lr"] = {"values": [0.1, 0.2]} if method == "grid" else parameters["lr"]
        (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
        searches = [
            sweep_package.make(sweep, seed=5, method=method),
            sweep_package.make(tmp_path / "sweep.yaml", seed=5, method=method),
            sweep_package.make(str(tmp_path / "sweep.yaml"), 5, method),
        ]
        for _ in range(3):
            asked = [search.ask() for search in searches]
            assert asked[0] == asked[1] == asked[2]
            for search in searches:
                search.tell(asked[0][0], asked[0][1]["lr"])
    with pytest.raises(ValueError, match="use one of bayes, tpe, random, grid"):
        sweep_package.make(sweep, method="wandb")
    with pytest.raises(
        ValueError, match=r"'wandb' is not a method: there are bayes, random, grid \(--method also takes tpe"
    ):
        sweep_package.make({**sweep, "method": "wandb"})
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        sweep_package.make(tmp_path / "none.yaml")


def test_a_history_is_recalled_at_once() -> None:
    source = engine(MIXED, "random")
    rows = [source.ask() for _ in range(1000)]
    found = engine(MIXED)
    start = time.process_time()
    for trial, params in rows:
        found.restore(trial, params, source.point(trial))
        found.tell(trial, loss(params))
    print(f"1,000 recalled and told in {1000 * (time.process_time() - start):.0f} ms")
    trial, params = found.ask()
    assert trial == 1000
    assert named(params) not in {named(one) for _, one in rows}


def test_trials_that_run_are_kept_away_from() -> None:
    found = engine({"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}})

    def bowl(params: Mapping[str, Any]) -> float:
        return (params["x"] - 0.3) ** 2 + (params["y"] - 0.6) ** 2 + 0.1 * math.sin(20 * params["x"])

    searched(found, 8, bowl)
    points = np.array([found.point(found.ask()[0]) for _ in range(4)])
    apart = [float(np.abs(points[a] - points[b]).max()) for a in range(4) for b in range(a)]
    assert min(apart) > 0.01


def test_many_may_run_before_anything_is_told() -> None:
    found = engine(MIXED)
    first = [found.ask() for _ in range(30)]
    assert len({named(params) for _, params in first}) == 30
    for trial, _ in first:
        found.tell(trial, None)
    assert found.ask()[0] == 30


@pytest.mark.long
def test_failures_are_left_behind() -> None:
    found = engine({"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}})
    rows = searched(found, 30, lambda params: None if params["x"] < 0.4 else params["x"] + params["y"])
    assert sum(value is None for _, value in rows[10:]) <= 6
    assert min(value for _, value in rows if value is not None) < 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_a_failure(bad: float) -> None:
    one, other = engine(MIXED), engine(MIXED)
    for turn in range(12):
        trial, params = one.ask()
        assert other.ask() == (trial, params)
        failed = turn % 3 == 0
        one.tell(trial, bad if failed else float(turn))
        other.tell(trial, None if failed else float(turn))
    assert one.ask() == other.ask()


def test_one_huge_value_does_not_hide_the_others() -> None:
    def bowl(params: Mapping[str, Any]) -> float:
        value = (params["x"] - 0.7) ** 2 + (params["y"] - 0.2) ** 2
        return 1e6 if params["x"] < 0.15 else value

    found = engine({"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}})
    found.restore(0, {"x": 0.05, "y": 0.5}, [0.05, 0.5])
    found.tell(0, 1e6)
    assert min(value for _, value in searched(found, 24, bowl) if value is not None) < 1e-3


@pytest.mark.long
def test_a_parameter_that_is_off_does_not_matter() -> None:
    parameters = {"moe": {"values": [True, False]}, "experts": {"min": 2, "max": 40}, "x": {"min": 0.0, "max": 1.0}}
    found = engine(parameters, when={"experts": "moe"})
    rows = searched(found, 25, lambda params: params["x"] + params.get("experts", 3.0) / 40)
    assert all(("experts" in params) == params["moe"] for params, _ in rows)
    from roxxel_dist.sweep.samplers.bayes import SpaceTransform

    sweep = sweep_of({"parameters": parameters}, {"when": {"experts": "moe"}})
    coding = SpaceTransform(sweep)
    on, off, other = coding.encode(np.array([[0, 5, 0.5], [1, 5, 0.5], [1, 9, 0.5]]))
    assert (off == other).all()
    assert on[1] != off[1]


def numbers(draw: Any, low: float, high: float) -> tuple[float, float]:
    return tuple(sorted((draw(st.floats(low, high)), draw(st.floats(low, high)))))  # type: ignore[return-value]


@st.composite
def spaces(draw: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["values", "ints", "uniform", "log", "normal", "steps", "weighted"]))
        low, high = numbers(draw, 0.001, 50)
        found[f"p{number}"] = {
            "values": {"values": draw(st.lists(st.one_of(st.text(max_size=3), st.booleans()), min_size=1, max_size=4))},
            "ints": {"min": draw(st.integers(-5, 5)), "max": draw(st.integers(6, 2_000_000_000))},
            "uniform": {"min": float(low), "max": float(high)},
            "log": {"distribution": "log_uniform_values", "min": low, "max": high},
            "normal": {"distribution": "normal", "mu": low, "sigma": high},
            "steps": {"distribution": "q_uniform", "min": low, "max": high, "q": 2},
            "weighted": {"values": [1, 2, 3], "probabilities": [0.0, 0.25, 0.75]},
        }[kind]
    return found


@settings(max_examples=10, deadline=None)
@given(parameters=spaces(), seed=st.integers(0, 2**31), data=st.data())
def test_any_space_can_be_searched_and_recalled(parameters: dict[str, Any], seed: int, data: Any) -> None:
    found, again = engine(parameters, seed=seed), engine(parameters, seed=seed)
    seen = set()
    for turn in range(8):
        try:
            trial, params = found.ask()
        except SpaceExhausted:
            assert seen
            with pytest.raises(SpaceExhausted):
                again.ask()
            return
        assert trial == turn
        assert set(params) == set(parameters)
        assert named(params) not in seen
        seen.add(named(params))
        assert all(0 <= u <= 1 for u in found.point(trial))
        again.restore(trial, params, json.loads(json.dumps(found.point(trial))))
        if data.draw(st.booleans()):
            value = data.draw(st.one_of(st.none(), st.floats()))
            found.tell(trial, value)
            again.tell(trial, value)
    try:
        expected = found.ask()
    except SpaceExhausted:
        return
    assert again.ask() == expected
