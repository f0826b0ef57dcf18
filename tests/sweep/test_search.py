"""What every engine keeps to: a space that is used up ends the search, rules hold, and errors say what is wrong."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from engines import MIXED, engine, named, searched

from roxxel_dist.sweep.samplers import SAMPLERS, SpaceExhausted, base
from roxxel_dist.sweep.samplers.base import REFUSALS

SQUARE = {"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}}


@pytest.mark.parametrize("method", SAMPLERS)
def test_a_small_space_is_used_up_and_says_so(method: str) -> None:
    parameters = {"a": {"values": [1, 2, 3]}, "b": {"values": ["x", "y"]}, "c": {"value": 0}}
    found = engine(parameters, method)
    rows = searched(found, 6, lambda params: params["a"] * 1.0)
    assert len({named(params) for params, _ in rows}) == 6
    with pytest.raises(SpaceExhausted, match=re.escape("nothing is left to search: all 6 configurations were run")):
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
    with pytest.raises(SpaceExhausted, match=re.escape("all 9 configurations that can be run, of 18 in all")):
        found.ask()
    assert all(one["dim"] % one["heads"] == 0 and one["size"] == one["dim"] // one["heads"] > 2 for one in seen)
    assert all(("width" in one) == (one["heads"] > 2) for one in seen)
    assert len({named(one) for one in seen}) == len(seen) == 9


@pytest.mark.parametrize("method", ["bayes", "random", "grid", "tpe"])
def test_a_formula_that_cannot_be_worked_out_ends_no_search(method: str) -> None:
    rules = {"constraints": ["64 % heads == 0"], "when": {"width": "8 // heads > 1"}}
    found = engine({"heads": {"min": 0, "max": 8}, "width": {"values": [1, 2]}}, method, **rules)
    rows = searched(found, 7, lambda params: params["heads"] * 1.0)
    assert {params["heads"] for params, _ in rows} == {1, 2, 4, 8}
    with pytest.raises(SpaceExhausted, match="all 7 configurations that can be run"):
        found.ask()
    with pytest.raises(SpaceExhausted, match="no configuration that can be run: '1 // heads' cannot be worked out"):
        engine({"heads": {"values": [0]}}, method, derived={"a": "1 // heads"}).ask()


@pytest.mark.parametrize("method", ["bayes", "random", "tpe"])
def test_a_range_of_64_bits_is_searched(method: str) -> None:
    found = engine({"seed": {"min": 0, "max": 2**63 - 1}, "x": {"min": 0.0, "max": 1.0}}, method)
    assert len({params["seed"] for params, _ in searched(found, 12, lambda params: params["x"])}) == 12


def test_spaces_that_nothing_is_left_of() -> None:
    with pytest.raises(SpaceExhausted, match=re.escape("no configuration that can be run: the constraint 'a > 5'")):
        engine({"a": {"values": [1, 2]}}, constraints=["a > 5"]).ask()
    steps = engine({"a": {"distribution": "q_uniform", "min": 0, "max": 3, "q": 1}}, "random")
    for _ in range(4):
        steps.ask()
    with pytest.raises(SpaceExhausted, match="nothing is left to search: all 4 configurations were run"):
        steps.ask()
    rare = engine({"a": {"distribution": "q_normal", "mu": 0, "sigma": 0.01, "q": 1}}, "random")
    rare.ask()
    with pytest.raises(
        SpaceExhausted, match="nothing seems left to search: 1 configurations were run, and random tries found no other"
    ):
        rare.ask()
    only = engine({"a": {"value": 1}})
    assert only.ask() == (0, {"a": 1})
    with pytest.raises(SpaceExhausted, match="the only configuration was run"):
        only.ask()


@pytest.mark.filterwarnings("ignore")  # of pydantic, where this test is the first to import the engine
def test_a_grid_goes_in_the_order_of_wandb() -> None:
    from sweeps import SweepRun, next_run  # fmt: skip

    parameters = {"z": {"values": [3, 1, 2]}, "a": {"values": ["y", "x"]}, "m": {"min": 0, "max": 1}}
    found, runs = engine(parameters, "grid"), []
    for _ in range(12):
        run = next_run({"method": "grid", "parameters": parameters}, runs)
        assert isinstance(run, SweepRun)
        runs.append(run)
        assert found.ask()[1] == {name: one["value"] for name, one in run.config.items()}
    with pytest.raises(SpaceExhausted):
        found.ask()
    later = engine(parameters, "grid")
    later.restore(0, found_params := engine(parameters, "grid").ask()[1], found.point(0))
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
    rows = searched(found, 12)
    assert {params["dim"] for params, _ in rows} == {256, 512}
    assert len(looked) == len(set(looked))
    with pytest.raises(
        SpaceExhausted, match="200 configurations were tried, and none of them can run: dim 64 does not divide"
    ):
        engine({**MIXED, "dim": {"value": 64}}, accept=accept).ask()


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="method: 'best' does not exist: use one of bayes, tpe, random, grid"):
        engine(MIXED, "best")
    found = engine(MIXED)
    trial, params = found.ask()
    with pytest.raises(ValueError, match="trial 5 does not exist: call ask first"):
        found.tell(5, 1.0)
    found.tell(trial, 1.0)
    with pytest.raises(ValueError, match="trial 0 has a result already"):
        found.tell(trial, 1.0)
    with pytest.raises(ValueError, match="trial 0 exists already"):
        found.restore(0, params, found.point(0))
    with pytest.raises(ValueError, match="a point of 2 dimensions, and this sweep has 6"):
        found.restore(1, params, [0.1, 0.2])


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'optuna'")):
        engine(MIXED, "tpe")


@pytest.mark.parametrize("method", ["bayes", "random", "grid"])
def test_accept_is_not_asked_for_ever(method: str) -> None:
    looked: list[str] = []

    def refuse(params: Mapping[str, Any]) -> None:
        looked.append(named(params))
        raise ValueError("no such model")

    parameters = {"a": {"min": 1, "max": 30}, "b": {"min": 1, "max": 30}}
    with pytest.raises(SpaceExhausted, match=r"can (be )?run: no such model"):
        engine(parameters, method, accept=refuse).ask()
    assert len(looked) == len(set(looked)) == (900 if method == "grid" else REFUSALS)


def test_a_small_space_is_searched_past_its_refusals() -> None:
    def accept(params: Mapping[str, Any]) -> None:
        if params["a"] > 2:
            raise ValueError("too large")

    found = engine({"a": {"min": 1, "max": 30}, "b": {"min": 1, "max": 10}}, "random", seed=1, accept=accept)
    assert len({named(found.ask()[1]) for _ in range(20)}) == 20
    with pytest.raises(SpaceExhausted, match="all 20 configurations that can be run, of 300 in all"):
        found.ask()


def test_a_grid_over_steps() -> None:
    lr = {"distribution": "q_log_uniform_values", "min": 0.5, "max": 4.2, "q": 0.5}
    found = engine({"a": {"distribution": "q_uniform", "min": 1, "max": 7, "q": 3}, "lr": lr}, "grid")
    rows = [found.ask()[1] for _ in range(24)]
    assert [one["lr"] for one in rows[:8]] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert [one["a"] for one in rows[::8]] == [0, 3, 6]
    with pytest.raises(SpaceExhausted, match="all 24 configurations"):
        found.ask()
    endless = {"distribution": "q_normal", "mu": 0, "sigma": 1, "q": 1}
    with pytest.raises(ValueError, match=re.escape("parameters.a: a grid needs values that can be counted")):
        engine({"a": endless}, "grid")


@pytest.mark.parametrize("method", ["random", pytest.param("tpe", marks=pytest.mark.long), "bayes"])
def test_rules_that_leave_little_of_the_space(method: str) -> None:
    """Of the square 0.045 % are left: points near those that were found are looked at too."""
    search = engine(SQUARE, method, seed=3, constraints=["x + y > 1.97"])
    found = [search.ask()[1] for _ in range(10)]
    assert all(params["x"] + params["y"] > 1.97 for params in found)
    assert len({params["x"] for params in found}) > 7


def test_a_search_that_ends_says_what_could_not_run() -> None:
    def accept(params: Mapping[str, Any]) -> None:
        if params["a"] == 2:
            raise ValueError("a is 2: it must be odd")

    search = engine({"a": {"values": [1, 2, 3]}}, "grid", accept=accept)
    search.ask()
    search.ask()
    with pytest.raises(SpaceExhausted, match="all 2 configurations that can be run, of 3 in all, were run; one of the"):
        search.ask()


def test_a_grid_of_which_nothing_can_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(params: Mapping[str, Any]) -> None:
        raise ValueError(f"{params['a']} is too much")

    monkeypatch.setattr(base, "GRID_TRIES", 50)
    with pytest.raises(SpaceExhausted, match="50 points of the grid, one after the other, cannot run: 49 is too much"):
        engine({"a": {"min": 0, "max": 2_000_000_000}}, "grid", accept=accept).ask()
