"""The Gaussian process: its gradients are the slopes of its predictions, and these reproduce the data."""

import math

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import norm

from roxxel_dist.sweep.samplers import gp


def told(dims: int = 3, count: int = 40, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """A function of the first dimension alone."""
    chance = np.random.default_rng(5)
    points = chance.random((count, dims))
    values = np.sin(5 * points[:, 0]) + noise * chance.normal(size=count)
    return points, (values - values.mean()) / values.std()


def test_the_gradient_that_learning_follows_is_the_slope() -> None:
    posterior = gp._Posterior(*told())
    for theta in (posterior.centre, np.array([-1.0, 0.5, 2.0, 0.7, -3.0, 0.2])):
        slope = approx_fprime(theta, lambda at: posterior(at)[0], 1e-6)
        assert np.allclose(posterior(theta)[1], slope, rtol=1e-3, atol=1e-3)


def test_what_matters_is_learned() -> None:
    points, values = told()
    scales = np.exp(gp.fit_hyperparameters(points, values)[:-3])
    assert scales[0] < 0.5 * min(scales[1:])


def test_it_believes_what_it_was_told_and_doubts_what_is_far() -> None:
    points, values = told()
    process = gp.condition(points, values, gp.fit_hyperparameters(points, values))
    mean, deviation = process.predict(points)
    assert np.abs(mean - values).max() < 0.2
    assert process.best == pytest.approx(mean.min())
    fresh = np.random.default_rng(6).random((200, 3))
    truth = np.sin(5 * fresh[:, 0])
    guess, doubt = process.predict(fresh)
    assert np.corrcoef(truth, guess)[0, 1] > 0.99
    assert deviation.mean() < doubt.mean()
    assert process.predict(np.full((1, 3), 9.0))[1][0] > math.exp(process.theta[-3] / 2)


def test_the_slope_of_the_expected_improvement() -> None:
    points, values = told(noise=0.3)
    process = gp.condition(points, values, gp.fit_hyperparameters(points, values))
    for point in np.random.default_rng(7).random((5, 3)):
        worth, slope = process.slope(point)
        assert worth == pytest.approx(process.log_expected_improvement(point[None])[0], rel=1e-5, abs=1e-4)
        there = approx_fprime(point, lambda at: process.log_expected_improvement(at[None])[0], 1e-6)
        assert np.allclose(slope, there, rtol=2e-2, atol=2e-2)


def test_the_expected_improvement_is_exact_far_below_zero() -> None:
    z = np.array([-0.5, 0.0, 2.0])
    assert np.allclose(gp._log_h(z), np.log(norm.pdf(z) + z * norm.cdf(z)))
    far = gp._log_h(np.array([-5.0, -30.0, -300.0]))
    assert far[0] == pytest.approx(math.log(norm.pdf(-5) - 5 * norm.cdf(-5)), abs=1e-6)
    assert far[1] == pytest.approx(-450 - 0.5 * math.log(2 * math.pi) - 2 * math.log(30), abs=0.01)
    assert np.isfinite(far).all()


def test_the_chance_of_a_value_below_a_limit() -> None:
    points, _ = told()
    failed = np.where(points[:, 0] > 0.7, 1.0, -1.0)
    process = gp.condition(points, failed, gp.fit_hyperparameters(points, failed))
    sure, safe = process.log_probability_below(np.array([[0.9, 0.5, 0.5], [0.2, 0.5, 0.5]]), 0.0)
    assert sure < math.log(0.2)
    assert safe > math.log(0.85)


def test_values_that_are_all_alike_teach_nothing_and_break_nothing() -> None:
    points = np.full((4, 2), 0.5)
    process = gp.condition(points, np.zeros(4), gp.fit_hyperparameters(points, np.zeros(4)))
    assert np.isfinite(process.log_expected_improvement(np.array([[0.5, 0.5], [0.0, 1.0]]))).all()


def test_a_value_that_is_left_out_is_predicted_from_the_others() -> None:
    points, values = told(count=12, noise=0.2)
    theta = gp.fit_hyperparameters(points, values)
    mean, deviation = gp.condition(points, values, theta).leave_one_out()
    for index in range(12):
        others = np.arange(12) != index
        there, doubt = gp.condition(points[others], values[others], theta).predict(points[index][None])
        assert mean[index] == pytest.approx(there[0], abs=1e-6)
        assert deviation[index] ** 2 == pytest.approx(doubt[0] ** 2 + math.exp(theta[-2]) + gp.JITTER, rel=1e-4)


def test_drawn_values_are_as_likely_as_predicted() -> None:
    points, values = told(count=10)
    process = gp.condition(points, values, gp.fit_hyperparameters(points, values))
    fresh, rng = np.random.default_rng(6).random((3, 3)), np.random.default_rng(8)
    draws = np.array([process.draw(fresh, rng) for _ in range(1000)])
    mean, deviation = process.predict(fresh)
    deviation = np.sqrt(deviation**2 + gp.DRAW_JITTER)
    assert np.abs((draws.mean(0) - mean) / deviation).max() < 0.15
    assert np.allclose(draws.std(0), deviation, rtol=0.1)
    surer = process.condition_on(fresh, draws[0])
    assert (surer.predict(fresh)[1] < deviation).all()


def test_few_values_leave_the_scales_open_and_many_do_not() -> None:
    spreads = []
    for count in (8, 50):
        points, values = told(count=count)
        theta = gp.fit_hyperparameters(points, values)
        draws = gp.sample_hyperparameters(points, values, theta, 20, np.random.default_rng(9))
        assert len({tuple(draw) for draw in draws}) > 12
        spreads.append(np.std(draws, axis=0)[0])
        again = gp.sample_hyperparameters(points, values, theta, 20, np.random.default_rng(9))
        assert np.array_equal(draws, again)
    assert spreads[1] < 0.6 * spreads[0]


def test_draws_of_the_scales_are_as_likely_as_the_posterior_says() -> None:
    """Where no value says anything the posterior of the scales is about their prior."""
    points = np.array([[0.2], [0.8]])
    values = np.zeros(2)
    theta = gp.fit_hyperparameters(points, values)
    draws = np.array(gp.sample_hyperparameters(points, values, theta, 400, np.random.default_rng(10)))
    posterior = gp._Posterior(points, values)
    grid = np.linspace(*gp.NOISE, 400)
    at = [np.r_[draws.mean(0)[:2], noise, draws.mean(0)[3]] for noise in grid]
    weights = np.exp([-posterior(theta)[0] for theta in at])
    mean = (grid * weights).sum() / weights.sum()
    assert draws[:, 2].mean() == pytest.approx(mean, abs=0.5)
