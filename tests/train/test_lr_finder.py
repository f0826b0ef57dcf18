"""The pure curve of a sweep: smoothing, where it diverges, what is suggested."""

import math
import statistics
import sys

import numpy as np
import pytest

from roxxel_dist.train import lr_finder
from roxxel_dist.train.lr_finder import SmoothedLoss, plot_sweep, smooth, suggest, sweep_rates

RATES = sweep_rates(1e-6, 1e-1, 100)


def curve(fall=30.0, at=60, noise=0.0, steps=100):
    """A loss that falls from 6 to 2, most steeply at step `at`."""
    random = np.random.default_rng(0)
    step = np.arange(steps)
    return list(2 + 4 / (1 + np.exp((step - at) * 4 / fall)) + noise * random.standard_normal(steps))


def diverged(losses, steps):
    """Whether the smoothed loss has diverged at the last of them."""
    smoothed = SmoothedLoss(steps)
    for loss in losses:
        smoothed.add(loss)
    return bool(losses) and smoothed.has_diverged


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
        ((1e-6, 1e-2, 10_001), "num_steps is 10001: a curve needs at least 10 steps, and at most 10,000"),
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
    assert at - 6 <= found <= at + 9  # the running mean looks back


@pytest.mark.parametrize(
    "spikes",
    [{0: 18.0}, {2: 9.0, 3: 8.0}, {5: 18.0}, {30: 12.0}, {30: 12.0, 31: 14.0}, {58: 9.0}, {97: 30.0}, {60: 1e-3}],
    ids=str,
)
def test_a_bad_batch_changes_no_suggestion(spikes):
    plain = curve()
    spiked = [spikes.get(step, loss) for step, loss in enumerate(plain)]
    assert suggest(RATES, spiked, 100) == pytest.approx(suggest(RATES, plain, 100), rel=0.13)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_nine_tenths_of_the_fall(optimizer):
    """For optimizers whose best rate is near the one at which a training becomes unstable."""
    losses = [*curve(at=40)[:80], *[2.5] * 20]
    smoothed, found = smooth(losses, 100), suggest(RATES, losses, 100, optimizer)
    share = (smoothed[0] - smoothed[RATES.index(found)]) / (smoothed[0] - min(smoothed))
    assert 0.87 < share < 0.93
    assert found > 2 * suggest(RATES, losses, 100, "adamw")


def test_what_comes_after_a_divergence_counts_for_nothing():
    losses = curve(at=40)
    back = [*losses[:70], *[9.0] * 15, *np.linspace(9, 1, 15)]  # its steepest descent, and its lowest loss
    assert suggest(RATES, back, 100) == pytest.approx(suggest(RATES, losses, 100), rel=0.2)
    ends = [*losses[:70], math.nan, *losses[71:]]
    assert suggest(RATES, ends, 100) == pytest.approx(suggest(RATES, losses, 100), rel=0.2)


def test_a_sweep_that_stopped_early_suggests_the_same():
    losses = [*curve(at=40)[:70], *[9.0] * 30]
    stop = next(count for count in range(1, 101) if diverged(losses[:count], 100))
    assert 80 < stop < 95
    assert suggest(RATES[:stop], losses[:stop], 100) == suggest(RATES, losses, 100)


def test_divergence():
    assert not diverged([], 100)
    falling = curve()
    assert not any(diverged(falling[:count], 100) for count in range(100))
    assert diverged([*falling, math.nan], 100)
    assert diverged([*falling, math.inf], 100)
    assert not diverged([*falling, 6.0], 100)  # one bad batch
    assert not diverged([*falling, *[8.0] * 10], 100)
    assert diverged([*falling, *[8.0] * 20], 100)
    assert not diverged([6.0, 6.0, 9.0, 8.0, 6.0], 100)
    assert diverged([*[5.0] * 10, *[6.0] * 20], 100)  # it never fell
    shifted = [loss - 10 for loss in falling]  # a loss may be below 0
    assert not any(diverged(shifted[:count], 100) for count in range(100))


def lines_run(function, *args):
    """How many lines of the module a call runs."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename == lr_finder.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_twice_the_steps_are_twice_the_work(noise):
    def work(steps):
        return lines_run(suggest, sweep_rates(1e-6, 1e-1, steps), curve(steps * 0.3, steps * 0.6, noise, steps), steps)

    short, long = work(400), work(800)
    assert 1.9 < long / short < 2.1
    assert short < 100 * 400


def test_a_step_of_a_sweep_costs_the_same_at_any_length():
    smoothed = SmoothedLoss(5000)
    smoothed.add(5.0)
    first = lines_run(smoothed.add, 4.0)
    for loss in curve(1500, 3000, 0.1, 5000)[2:]:
        smoothed.add(loss)
    assert lines_run(smoothed.add, 2.0) == first < 10


@pytest.mark.parametrize("half", [1, 3, 12, 200])
@pytest.mark.parametrize("values", [curve(noise=0.2), [1e6 + loss for loss in curve()], curve()[:2]])
def test_slopes_are_those_of_least_squares(values, half):
    pieces = [values[max(step - half, 0) : step + half + 1] for step in range(len(values))]
    expected = [statistics.linear_regression(range(len(piece)), piece).slope for piece in pieces]
    assert lr_finder._slopes(values, half) == pytest.approx(expected, rel=1e-6, abs=1e-9)


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
