"""The verdict of pairs of trainings: how often it is wrong when it may end at any pair, and how many pairs it needs."""

import math

import numpy as np
import pytest
from scipy import stats
from tables import one_test

from roxxel_dist.sweep.samplers.pairs import Pair, compare, comparisons, evidence_of_losses, half_width, interval
from roxxel_dist.sweep.space.extras import Versus

NAN = math.nan
STUDIES, PAIRS = 100, 20
SAME = Versus(changes={}, names={}, smallest=1.0)
DIFFERENT = Versus(changes={}, names={})


def pairs(differences):
    return [Pair(seed=i, a=1.0 + one, b=1.0) for i, one in enumerate(differences)]


def seed_noise(rng, alike):
    """A and B of each seed, with deviations of 1 of which a share is common."""
    common = rng.standard_normal(PAIRS) * math.sqrt(alike)
    return [common + rng.standard_normal(PAIRS) * math.sqrt(1 - alike) for _ in "AB"]


DRAWS = {
    "normal": lambda rng: rng.standard_normal(PAIRS),
    "heavy tails": lambda rng: rng.standard_t(3, PAIRS) / math.sqrt(3),
    "outliers": lambda rng: rng.standard_normal(PAIRS) * np.where(rng.random(PAIRS) < 0.1, 5, 0.8),
    "correlated seeds": lambda rng: np.subtract(*seed_noise(rng, 0.9)) / math.sqrt(0.2),
    "skewed trainings": lambda rng: np.subtract(*np.exp(rng.standard_normal((2, PAIRS)))) / 3.06,
    "unlike pairs": lambda rng: rng.standard_normal(PAIRS) * np.exp(rng.standard_normal(PAIRS) / 2),
}
QUICK_DRAWS = ("normal", "heavy tails", "skewed trainings")
TRUTHS = {"A/A": (0.0, DIFFERENT), "A/A within D": (0.0, SAME), "just above D": (1.001, SAME), "half of D": (0.5, SAME)}


def last(differences, versus):
    """The verdict at the end, whenever that came, and after how many pairs."""
    *_, found = comparisons(pairs(differences), versus, 1.0)
    return found.verdict, found.pairs


def is_wrong(verdict, mean, versus):
    if verdict == "same":
        return abs(mean) > versus.smallest
    return verdict in ("A", "B") and (mean == 0 or (verdict == "A") != (mean < 0))


@pytest.mark.parametrize("studies", [STUDIES, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize(
    "draw", [draw if draw in QUICK_DRAWS else pytest.param(draw, marks=pytest.mark.long) for draw in DRAWS]
)
def test_a_verdict_is_wrong_in_a_tenth_of_studies_at_most(draw, truth, studies):
    mean, versus = TRUTHS[truth]
    wrong = 0
    for number in range(studies):
        rng = np.random.default_rng([number, len(draw)])
        wrong += is_wrong(last(mean + DRAWS[draw](rng), versus)[0], mean, versus)
    print(draw, truth, wrong / studies)
    assert wrong <= 0.1 * studies


SKEWED = {
    "lognormal, skewness 0.8": (lambda rng: np.exp(0.25 * rng.standard_normal(PAIRS)) - math.exp(1 / 32), 0.08),
    "lognormal, 1.75": (lambda rng: np.exp(0.5 * rng.standard_normal(PAIRS)) - math.exp(1 / 8), 0.1),
    "exponential, 2": (lambda rng: rng.exponential(size=PAIRS) - 1, 0.13),
    "lognormal, 6.2": (lambda rng: np.exp(rng.standard_normal(PAIRS)) - math.exp(1 / 2), 0.19),
}
"""Differences with a mean of 0, and the share of wrong verdicts: 5.2, 7.5, 10.6 and 16.5 % of 4,000 studies. Without
the transformation they are 7.2, 10.9, 17.6 and 27.7 %."""


@pytest.mark.parametrize("name", [*list(SKEWED)[2:], *(pytest.param(one, marks=pytest.mark.long) for one in SKEWED)])
def test_skewed_differences_with_a_mean_of_zero(name, request):
    """What one side does that now and then fails to learn: the level holds where the skewness is 2 at most."""
    studies = 800 if request.node.get_closest_marker("long") else STUDIES
    draw, most = SKEWED[name]
    wrong = sum(last(draw(np.random.default_rng(number)), DIFFERENT)[0] != "undecided" for number in range(studies))
    print(name, wrong / studies)
    assert wrong <= most * studies


def test_an_interval_that_is_made_for_one_look_is_wrong_far_more_often():
    """What the confidence sequence is for: this measure can tell."""
    wrong = 0
    for number in range(STUDIES):
        given, counts = DRAWS["normal"](np.random.default_rng(number)), range(2, PAIRS + 1)
        looked = [given[:count].mean() / given[:count].std(ddof=1) * math.sqrt(count) for count in counts]
        wrong += any(np.abs(looked) > stats.t.ppf(0.95, np.array(counts) - 1))
    assert wrong > 0.25 * STUDIES


@pytest.mark.parametrize(("effect", "most"), [(0.75, 0.55), (1.0, 0.6), (1.5, 0.75), (2.0, 0.85), (3.0, 1.0)])
def test_it_needs_fewer_pairs_than_one_look_of_the_same_power(effect, most):
    """Effects in deviations of a difference. Where as many pairs may be trained as are needed, it finds all of them,
    after 0.49, 0.53, 0.71, 0.76 and 0.96 of the pairs of one look of power 0.999, which are 41, 24, 11, 8 and 5.
    Without the transformation for skewness that is 0.44, 0.48, 0.61, 0.64 and 0.80."""
    needed = []
    for number in range(STUDIES):
        given = effect + np.random.default_rng(number).standard_normal(120)
        verdict, count = last(given, DIFFERENT)
        needed.append(count)
        assert verdict != "undecided"
    fixed = next(n for n in range(2, 100) if power(effect, n) >= 0.999)
    print(effect, np.mean(needed), fixed, np.mean(needed) / fixed)
    assert np.mean(needed) <= most * fixed


def power(effect, count):
    """Of a paired t-test at level 0.9, with one look."""
    given = np.random.default_rng(0).standard_normal((20_000, count)) + effect
    statistic = given.mean(axis=1) / given.std(axis=1, ddof=1) * math.sqrt(count)
    return float(np.mean(np.abs(statistic) > stats.t.ppf(0.95, count - 1)))


def test_a_failing_side_loses_and_failures_alone_hold_the_level():
    """Failures that come to both sides alike: the same side is called better in a tenth of studies at most."""
    wrong = 0
    for number in range(STUDIES):
        rng = np.random.default_rng(number)
        a, b = (np.where(rng.random(PAIRS) < 0.4, NAN, one) for one in seed_noise(rng, 0.5))
        given = [Pair(seed=i, a=x, b=y) for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True))]
        *_, found = comparisons(given, DIFFERENT, 1.0)
        wrong += found.verdict != "undecided"
    assert wrong <= 0.1 * STUDIES
    bad = [Pair(seed=i, a=1.0, b=NAN) for i in range(8)]
    *_, found = comparisons(bad, DIFFERENT, 1.0)
    assert (found.verdict, found.pairs, found.lost) == ("A", 6, {"A": 0, "B": 6})
    assert found.text() == "A is better (90 %, 6 pairs); B gave no number in 6 pairs and lost it"
    assert [evidence_of_losses(0, n) >= math.log(10) for n in (5, 6)] == [False, True]


@one_test(
    ("differences", "versus", "sign", "verdict", "line"),
    [
        ([-0.012, -0.011, -0.013], DIFFERENT, 1, "A", "A is better by 0.012 (0.00685 to 0.0171; 90 %, 3 pairs)"),
        ([-0.012, -0.011, -0.013], DIFFERENT, -1, "B", "B is better by 0.012 (0.00685 to 0.0171; 90 %, 3 pairs)"),
        ([0.1], DIFFERENT, 1, "undecided", "undecided after 1 pair; A less B is +0.1 (no interval yet)"),
        ([0.0, 0.0, 0.0], SAME, 1, "same", "no difference above 1 (90 %, 3 pairs); A less B is +0 (+0 to +0; 90 %)"),
        ([0.0] * 9, DIFFERENT, 1, "undecided", "undecided after 9 pairs; A less B is +0 (+0 to +0; 90 %)"),
        ([0.5, 0.2, -0.2, 0.3], DIFFERENT, 1, "undecided", "undecided after 4 pairs: about 26 would be needed; "),
        # One of the pairs says that A loses, the others that it is better: no verdict.
        ([-0.012, -0.011, -0.013, NAN], DIFFERENT, 1, "undecided", "undecided after 4 pairs; A less B is -0.012"),
    ],
)
def test_lines(differences, versus, sign, verdict, line):
    found = compare(pairs(differences), versus, sign)
    assert found.verdict == verdict
    assert found.text().startswith(line)


def test_losses_beyond_doubt_weigh_with_the_differences():
    """B is worse where it gives a number, and loses where it gives none."""
    given = [*pairs([-1.0, -1.1]), *[Pair(seed=9 + i, a=1.0, b=NAN) for i in range(4)]]
    found = compare(given, SAME, 1.0)
    assert (found.verdict, found.pairs) == ("A", 6)
    assert "B gave no number in 4 pairs and lost it" in found.text()


def test_pairs_that_say_nothing_end_a_comparison_when_they_are_the_most():
    none = Pair(seed=0, a=None, b=1.0, why="A: RESOURCE_EXHAUSTED")
    both = Pair(seed=1, a=NAN, b=NAN, why="A: the loss is nan")
    [found] = comparisons([none, both], DIFFERENT, 1.0)
    assert found.ending == "1 pair of 1 cannot be compared: A: RESOURCE_EXHAUSTED"
    *_, found = comparisons([*pairs([1.0, 2.0]), none, both], DIFFERENT, 1.0)
    assert (found.pairs, found.dropped, found.ending) == (2, 2, None)
    assert found.as_json()["low"] is None


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e9, 1e200])
def test_the_verdict_has_no_scale(scale):
    """A loss may be huge before it is no number, and differences may be of the last bits."""
    given = [Pair(seed=i, a=one * scale, b=0.0) for i, one in enumerate([1.0, 1.2, 0.9, 1.1])]
    found = compare(given, DIFFERENT, 1.0)
    assert (found.verdict, found.low / scale) == ("B", pytest.approx(0.7238, abs=1e-3))


def test_the_interval_is_what_the_evidence_does_not_reject():
    given = np.random.default_rng(3).standard_normal(7).tolist()
    _, low, high = interval(given, 0.9)
    ends = (low + 1e-6, low - 1e-6, high - 1e-6, high + 1e-6)
    found = [compare(pairs([one - end for one in given]), DIFFERENT, 1.0).verdict for end in ends]
    assert found == ["undecided", "B", "undecided", "A"]
    assert half_width(2, 0.9) == math.inf
    widths = [half_width(count, 0.9) for count in range(3, 400)]
    assert widths == sorted(widths, reverse=True)
