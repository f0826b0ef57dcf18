import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.permutation import Permutation, shuffled_blocks


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_is_a_bijection(n, key):
    order = Permutation(n, key)
    images = order(np.arange(n))
    assert np.array_equal(np.sort(images), np.arange(n))


@given(st.integers(2**30, 2**61), st.integers(0, 2**32))
def test_stays_inside_large_domains_and_never_repeats(n, seed):
    index = np.unique(np.random.default_rng(seed).integers(0, n, 1000))
    order = Permutation(n, [seed])
    images = order(index)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(index)


@pytest.mark.parametrize("n", [pytest.param(2**22, marks=pytest.mark.long), 2**22 + 1])
def test_is_a_bijection_where_the_arithmetic_grows_wider(n):
    images = Permutation(n, [5])(np.arange(n))
    assert np.bincount(images, minlength=n).max() == 1


SIZES = [3, 7, 65, *(pytest.param(n, marks=pytest.mark.long) for n in (5, 16, 100))]
"""Of more than 64 there are half as many rounds."""


@pytest.mark.parametrize("trials", [1000, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("n", [2, *SIZES])
def test_every_place_is_equally_likely(n, trials):
    """Chi-square of where each index lands over many keys; the limit is far out in the tail of its distribution."""
    counts = np.zeros((n, n))
    for key in range(trials):
        counts[np.arange(n), Permutation(n, [key])(np.arange(n))] += 1
    expected = trials / n
    # A permutation hits every row and column once, so the cells vary a little more than independent ones would.
    chi2 = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("trials", [2000, pytest.param(8000, marks=pytest.mark.long)])
@pytest.mark.parametrize("n", SIZES)
def test_two_neighbours_land_on_every_pair_of_places(n, trials):
    counts = np.zeros((n, n))
    for key in range(trials):
        counts[tuple(Permutation(n, [key, n])(np.arange(2)))] += 1
    assert not counts.diagonal().any()
    pairs = n * (n - 1)
    chi2 = ((counts - trials / pairs) ** 2 / (trials / pairs))[~np.eye(n, dtype=bool)].sum()
    assert chi2 < pairs - 1 + 6 * np.sqrt(2 * (pairs - 1))


def test_neighbours_part():
    """Images of neighbours are as far apart as random pairs: no linear pattern."""
    n = 100_003
    images = Permutation(n, [1, 2])(np.arange(n)).astype(float)
    assert abs(np.abs(np.diff(images)).mean() / (n / 3) - 1) < 0.01
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.02


@pytest.mark.parametrize("n", [65_280, 5_000_000])
def test_images_of_a_stretch_are_spread_evenly(n):
    """What a few batches read comes from everywhere: chi-square over 64 parts of the domain, for many stretches."""
    found = []
    for stretch in range(100):
        images = Permutation(n, [stretch % 10])(np.arange(4096) + 4096 * (stretch % 15))
        counts = np.bincount(images * 64 // n, minlength=64)
        found.append(((counts - 64) ** 2 / 64).sum() / (1 - 4096 / n))
    assert abs(np.mean(found) - 63) < 6 * np.sqrt(2 * 63 / 100)
    assert max(found) < 63 + 6 * np.sqrt(2 * 63)


def test_the_key_decides():
    index = np.arange(1000)
    one, same, other = (Permutation(1000, key)(index) for key in ([1, 2], [1, 2], [2, 1]))
    assert np.array_equal(one, same)
    assert (one == other).sum() < 20


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_refuses_impossible_domains(n):
    with pytest.raises(ValueError, match="at least 1 and below 2\\^62"):
        Permutation(n, [0])


@given(st.integers(0, 2**40), st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**70))
def test_blocks_are_shuffled_each_for_itself(first, count, length, key):
    blocks = shuffled_blocks(first, count, length, (key, 3))
    assert np.array_equal(np.sort(blocks, axis=1), np.tile(np.arange(length), (count, 1)))
    assert np.array_equal(blocks[-1:], shuffled_blocks(first + count - 1, 1, length, (key, 3)))


def test_places_in_blocks_are_equally_likely():
    n, trials = 64, 4000
    blocks, counts = shuffled_blocks(7, trials, n, (1,)), np.zeros((n, n))
    for place in range(n):
        counts[place] = np.bincount(blocks[:, place], minlength=n)
    chi2 = ((counts - trials / n) ** 2 / (trials / n)).sum() * (n - 1) / n
    assert abs(chi2 - (n - 1) ** 2) < 6 * np.sqrt(2) * (n - 1)


# -- curriculum/README.md gives the order as a formula: here it is in plain numbers


def shake(key, words, width):
    data = hashlib.shake_128(" ".join(map(str, key)).encode()).digest(words * width // 8)
    return [int.from_bytes(data[i : i + width // 8], "little") for i in range(0, len(data), width // 8)]


def image(n, key, x):
    k = (n - 1).bit_length() // 2
    size = -(-n // 2**k)
    width, golden, s = (32, 0x9E3779B9, 15) if n <= 2**22 else (64, 0x9E3779B97F4A7C15, 29)
    rounds = 6 if n > 64 else 12
    words = shake(key, 2 * rounds, width)

    def h(value, number):
        t = (value + words[number]) * golden % 2**width
        return (t ^ (t >> s)) * (words[rounds + number] | 1) % 2**width

    while True:
        high, low = divmod(x, 2**k)
        for number in range(rounds):
            if number % 2:
                low ^= h(high, number) >> (width - k)
            else:
                e = size.bit_length()
                high = (high + ((h(low, number) >> e) * size >> (width - e))) % size
        x = high * 2**k + low
        if x < n:
            return x


@given(
    st.integers(1, 2**41) | st.integers(1, 200) | st.integers(2**22 - 5, 2**22 + 5), st.integers(0, 2**70), st.data()
)
def test_is_the_formula_of_the_documentation(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    assert Permutation(n, (key, 7))(np.array(index)).tolist() == [image(n, (key, 7), x) for x in index]


@pytest.mark.parametrize(("block", "length"), [(0, 64), (5, 100), (2**33, 3)])
def test_blocks_are_the_formula_of_the_documentation(block, length):
    (word,), found = shake((3, 4), 1, 64), []
    for place in range(length):
        x = (word + (block * 2**32 + place) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        bits = (length - 1).bit_length()
        found.append((x ^ (x >> 31)) >> bits << bits | place)
    expected = [x % 2 ** (length - 1).bit_length() for x in sorted(found)]
    assert shuffled_blocks(block, 1, length, (3, 4))[0].tolist() == expected
