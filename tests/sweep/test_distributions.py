"""Samples of every distribution of W&B against scipy's, and what is refused."""

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tables import one_test

from roxxel_dist.sweep.space.distributions import NAMES, distribution

LOG = {"min": math.log(0.001), "max": math.log(10)}
CONTINUOUS: list[tuple[dict[str, Any], Any]] = [
    ({"min": 0.5, "max": 2}, stats.uniform(0.5, 1.5)),
    ({"min": -2, "max": 3, "distribution": "uniform"}, stats.uniform(-2, 5)),
    ({**LOG, "distribution": "log_uniform"}, stats.loguniform(0.001, 10)),
    ({"min": 0.001, "max": 10, "distribution": "log_uniform_values"}, stats.loguniform(0.001, 10)),
    ({**LOG, "distribution": "inv_log_uniform"}, stats.loguniform(0.1, 1000)),
    ({"min": 0.001, "max": 10, "distribution": "inv_log_uniform_values"}, stats.loguniform(0.001, 10)),
    ({"distribution": "normal"}, stats.norm()),
    ({"distribution": "normal", "mu": 3, "sigma": 0.5}, stats.norm(3, 0.5)),
    ({"distribution": "log_normal", "mu": 1, "sigma": 0.5}, stats.lognorm(0.5, scale=math.e)),
    ({"distribution": "beta", "a": 2, "b": 5}, stats.beta(2, 5)),
]
QUANTIZED: list[tuple[dict[str, Any], Any]] = [
    ({"min": 0, "max": 8, "distribution": "q_uniform", "q": 2}, stats.uniform(0, 8)),
    ({**LOG, "distribution": "q_log_uniform", "q": 0.25}, stats.loguniform(0.001, 10)),
    ({"min": 16, "max": 512, "distribution": "q_log_uniform_values", "q": 16}, stats.loguniform(16, 512)),
    ({"distribution": "q_normal", "sigma": 4}, stats.norm(0, 4)),
    ({"distribution": "q_log_normal", "q": 0.5}, stats.lognorm(1)),
    ({"distribution": "q_beta", "a": 2, "b": 2, "q": 0.125}, stats.beta(2, 2)),
]
DISCRETE: list[tuple[dict[str, Any], dict[Any, float]]] = [
    ({"value": "adamw"}, {"adamw": 1}),
    ({"values": ["adamw", True, None]}, {"adamw": 1 / 3, True: 1 / 3, None: 1 / 3}),
    ({"values": [20, 12, 16, 24]}, {12: 0.25, 16: 0.25, 20: 0.25, 24: 0.25}),
    ({"values": ["a", "b"], "probabilities": [0.9, 0.1]}, {"a": 0.9, "b": 0.1}),
    ({"min": 3, "max": 6}, {3: 0.25, 4: 0.25, 5: 0.25, 6: 0.25}),
]


def samples(spec: dict[str, Any], count: int = 4000) -> list[Any]:
    one = distribution(spec)
    return [one.quantile(float(u)) for u in np.random.default_rng(0).random(count)]


def test_every_distribution_is_tested() -> None:
    tested = {distribution(spec).name for spec, _ in CONTINUOUS + QUANTIZED + DISCRETE}
    assert tested == set(NAMES)


@one_test(("spec", "known"), CONTINUOUS)
def test_continuous_samples_have_the_distribution(spec: dict[str, Any], known: Any) -> None:
    found = samples(spec)
    assert stats.kstest(found, known.cdf).pvalue > 0.01
    ends = [distribution(spec).quantile(u) for u in (0.0, 1.0)]
    assert all(map(math.isfinite, ends))
    assert ends[0] <= min(found) < max(found) <= ends[1]


@one_test(("spec", "known"), QUANTIZED)
def test_quantized_samples_are_multiples_and_have_the_distribution(spec: dict[str, Any], known: Any) -> None:
    step = spec.get("q", 1)
    found = np.array(samples(spec), float)
    assert np.allclose(found / step, np.round(found / step))
    assert {type(value) for value in samples(spec, 50)} == {int if isinstance(step, int) else float}
    values, counts = np.unique(found, return_counts=True)
    chances = known.cdf(values + step / 2) - known.cdf(values - step / 2)
    kept = chances * len(found) >= 5
    expected = chances[kept] / chances[kept].sum() * counts[kept].sum()
    assert stats.chisquare(counts[kept], expected).pvalue > 0.01


@pytest.mark.parametrize(("spec", "chances"), DISCRETE, ids=lambda value: str(value)[:40])
def test_discrete_samples_have_the_distribution(spec: dict[str, Any], chances: dict[Any, float]) -> None:
    one, found = distribution(spec), samples(spec)
    assert one.choices is not None
    assert list(one.choices) == list(chances), "numbers are sorted, other values stay as they were"
    assert {type(value) for value in found} == {type(value) for value in chances}
    counts = [sum(value is key or value == key for value in found) for key in chances]
    if len(chances) > 1:
        assert stats.chisquare(counts, [chance * len(found) for chance in chances.values()]).pvalue > 0.01
    assert [one.quantile(0.0), one.quantile(1.0)] == [one.choices[0], one.choices[-1]]


def test_what_can_be_known_of_a_parameter() -> None:
    assert distribution({"value": 3}).is_constant
    assert distribution({"values": [3]}).is_constant
    assert not distribution({"min": 0.0, "max": 1.0}).is_constant
    assert distribution({"values": [3, 1, 2.5]}).is_ordered
    assert not distribution({"values": ["a", "b"]}).is_ordered
    assert not distribution({"values": [True, False]}).is_ordered
    assert distribution({"distribution": "normal"}).choices is None


@one_test(
    ("spec", "said"),
    [
        ({}, "no values: give `value`"),
        ({"min": 1}, "no values: give `value`"),
        ({"valeus": [1]}, "'valeus'"),
        ({"distribution": "gauss"}, "'gauss' does not exist"),
        ({"values": []}, "at least one"),
        ({"values": "abc"}, "must be a list"),
        ({"values": [1, 2], "probabilities": [1]}, "list of 2 numbers"),
        ({"values": [1, 2], "probabilities": [0.5, 0.6]}, "their sum must be 1"),
        ({"values": [1, 2], "min": 1}, "min: categorical has no such key"),
        ({"min": 3, "max": 1}, "min 3 is larger than max 1"),
        ({"min": 3.5, "max": 1}, "min 3.5 is larger than max 1"),
        ({"min": 0, "max": 1, "distribution": "log_uniform_values"}, "must be more than 0"),
        ({"min": 0.5, "max": 2, "distribution": "int_uniform"}, "must be integers"),
        (
            {"min": "1e-4", "max": 1.0, "distribution": "log_uniform_values"},
            "'1e-4' must be a number: write 0.0001, without",
        ),
        ({"min": 1, "distribution": "uniform"}, "uniform needs max"),
        ({"min": 0, "max": 1, "q": 0, "distribution": "q_uniform"}, "q: 0"),
        ({"min": 0, "max": 1, "q": 1, "distribution": "uniform"}, "q: uniform has no such key"),
        ({"distribution": "normal", "sigma": -1}, "sigma: -1"),
        ({"distribution": "beta", "a": 0}, "a 0"),
        ({"distribution": "normal", "mu": float("nan")}, "must be a number"),
    ],
)
def test_what_cannot_be_is_told(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        distribution(spec)


def test_integers_of_64_bits() -> None:
    found = distribution({"min": 0, "max": 2**63 - 1})
    assert (found.quantile(0.0), found.quantile(1.0)) == (0, 2**63 - 1)
    assert found.quantile(0.5) == 2**62
    assert found.count is None
    assert distribution({"min": 0, "max": 2**53 - 1}).count == 2**53


@pytest.mark.parametrize(
    "spec",
    [
        {"distribution": "q_uniform", "min": -1e308, "max": 1e308, "q": 1e300},  # max - min is no float
        {"distribution": "q_log_uniform_values", "min": 1e-300, "max": 1e300, "q": 1e-5},  # nor is max / min
        {"distribution": "q_log_uniform", "min": -400, "max": 400, "q": 0.5},
        {"distribution": "q_uniform", "min": -0.3, "max": 0.4, "q": 0.1},
        {"distribution": "q_log_uniform_values", "min": 3, "max": 300, "q": 7},
    ],
    ids=lambda spec: f"{spec['min']} to {spec['max']} by {spec['q']}",
)
def test_a_grid_finds_each_multiple_of_a_wide_range(spec: dict[str, Any]) -> None:
    one = distribution(spec)
    count = min(one.count or 0, 40)
    assert count > 1
    found = [one.quantile(one.grid_point(number)) for number in range(count)]
    assert found == sorted(set(found))
