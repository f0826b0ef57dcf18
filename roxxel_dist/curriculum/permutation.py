"""Keyed bijections of [0, n): shuffling without a table.

A balanced Feistel network over the smallest even number of bits that holds n, walked until the value falls below n
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function multiplies and xor-shifts, which
is not linear: linear rounds leave patterns on small domains. Memory and time for a value do not depend on n.
"""

from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S29, _S32 = np.uint64(29), np.uint64(32)


class Permutation:
    """A bijection of [0, n) chosen by `key`.

    Args:
        n: size of the domain, at least 1 and below 2^62.
        key: whole numbers >= 0, such as (seed, data set, pass). Different keys give unrelated orders.
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        if not 1 <= n < 1 << 62:
            raise ValueError(f"a permutation of {n} numbers: n must be at least 1 and below 2^62")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        half = (bits + 1) // 2
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        # An odd multiplier is invertible, so no round loses information.
        self._keys = np.random.SeedSequence(list(key)).generate_state(ROUNDS, np.uint64) | np.uint64(1)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """The images of `index` (integers in [0, n), any shape), int64 of the same shape."""
        return self._walk(index, self._forward)

    def inverse(self, image: np.ndarray) -> np.ndarray:
        """The indices whose images these are: int64 of the same shape."""
        return self._walk(image, self._backward)

    def _walk(self, index: np.ndarray, network: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        x = network(index.astype(np.uint64))
        outside = x >= self.n
        while outside.any():
            x[outside] = network(x[outside])
            outside = x >= self.n
        return x.astype(np.int64)

    def _forward(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, (left ^ _scramble(right, key)) & self._mask
        return (left << self._half) | right

    def _backward(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys[::-1]:
            left, right = (right ^ _scramble(left, key)) & self._mask, left
        return (left << self._half) | right


def _scramble(x: np.ndarray, key: np.uint64) -> np.ndarray:
    f = (x + key) * _GOLDEN  # arrays of uint64 wrap round without a warning
    f ^= f >> _S29
    f *= key
    f ^= f >> _S32
    return f


def shuffled_blocks(first: int, count: int, length: int, key: Sequence[int]) -> np.ndarray:
    """A permutation of [0, length) for each of the blocks first, first + 1, …: int64[count, length].

    Block b's depends on (key, b) alone. For short blocks: it sorts `length` random numbers each.
    """
    word = np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0]
    block = np.arange(first, first + count, dtype=np.uint64)[:, None]
    x = word + (block << _S32) + np.arange(length, dtype=np.uint64)
    for _ in range(2):  # splitmix64's finish (Steele, Lea and Flood, 2014), twice
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, axis=1, kind="stable")
