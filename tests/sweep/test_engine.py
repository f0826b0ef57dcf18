"""Engines: what they ask for keeps the rules, is never asked twice, and follows from the history alone."""

import json
import math
import random
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from roxxel_dist.sweep.distributions import CONTINUOUS, distribution
from roxxel_dist.sweep.engine import METHODS, Engine, UsedUp, make
from roxxel_dist.sweep.space import sweep_of

MIXED = {
    "lr": {"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0e-2},
    "dim": {"values": [64, 128, 256, 512]},
    "optimizer": {"values": ["adamw", "lion", "adafactor"]},
    "moe": {"parameters": {"use": {"values": [True, False]}, "experts": {"min": 2, "max": 8}}},
    "drop": {"values": [0.0, 0.1], "probabilities": [0.8, 0.2]},
    "seed": {"value": 7},
}
SEARCHING = ("bayes", "tpe", "wandb", "random")


def engine(parameters: Mapping[str, Any], method: str = "bayes", seed: int = 0, **options: Any) -> Engine:
    extras = {name: options.pop(name) for name in ("constraints", "when", "derived") if name in options}
    sweep = {"parameters": parameters, "metric": {"name": "loss", "goal": options.pop("goal", "minimize")}}
    return make(sweep_of(sweep, extras), seed, method, **options)


def loss(params: Mapping[str, Any]) -> float | None:
    """Less is better; a fifth of the space fails."""
    if params["dim"] == 512 and params["lr"] > 1e-3:
        return None
    off = math.log10(params["lr"]) + 3 - 0.3 * math.log2(params["dim"] / 64)
    return off * off + (params["optimizer"] != "lion") + 0.1 * params["moe"]["experts"] * params["moe"]["use"]


def searched(found: Engine, count: int, function: Any = loss) -> list[tuple[dict[str, Any], float | None]]:
    rows = []
    for _ in range(count):
        trial, params = found.ask()
        rows.append((params, function(params)))
        found.tell(trial, rows[-1][1])
    return rows


def named(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


@pytest.mark.parametrize("method", SEARCHING)
def test_a_search_finds_what_is_good_and_repeats_nothing(method: str) -> None:
    found = engine(MIXED, method)
    count = 15 if method == "wandb" else 40  # W&B's engine takes a fifth of a second each time
    rows = searched(found, count)
    assert len({named(params) for params, _ in rows}) == count
    assert all(params["seed"] == 7 and set(params["moe"]) == {"use", "experts"} for params, _ in rows)
    assert all(len(found.point(trial)) == 6 for trial in range(count))
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
    first, count = engine(MIXED, method, seed=3), 8 if method == "wandb" else 16
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
            again.recall(trial, json.loads(json.dumps(asked[trial])), points[trial])
            if trial in told and chance.random() < 0.5:
                again.tell(trial, told[trial])
            elif trial in told:
                late.append(trial)
        for trial in late:
            again.tell(trial, told[trial])
        assert again.ask() == expected
    assert engine(MIXED, method, seed=4).ask() != engine(MIXED, method, seed=3).ask()


def test_a_history_is_recalled_at_once() -> None:
    source = engine(MIXED, "random")
    rows = [source.ask() for _ in range(1000)]
    found = engine(MIXED)
    start = time.process_time()
    for trial, params in rows:
        found.recall(trial, params, source.point(trial))
        found.tell(trial, loss(params))
    print(f"1,000 recalled and told in {1000 * (time.process_time() - start):.0f} ms")
    trial, params = found.ask()  # TPE by now
    assert trial == 1000
    assert named(params) not in {named(one) for _, one in rows}


@pytest.mark.parametrize("method", METHODS)
def test_a_small_space_is_used_up_and_says_so(method: str) -> None:
    parameters = {"a": {"values": [1, 2, 3]}, "b": {"values": ["x", "y"]}, "c": {"value": 0}}
    found = engine(parameters, method)
    rows = searched(found, 6, lambda params: params["a"] * 1.0)
    assert len({named(params) for params, _ in rows}) == 6
    with pytest.raises(UsedUp, match=re.escape("the space is used up: all 6 configurations were run")):
        found.ask()


@pytest.mark.parametrize("method", ["bayes", "random", "grid"])
def test_used_up_under_rules(method: str) -> None:
    parameters = {"dim": {"values": [8, 16, 24]}, "heads": {"values": [2, 3, 4]}, "width": {"values": [1, 2]}}
    rules = {"constraints": ["dim % heads == 0", "size > 2"], "derived": {"size": "dim // heads"}}
    rules["when"] = {"width": "heads > 2"}
    found = engine(parameters, method, **rules)
    seen = []
    for _ in range(9):
        trial, params = found.ask()
        seen.append(params)
        found.tell(trial, 1.0)
    with pytest.raises(UsedUp, match=re.escape("all 9 configurations that can be run, of 18 in all")):
        found.ask()
    assert all(one["dim"] % one["heads"] == 0 and one["size"] == one["dim"] // one["heads"] > 2 for one in seen)
    assert all(("width" in one) == (one["heads"] > 2) for one in seen)
    assert len({named(one) for one in seen}) == len(seen) == 9


def test_spaces_that_nothing_is_left_of() -> None:
    with pytest.raises(UsedUp, match=re.escape("no configuration that can be run: the constraint 'a > 5'")):
        engine({"a": {"values": [1, 2]}}, constraints=["a > 5"]).ask()
    steps = engine({"a": {"distribution": "q_uniform", "min": 0, "max": 3, "q": 1}}, "random")
    for _ in range(4):
        steps.ask()
    with pytest.raises(UsedUp, match="4 configurations were run, and 2,000 random tries found no other"):
        steps.ask()
    only = engine({"a": {"value": 1}})
    assert only.ask() == (0, {"a": 1})
    with pytest.raises(UsedUp, match="all 1 configurations"):
        only.ask()


def test_a_grid_goes_in_the_order_of_wandb() -> None:
    from sweeps import SweepRun, next_run  # fmt: skip

    parameters = {"z": {"values": [3, 1, 2]}, "a": {"values": ["y", "x"]}, "m": {"min": 0, "max": 1}}
    found, runs = engine(parameters, "grid"), []
    for _ in range(12):
        run = next_run({"method": "grid", "parameters": parameters}, runs)
        assert isinstance(run, SweepRun)
        runs.append(run)
        assert found.ask()[1] == {name: one["value"] for name, one in run.config.items()}
    with pytest.raises(UsedUp):
        found.ask()
    later = engine(parameters, "grid")
    later.recall(0, found_params := engine(parameters, "grid").ask()[1], found.point(0))
    assert later.ask()[1] != found_params
    with pytest.raises(ValueError, match=re.escape("parameters.x: a grid needs values that can be counted")):
        engine({"x": {"min": 0.0, "max": 1.0}}, "grid")


def test_what_is_not_accepted_is_never_asked_for() -> None:
    looked: list[str] = []

    def accept(params: Mapping[str, Any]) -> None:
        looked.append(named(params))
        if params["dim"] % 256:
            raise ValueError(f"dim {params['dim']} does not divide")

    found = engine(MIXED, accept=accept)
    rows = searched(found, 20)
    assert {params["dim"] for params, _ in rows} == {256, 512}
    assert len(looked) == len(set(looked))
    with pytest.raises(UsedUp, match="no configuration that can be run: dim 64 does not divide"):
        engine({**MIXED, "dim": {"value": 64}}, accept=accept).ask()


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
    found.recall(0, {"x": 0.05, "y": 0.5}, [0.05, 0.5])
    found.tell(0, 1e6)
    assert min(value for _, value in searched(found, 24, bowl) if value is not None) < 1e-3


def test_a_parameter_that_is_off_does_not_matter() -> None:
    parameters = {"moe": {"values": [True, False]}, "experts": {"min": 2, "max": 40}, "x": {"min": 0.0, "max": 1.0}}
    found = engine(parameters, when={"experts": "moe"})
    rows = searched(found, 25, lambda params: params["x"] + params.get("experts", 3.0) / 40)
    assert all(("experts" in params) == params["moe"] for params, _ in rows)
    from roxxel_dist.sweep.coding import Coding

    sweep = sweep_of({"parameters": parameters}, {"when": {"experts": "moe"}})
    coding = Coding(sweep.space, sweep.rules)
    on, off, other = coding.encode(np.array([[0, 5, 0.5], [1, 5, 0.5], [1, 9, 0.5]]))
    assert (off == other).all()
    assert on[1] != off[1]


SPECS = {
    "constant": {"value": 3},
    "categorical": {"values": ["a", "b", "c"]},
    "categorical_w_probabilities": {"values": [1, 2, 3], "probabilities": [0.2, 0.5, 0.3]},
    "int_uniform": {"min": 2, "max": 9},
    "uniform": {"min": -1.0, "max": 3.0},
    "log_uniform": {"min": -4.0, "max": 1.0},
    "log_uniform_values": {"min": 0.001, "max": 10.0},
    "inv_log_uniform": {"min": -4.0, "max": 1.0},
    "inv_log_uniform_values": {"min": 0.001, "max": 10.0},
    "normal": {"mu": 1.0, "sigma": 2.0},
    "log_normal": {"mu": 0.0, "sigma": 0.5},
    "beta": {"a": 2.0, "b": 5.0},
}
CDF = {
    "uniform": stats.uniform(-1, 4).cdf,
    "log_uniform": stats.loguniform(math.exp(-4), math.exp(1)).cdf,
    "log_uniform_values": stats.loguniform(0.001, 10).cdf,
    "inv_log_uniform": stats.loguniform(math.exp(-1), math.exp(4)).cdf,
    "inv_log_uniform_values": stats.loguniform(0.001, 10).cdf,
    "normal": stats.norm(1, 2).cdf,
    "log_normal": stats.lognorm(0.5).cdf,
    "beta": stats.beta(2, 5).cdf,
}
COUNT = 1500


@pytest.mark.parametrize("name", sorted(CONTINUOUS))
def test_samples_of_a_continuous_distribution(name: str) -> None:
    found = engine({"x": {"distribution": name, **SPECS[name]}}, "random", seed=11)
    samples = [found.ask()[1]["x"] for _ in range(COUNT)]
    assert stats.kstest(samples, CDF[name]).pvalue > 1e-3
    wrong = [value * 1.15 + 0.05 for value in samples]
    assert stats.kstest(wrong, CDF[name]).pvalue < 1e-3  # the test can tell


@pytest.mark.parametrize("name", ["categorical", "categorical_w_probabilities", "int_uniform"])
def test_samples_of_a_choice(name: str) -> None:
    found = engine({"x": {"distribution": name, **SPECS[name]}, "y": SPECS["uniform"]}, "random", seed=12)
    samples = [found.ask()[1]["x"] for _ in range(COUNT)]
    kind = distribution({"distribution": name, **SPECS[name]})
    choices = list(kind.choices or ())
    counts = [samples.count(choice) for choice in choices]
    weights = kind.weights or [1 / len(choices)] * len(choices)
    assert sum(counts) == COUNT
    assert stats.chisquare(counts, [COUNT * weight for weight in weights]).pvalue > 1e-3


@pytest.mark.parametrize("name", ["uniform", "log_uniform", "log_uniform_values", "normal", "log_normal", "beta"])
def test_samples_of_a_rounded_distribution(name: str) -> None:
    step = 0.25
    spec = {"distribution": f"q_{name}", "q": step, **SPECS[name]}
    found = engine({"x": spec, "y": SPECS["uniform"]}, "random", seed=13)
    samples = [found.ask()[1]["x"] for _ in range(COUNT)]
    places, counts = np.unique(samples, return_counts=True)
    assert np.allclose(places, np.round(places / step) * step)
    shares = np.array([CDF[name](place + step / 2) - CDF[name](place - step / 2) for place in places])
    big = COUNT * shares > 5
    assert big.sum() >= 3
    rest = [counts[~big].sum()], [COUNT * (1 - shares[big].sum())]
    observed, expected = np.r_[counts[big], rest[0]], np.r_[COUNT * shares[big], rest[1]]
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


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
        except UsedUp:
            assert seen
            with pytest.raises(UsedUp):
                again.ask()
            return
        assert trial == turn
        assert set(params) == set(parameters)
        assert named(params) not in seen
        seen.add(named(params))
        assert all(0 <= u <= 1 for u in found.point(trial))
        again.recall(trial, params, json.loads(json.dumps(found.point(trial))))
        if data.draw(st.booleans()):
            value = data.draw(st.one_of(st.none(), st.floats()))
            found.tell(trial, value)
            again.tell(trial, value)
    try:
        expected = found.ask()
    except UsedUp:
        return
    assert again.ask() == expected


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="method: 'best' is none: there are bayes, random, grid, tpe, wandb"):
        engine(MIXED, "best")
    found = engine(MIXED)
    trial, params = found.ask()
    with pytest.raises(ValueError, match="trial 5 was never asked for"):
        found.tell(5, 1.0)
    found.tell(trial, 1.0)
    with pytest.raises(ValueError, match="trial 0 was told already"):
        found.tell(trial, 1.0)
    with pytest.raises(ValueError, match="trial 0 was asked for already"):
        found.recall(0, params, found.point(0))
    with pytest.raises(ValueError, match="a point of 2 dimensions, and this sweep has 6"):
        found.recall(1, params, [0.1, 0.2])


@pytest.mark.parametrize(
    ("method", "module", "said"), [("tpe", "optuna", "optuna"), ("wandb", "sweeps", "sweeps==0.2.0")]
)
def test_what_to_install_is_said(method: str, module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"pip install '{said}'")):
        engine(MIXED, method)
