"""What `random` asks for follows the distributions of W&B: tests of every one against its CDF."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from roxxel_dist.sweep.samplers import Engine, make
from roxxel_dist.sweep.space.distributions import CONTINUOUS, distribution


def asking(parameters: Mapping[str, Any], seed: int) -> Engine:
    return make({"parameters": parameters}, seed, "random")


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
    found = asking({"x": {"distribution": name, **SPECS[name]}}, seed=11)
    samples = [found.ask()[1]["x"] for _ in range(COUNT)]
    assert stats.kstest(samples, CDF[name]).pvalue > 1e-3
    wrong = [value * 1.15 + 0.05 for value in samples]
    assert stats.kstest(wrong, CDF[name]).pvalue < 1e-3  # the test can tell


@pytest.mark.parametrize("name", ["categorical", "categorical_w_probabilities", "int_uniform"])
def test_samples_of_a_choice(name: str) -> None:
    found = asking({"x": {"distribution": name, **SPECS[name]}, "y": SPECS["uniform"]}, seed=12)
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
    found = asking({"x": spec, "y": SPECS["uniform"]}, seed=13)
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
