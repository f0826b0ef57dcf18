"""What reports say of a law: surfaces, effects and interactions of functions that are known, with their intervals."""

import math

import numpy as np
import pytest
from tables import one_test

from roxxel_dist.sweep.report.confirmation import Confirmed, paired
from roxxel_dist.sweep.report.surface import MORE, Estimate, effects, gain, interactions, lattice, surface, told

SHARES = np.array([0.5, 0.3, 0.2])
ALL, NONE, WHOLE = slice(0, 3), np.zeros(3), np.ones(3)


def linear(slopes, spread):
    """sum(slope * share), and joint draws of it, whose slopes vary by `spread`."""
    drawn = np.random.default_rng(0).normal(slopes, spread, (4000, len(slopes)))
    return lambda rows: np.vstack([slopes, drawn]) @ rows.T


def product(rows):
    """A metric that 0 and 1 lower together, without doubt."""
    return np.broadcast_to(-rows[:, 0] * rows[:, 1], (10, len(rows)))


@pytest.mark.parametrize(("count", "parts", "points"), [(2, 10, 11), (3, 5, 21), (4, 3, 20)])
def test_a_lattice_has_every_mixture_once(count, parts, points):
    rows = lattice(count, parts)
    assert len(rows) == points == len({tuple(row) for row in rows})
    assert np.allclose(rows.sum(axis=1), 1)
    assert (rows >= 0).all()


def test_more_of_a_set_is_the_slope_over_the_mean():
    slopes = np.array([1.0, 2.0, 4.0])
    found = effects(linear(slopes, 0.0), SHARES, ALL)
    assert [one.value for one in found] == pytest.approx(MORE * (slopes - slopes @ SHARES))
    assert sum(one.value * share for one, share in zip(found, SHARES, strict=True)) == pytest.approx(0, abs=1e-9)


def test_a_difference_is_known_better_than_either_value():
    """All that varies is common to both: the interval of the difference has no width, that of a value has."""
    rows = np.array([[0.5, 0.5], [0.4, 0.6]])
    shift = np.random.default_rng(0).normal(0, 1, (1000, 1))
    assert gain(lambda asked: shift + asked[:, 0], *rows) == pytest.approx((0.1, 0.1, 0.1))
    (point, *_) = surface(lambda asked: shift + asked[:, 0], rows[0], slice(0, 2), np.zeros(2), np.ones(2))
    assert point.metric.high - point.metric.low > 3


def test_intervals_hold_as_many_draws_as_they_say():
    (one, *_) = effects(linear(np.array([1.0, 0.0, 0.0]), 0.1), SHARES, ALL)
    exact = 1.645 * 0.1 * MORE * math.sqrt(0.5**2 + 0.3**2 + 0.2**2)  # of (e_0 - r) . slopes
    assert (one.high - one.low) / 2 == pytest.approx(exact, rel=0.06)


def test_sets_that_help_each_other_come_first():
    (pair, value), *others = interactions(product, SHARES, ALL)
    assert pair == (0, 1)
    step_a, step_b = np.array([1, 0, 0]) - SHARES, np.array([0, 1, 0]) - SHARES
    assert value.value == pytest.approx(-MORE * MORE * (step_a[0] * step_b[1] + step_a[1] * step_b[0]))
    assert value.value < 0
    assert all(abs(one.value) < abs(value.value) for _, one in others)


def test_a_linear_metric_has_no_interactions():
    assert all(abs(one.value) < 1e-12 for _, one in interactions(linear(np.ones(3), 0.5), SHARES, ALL))


def test_a_surface_keeps_floors_caps_and_the_other_entries():
    asked = []

    def draws(rows):
        asked.append(rows)
        return np.zeros((5, len(rows)))

    base = np.array([0.7, 0.3, 0.2, 0.3, 0.5])
    floors, caps = np.array([0.2, 0.0, 0.0]), np.array([1.0, 0.6, 1.0])
    points = surface(draws, base, slice(2, 5), floors, caps)
    assert np.array_equal(asked[0][:, :2], np.repeat(base[None, :2], len(points), axis=0))
    assert all((np.array(one.shares) >= floors - 1e-9).all() for one in points)
    assert all((np.array(one.shares) <= caps + 1e-9).all() for one in points)
    two = surface(draws, base, slice(0, 2), np.array([0.2, 0.1]), np.array([0.8, 1.0]))
    assert (two[0].shares, two[-1].shares) == (pytest.approx((0.8, 0.2)), pytest.approx((0.2, 0.8)))
    assert surface(draws, base, slice(0, 5), np.zeros(5), np.ones(5)) == []


def test_a_curve_and_a_triangle_as_text():
    two = surface(linear(np.array([1.0, 0.0]), 0.0), np.array([0.5, 0.5]), slice(0, 2), np.zeros(2), np.ones(2))
    lines = told(("code", "web"), two, "minimize")
    assert len(lines) == 12
    assert lines[-1].split() == ["0.000", "0.0000", "0.0000", "to", "0.0000", "best"]
    assert told(("code", "web"), two, "maximize")[1].split()[-1] == "best"
    three = told(("a", "b", "c"), surface(linear(np.array([0.0, 1.0, 2.0]), 0.0), SHARES, ALL, NONE, WHOLE), "minimize")
    assert [len(line.split()) - 1 for line in three[1:]] == [1, 2, 3, 4, 5, 6]
    assert three[1].split() == ["1.00", "0.000±0.000*"]
    assert told(("a", "b"), [], "minimize") == []


@pytest.mark.parametrize(
    ("ours", "theirs", "mean", "half"),
    [
        ({1: 2.0, 2: 2.2, 3: 2.1}, {1: 2.5, 2: 2.6, 3: 2.7}, -0.5, 2.920 * 0.1 / math.sqrt(3)),
        ({1: 2.0, 2: 2.2}, {2: 2.6, 1: 2.5, 3: 9.0}, -0.45, 6.314 * 0.05),
        ({3: 1.0}, {3: 1.5}, -0.5, math.inf),
    ],
)
def test_seeds_are_compared_in_pairs(ours, theirs, mean, half):
    found = paired(ours, theirs)
    assert found is not None
    assert found.value == pytest.approx(mean)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=1e-3)


@one_test(
    ("predicted", "measured", "inside"),
    [
        ((-0.1, -0.2, 0.0), (-0.15, -0.2, -0.1), True),
        ((-0.1, -0.2, 0.0), (0.01, -0.04, 0.06), True),  # 0.11 apart, and the root of 0.1^2 + 0.05^2 is 0.112
        ((-0.1, -0.2, 0.0), (0.02, -0.03, 0.07), False),
        ((-0.1, -0.3, -0.05), (-0.22, -0.22, -0.22), True),  # the halves that point to each other
        ((-0.1, -0.3, -0.05), (0.0, 0.0, 0.0), False),
        ((-0.1, -0.2, 0.0), (9.0, -math.inf, math.inf), None),
        (None, (0.0, 0, 0), None),
        ((0.0, 0, 0), None, None),
    ],
)
def test_inside_or_outside(predicted, measured, inside):
    said, found = (None if one is None else Estimate(*one) for one in (predicted, measured))
    one = Confirmed(against="natural", seeds=3, predicted=said, measured=found)
    assert one.is_inside is inside


def test_no_common_seed_measures_nothing():
    assert paired({}, {1: 2.0}) is None
