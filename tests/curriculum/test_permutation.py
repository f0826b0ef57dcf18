import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.permutation import Permutation


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_is_a_bijection(n, key):
    images = Permutation(n, key)(np.arange(n))
    assert np.array_equal(np.sort(images), np.arange(n))


@given(st.integers(2**30, 2**61), st.integers(0, 2**32))
def test_stays_inside_large_domains_and_never_repeats(n, seed):
    index = np.unique(np.random.default_rng(seed).integers(0, n, 1000))
    images = Permutation(n, [seed])(index)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(index)


@pytest.mark.parametrize("n", [2, 3, 5, 16, 100])
def test_every_place_is_equally_likely(n):
    """Chi-square of where each index lands over many keys; the limit is far out in the tail of its distribution."""
    trials = 4000
    counts = np.zeros((n, n))
    for key in range(trials):
        counts[np.arange(n), Permutation(n, [key])(np.arange(n))] += 1
    expected = trials / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_part():
    """Images of neighbours are as far apart as random pairs: no linear pattern."""
    n = 100_003
    images = Permutation(n, [1, 2])(np.arange(n)).astype(float)
    assert abs(np.abs(np.diff(images)).mean() / (n / 3) - 1) < 0.01
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.02


def test_the_key_decides():
    index = np.arange(1000)
    one, same, other = (Permutation(1000, key)(index) for key in ([1, 2], [1, 2], [2, 1]))
    assert np.array_equal(one, same)
    assert (one == other).sum() < 20


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_refuses_impossible_domains(n):
    with pytest.raises(ValueError, match="at least 1 and below 2\\^62"):
        Permutation(n, [0])
