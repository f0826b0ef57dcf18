"""Shares on a simplex: uniform where they are drawn, exact in their sums, and never outside floors and caps."""

import math
import re

import numpy as np
import pytest
from scipy import stats
from tables import one_test

from roxxel_dist.sweep.space.mixture import RARE, MixtureSpace, mixture_space, nearest_by_kl, round_shares

BOUNDS = {
    "two": ([0, 0], [1, 1]),
    "three": ([0, 0, 0], [1, 1, 1]),
    "a floor and a cap": ([0.2, 0, 0], [1, 1, 0.3]),
    "caps that bind": ([0] * 5, [0.25, 0.25, 0.25, 0.3, 0.3]),
    "a narrow one": ([0.1, 0, 0, 0], [0.9, 0.02, 0.5, 1]),
    "six of six sizes": ([0] * 6, [1, 0.4, 0.3, 0.2, 0.1, 0.05]),
    "eight": ([0] * 8, [1] * 8),
}


def made(name: str, **more: object) -> MixtureSpace:
    floors, caps = BOUNDS[name]
    return mixture_space([1], [f"set{number}" for number in range(len(floors))], floors, caps, **more)  # pyright: ignore


def drawn(space: MixtureSpace, count: int, rng: np.random.Generator) -> np.ndarray:
    """Shares that are uniform by definition: of the simplex over the floors, those under the caps."""
    found = np.empty((0, len(space.names)))
    for _ in range(200):
        more = space.floors + (1 - space.floors.sum()) * rng.dirichlet(np.ones(len(space.names)), 50_000)
        found = np.concatenate([found, more[(more <= space.caps).all(1)]])
        if len(found) >= count:
            return found[:count]
    raise AssertionError("too few of the simplex are under the caps")


@pytest.mark.parametrize("name", BOUNDS)
def test_samples_are_uniform_over_what_is_allowed(name: str) -> None:
    space, rng, count = made(name), np.random.default_rng(5), 4000
    shares, exact = space.from_cube(rng.random((count, space.axes))), drawn(space, count, rng)
    # Along axes, and along sums and products of two: 14 tests or more, so a small level for each.
    for i in range(len(space.names)):
        j = (i + 1) % len(space.names)
        (a, b), (x, y) = shares[:, [i, j]].T, exact[:, [i, j]].T
        for found, known in ((a, x), (a + 0.5 * b, x + 0.5 * y), (a * b, x * y)):
            assert stats.ks_2samp(found, known).pvalue > 1e-4
    # A test that can tell: numbers of a cube that are normalised are not uniform.
    if name != "two":
        wrong = rng.random((count, len(space.names))) * (space.caps - space.floors)
        wrong = space.floors + wrong / wrong.sum(1, keepdims=True) * (1 - space.floors.sum())
        assert min(stats.ks_2samp(wrong[:, i], exact[:, i]).pvalue for i in range(len(space.names))) < 1e-4


def test_two_hundred_data_sets_are_not_too_many() -> None:
    """The density of their sum is beyond any float, but for a factor."""
    space, rng = mixture_space([1], [f"set{number}" for number in range(200)]), np.random.default_rng(7)
    cube = rng.random((500, space.axes))
    shares = space.from_cube(cube)
    assert np.abs(shares.sum(1) - 1).max() < 1e-12
    assert all(space.allows(space.shares(row)) for row in cube[:20])
    exact = rng.dirichlet(np.ones(200), 500)
    for number in (0, 77, 199):
        assert stats.ks_2samp(shares[:, number], exact[:, number]).pvalue > 1e-4
    assert np.allclose(space.from_cube(np.stack([space.to_cube(row) for row in shares[:20]])), shares[:20], atol=1e-4)


@one_test("name", BOUNDS)
def test_no_corner_is_favoured(name: str) -> None:
    """Where all data sets have the same bounds, each is as often the largest as any other."""
    space, rng = made(name), np.random.default_rng(6)
    if len({*zip(space.floors, space.caps, strict=True)}) > 1:
        return
    largest = space.from_cube(rng.random((6000, space.axes))).argmax(1)
    assert stats.chisquare(np.bincount(largest, minlength=len(space.names))).pvalue > 1e-3


@pytest.mark.parametrize("name", BOUNDS)
def test_points_and_shares_are_each_others_inverse(name: str) -> None:
    space, rng = made(name), np.random.default_rng(7)
    points = np.concatenate([rng.random((200, space.axes)), rng.integers(0, 2, (50, space.axes))])
    shares = space.from_cube(points)
    assert np.abs(shares.sum(1) - 1).max() < 1e-12
    assert all(space.allows(row) for row in shares)
    inside = np.array([space.to_cube(row) for row in shares[:200]])
    assert np.abs(inside - points[:200]).max() < 1e-6
    again = np.array([space.from_cube(space.to_cube(row)[None])[0] for row in shares])
    assert np.abs(again - shares).max() < 1e-4


@one_test("name", BOUNDS)
def test_the_shares_of_a_trial_have_six_decimals_and_keep_every_bound(name: str) -> None:
    space, rng = made(name), np.random.default_rng(8)
    points = np.concatenate([rng.random((100, space.axes)), rng.integers(0, 2, (20, space.axes))])
    for shares in [*(space.shares(point) for point in points), space.natural, space.uniform]:
        assert space.allows(shares)
        assert abs(math.fsum(shares) - 1) < 1e-12
        assert all(share == 0 or share >= 1e-4 for share in shares)  # what a phase takes
        assert all(float(f"{share:.6f}") == share for share in shares)


def test_a_share_that_is_too_small_for_a_phase_is_none() -> None:
    floors, caps = np.zeros(3), np.array([1.0, 1.0, 1e-3])
    assert round_shares(np.array([0.59996, 0.4, 0.00004]), floors, caps).tolist() == [0.6, 0.4, 0.0]
    assert round_shares(np.array([0.59993, 0.4, 0.00007]), floors, caps).tolist() == [0.5999, 0.4, 0.0001]
    space = mixture_space([1], ["a", "b", "c"], caps=[1, 1, 5e-5])
    assert space.caps.tolist() == [1, 1, 0]
    assert space.sample(np.random.default_rng(0))[2] == 0


def test_natural_shares_move_as_little_as_they_must() -> None:
    space = mixture_space([2, 3], ["self", "code", "math"], [0.2, 0, 0], [1, 1, 0.3], tokens=[100, 400, 500])
    assert space.keys == ("mixture.2.self", "mixture.2.code", "mixture.2.math")
    assert np.allclose(space.natural, [0.2, 0.5, 0.3], atol=2e-6)
    assert np.allclose(space.uniform, [0.35, 0.35, 0.3], atol=2e-6)

    def kl(shares: np.ndarray) -> float:
        known = np.array([0.1, 0.4, 0.5])
        return float((shares * np.log(np.maximum(shares, 1e-12) / known)).sum())

    rng = np.random.default_rng(3)
    assert all(kl(space.sample(rng)) >= kl(space.natural) - 1e-5 for _ in range(500))
    allowed = np.array([0.1, 0.4, 0.5])
    assert np.allclose(nearest_by_kl(allowed, np.zeros(3), np.ones(3)), allowed)


def test_log_ratios_keep_distances_and_know_zero() -> None:
    space, rng = made("three"), np.random.default_rng(4)
    shares = space.from_cube(rng.random((50, 2)))
    logs = np.log(shares + RARE)
    centred = logs - logs.mean(1, keepdims=True)
    found = space.log_ratios(shares)
    assert found.shape == (50, 2)
    for i in range(0, 50, 7):  # an isometry: distances are those of the centred logarithms (Aitchison)
        apart = np.linalg.norm(centred - centred[i], axis=1)
        assert np.allclose(np.linalg.norm(found - found[i], axis=1), apart)
    assert np.isfinite(space.log_ratios(np.array([1.0, 0.0, 0.0]))).all()


@pytest.mark.parametrize("name", BOUNDS)
def test_log_ratios_go_back_to_the_nearest_shares(name: str) -> None:
    space, rng = made(name), np.random.default_rng(4)
    for shares in space.from_cube(rng.random((30, space.axes))):
        back = space.from_log_ratios(space.log_ratios(shares))
        assert space.allows(back)
        assert np.abs(back - shares).max() < 1e-3
    for ratios in rng.normal(0, 4, (30, space.axes)):  # anywhere else
        assert space.allows(space.from_log_ratios(ratios))
    low, width = space.ratio_span
    assert (space.log_ratios(space.natural) >= low - 0.5 * width).all()


def test_a_lattice_has_every_multiple_within_the_bounds_once() -> None:
    space = made("a floor and a cap", step=0.1)
    expected = {
        (a, b, 10 - a - b) for a in range(2, 11) for b in range(11) if 0 <= 10 - a - b <= 3
    }  # a >= 0.2, c <= 0.3
    assert {tuple(np.round(row * 10).astype(int).tolist()) for row in space.lattice} == expected
    assert len(space.lattice) == len(expected)
    assert space.lattice[:2].tolist() == [[0.2, 0.5, 0.3], [0.2, 0.6, 0.2]]
    rng = np.random.default_rng(1)
    assert all(space.shares(rng.random(2)).tolist() in space.lattice.tolist() for _ in range(50))
    for row in space.lattice:  # each can be reached
        assert np.allclose(space.shares(space.to_cube(row)), row)


@pytest.mark.parametrize(
    ("floors", "caps", "step", "said"),
    [
        ([0.5, 0.5], [1, 1], None, "there is one mixture only (a 0.5, b 0.5)"),
        ([0, 0], [0.5, 0.5], None, "there is one mixture only (a 0.5, b 0.5)"),
        ([0, 0], [1, 1], 1e-7, "step: 1e-07 must be 1 over a whole number from 2 to 1,000"),
        ([0, 0], [1, 1], 0.3, "step: 0.3 must be 1 over a whole number"),
        ([0.31, 0], [0.39, 1], 0.5, "no multiples of 0.5 sum to 1 within a 0.31 to 0.39, b 0.61 to 0.69"),
    ],
)
def test_what_leaves_nothing_to_search(floors: list[float], caps: list[float], step: float | None, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        mixture_space([1], ["a", "b"], floors, caps, step=step)


def test_a_lattice_that_is_too_fine() -> None:
    with pytest.raises(ValueError, match="176,851 mixtures are multiples"):
        mixture_space([1], ["a", "b", "c", "d"], step=0.01)
