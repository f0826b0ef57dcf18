"""The pure curve of a sweep: smoothing, where it diverges, what is suggested."""

import math

import numpy as np
import pytest

from roxxel_dist.train.lr_finder import diverged, plot_sweep, smooth, suggest, sweep_rates

RATES = sweep_rates(1e-6, 1e-1, 100)


def curve(fall=30.0, at=60, noise=0.0, steps=100):
    """A loss that falls from 6 to 2, most steeply at step `at`."""
    random = np.random.default_rng(0)
    step = np.arange(steps)
    return list(2 + 4 / (1 + np.exp((step - at) * 4 / fall)) + noise * random.standard_normal(steps))


def test_rates_go_from_end_to_end_by_one_factor():
    rates = sweep_rates(1e-5, 1e-1, 41)
    assert (rates[0], rates[-1]) == pytest.approx((1e-5, 1e-1))
    assert np.diff(np.log10(rates)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.0, 1e-2, 100), "min_lr is 0.0: it must be above 0"),
        ((1e-2, 1e-2, 100), "max_lr is 0.01: it must be above min_lr"),
        ((1e-6, math.inf, 100), "max_lr is inf"),
        ((math.nan, 1.0, 100), "min_lr is nan"),
        ((1e-6, 1e-2, 9), "num_steps is 9: a curve needs at least 10 steps"),
    ],
)
def test_ends_that_make_no_sweep(ends, said):
    with pytest.raises(ValueError, match=said):
        sweep_rates(*ends)


@pytest.mark.parametrize("steps", [10, 20, 100, 1000])
def test_smoothing_has_no_bias(steps):
    assert smooth([3.0] * steps, steps) == pytest.approx([3.0] * steps)
    assert smooth([5.0, 1.0], steps)[0] == 5.0


def test_smoothing_is_the_weighted_mean_of_what_was():
    losses = [4.0, 1.0, 7.0, 2.0]
    weights = 0.9 ** np.arange(3, -1, -1)
    assert smooth(losses, 100)[-1] == pytest.approx(np.average(losses, weights=weights))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("at", [40, 60, 80])
def test_the_suggestion_is_where_the_loss_falls_most_steeply(at, noise):
    found = RATES.index(suggest(RATES, curve(at=at, noise=noise), 100))
    assert at - 3 <= found <= at + 12  # the running mean looks back


def test_what_comes_after_a_divergence_counts_for_nothing():
    losses = curve(at=40)
    back = [*losses[:70], *[9.0] * 15, *np.linspace(9, 1, 15)]  # its steepest descent, and its lowest loss
    assert suggest(RATES, back, 100) == pytest.approx(suggest(RATES, losses, 100), rel=0.2)
    ends = [*losses[:70], math.nan, *losses[71:]]
    assert suggest(RATES, ends, 100) == pytest.approx(suggest(RATES, losses, 100), rel=0.2)


def test_a_sweep_that_stopped_early_suggests_the_same():
    losses = [*curve(at=40)[:70], *[9.0] * 30]
    stop = next(count for count in range(1, 101) if diverged(losses[:count], 100))
    assert 70 < stop < 90
    assert suggest(RATES[:stop], losses[:stop], 100) == suggest(RATES, losses, 100)


def test_divergence():
    assert not diverged([], 100)
    falling = curve()
    assert not any(diverged(falling[:count], 100) for count in range(100))
    assert diverged([*falling, math.nan], 100)
    assert diverged([*falling, math.inf], 100)
    assert not diverged([*falling, 6.0], 100)  # one bad batch
    assert diverged([*falling, *[8.0] * 10], 100)
    assert diverged([*[5.0] * 10, *[6.0] * 20], 100)  # it never fell
    shifted = [loss - 10 for loss in falling]  # a loss may be below 0
    assert not any(diverged(shifted[:count], 100) for count in range(100))


@pytest.mark.parametrize(
    "losses",
    [
        [5.0] * 100,
        [5 + 0.1 * math.sin(7.0 * step) for step in range(100)],
        [5 + 0.01 * step for step in range(100)],
        list(5 + 0.1 * np.random.default_rng(1).standard_normal(100)),
    ],
    ids=["flat", "waves", "rising", "noise"],
)
def test_a_loss_that_does_not_fall_suggests_nothing(losses):
    with pytest.raises(ValueError, match=r"did not fall between learning rates of 1\.00e-06 and"):
        suggest(RATES, losses, 100)


def test_a_loss_that_is_no_number_at_once():
    with pytest.raises(ValueError, match=r"good for 3 steps only, up to a learning rate of 1\.26e-06: use a smaller"):
        suggest(RATES, [5.0, 5.0, 5.0, math.nan], 100)


def test_the_picture(tmp_path):
    plot_sweep(RATES[:50], curve()[:50], 100, 1e-4, tmp_path / "new" / "lr_finder.png")
    assert (tmp_path / "new" / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
