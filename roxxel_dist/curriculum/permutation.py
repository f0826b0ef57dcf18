"""Keyed bijections of [0, n): shuffling without a table.

x in [0, n) is written x = high 2^k + low, with low in [0, 2^k) and high in [0, m), where 2^k is about the square root
of n, and m = ceil(n / 2^k). Rounds change the two in turn, by a keyed function F of the other:

    high <- (high + floor(m f)) mod m,  f = F(low) as a fraction in [0, 1)
    low  <- low xor (the upper k bits of F(high))

Each round can be undone by who knows the other half, so their composition is a bijection of m 2^k pairs, whatever F is
(an unbalanced Feistel network: Luby and Rackoff, "How to construct pseudorandom permutations", 1988; Schneier and
Kelsey, "Unbalanced Feistel networks and block cipher design", 1996). m 2^k is below n + 2^k, so hardly a value leaves
[0, n); one that does is permuted again until it is back (cycle walking: Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). F multiplies and xor-shifts, which is not linear: linear rounds leave patterns on small domains.
Nothing here is cryptography. Memory and time for a value do not depend on n.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from roxxel_dist.process.exit_codes import UserError

ROUNDS, ROUNDS_IF_SMALL, SMALL = 6, 12, 64
"""A domain of few numbers takes more rounds until every order is as likely."""
NARROW = 1 << 22
"""Domains up to this size are computed in 32 bits, which is faster; larger ones need more bits of a hash."""
Key = tuple[np.unsignedinteger, np.unsignedinteger]


class Permutation:
    """A bijection of [0, n) chosen by `key`.

    Args:
        n: size of the domain, at least 1 and below 2^62.
        key: whole numbers >= 0, such as (seed, data set, pass). Different keys give unrelated orders.
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        if not 1 <= n < 1 << 62:
            raise UserError(f"a permutation of {n} numbers: n must be at least 1 and below 2^62")
        self.n = n
        low_bits = (n - 1).bit_length() // 2
        size = -(-n >> low_bits)
        self._exact = size << low_bits == n
        self._dtype = dtype = np.dtype(np.uint32 if n <= NARROW else np.uint64)
        number, width = dtype.type, 8 * dtype.itemsize
        self._odd = number(0x9E3779B97F4A7C15 >> (64 - width) | 1)
        self._fold = number(15 if width == 32 else 29)
        self._low_bits, self._low_mask = number(low_bits), number((1 << low_bits) - 1)
        self._low_shift = number(width - low_bits)
        # high's share of a hash: as many bits of it as can be multiplied by its size without going over.
        self._size, self._size_bits = number(size), number(size.bit_length())
        self._size_shift = number(width - size.bit_length())
        rounds = ROUNDS if n > SMALL else ROUNDS_IF_SMALL
        words = np.frombuffer(digest(key, 2 * rounds * dtype.itemsize), dtype.newbyteorder("<")).astype(dtype)
        # An odd multiplier is invertible, so no round loses information.
        keys = zip(words[:rounds], words[rounds:] | number(1), strict=True)
        self._rounds: list[tuple[bool, Key]] = [(number % 2 == 0, key) for number, key in enumerate(keys)]
        """Whether `high` changes, and by which key."""

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """The images of `index` (integers in [0, n), any shape), int64 of the same shape."""
        x = self._network(index.astype(self._dtype).ravel())
        if not self._exact:
            # Cycle walking: who leaves [0, n) is permuted again. It comes back, for a bijection of a finite set has
            # cycles alone, and no two come back at one place.
            outside = np.flatnonzero(x >= self.n)
            while len(outside):
                again = self._network(x[outside])
                x[outside] = again
                outside = outside[again >= self.n]
        return x.astype(np.int64).reshape(index.shape)

    def _network(self, x: np.ndarray) -> np.ndarray:
        # x = high * 2^k + low. All of it in four arrays: fresh ones would take longer than the arithmetic.
        high, low, noise, spare = x >> self._low_bits, x & self._low_mask, np.empty_like(x), np.empty_like(x)
        for changes_high, key in self._rounds:
            if not changes_high:
                # low <- low xor the upper k bits of F(high)
                self._scramble(high, key, noise, spare)
                np.right_shift(noise, self._low_shift, out=noise)
                np.bitwise_xor(low, noise, out=low)
                continue
            # high <- (high + floor(size * f)) mod size, where f in [0, 1) has the upper bits of F(low)
            self._scramble(low, key, noise, spare)
            np.right_shift(noise, self._size_bits, out=noise)
            np.multiply(noise, self._size, out=noise)
            np.right_shift(noise, self._size_shift, out=noise)
            np.add(high, noise, out=high)
            # The sum is below 2 * size. Where it is below size, the difference wraps round to something larger.
            np.subtract(high, self._size, out=spare)
            np.minimum(high, spare, out=high)
        np.left_shift(high, self._low_bits, out=high)
        return np.bitwise_or(high, low, out=high)

    def _scramble(self, x: np.ndarray, key: Key, noise: np.ndarray, spare: np.ndarray) -> None:
        """Leave a hash of `x` in `noise`; its upper bits are the good ones."""
        np.add(x, key[0], out=noise)  # arrays of unsigned integers wrap round without a warning
        np.multiply(noise, self._odd, out=noise)
        np.right_shift(noise, self._fold, out=spare)
        np.bitwise_xor(noise, spare, out=noise)
        np.multiply(noise, key[1], out=noise)


def digest(key: Sequence[int], size: int) -> bytes:
    """So many bytes that look random and follow from the key: SHAKE-128 of its decimal numbers with spaces between."""
    return hashlib.shake_128(" ".join(map(str, key)).encode()).digest(size)


def mixed(word: np.ndarray | np.unsignedinteger, number: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood, 2014): uint64 that look random, one for each number, by the key `word`."""
    x = word + number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled_blocks(first: int, count: int, length: int, key: Sequence[int]) -> np.ndarray:
    """A permutation of [0, length) for each of the blocks first, first + 1, …: int64[count, length].

    Block b's depends on (key, b) alone. For short blocks: it sorts `length` random numbers each.
    """
    block, place = np.arange(first, first + count, dtype=np.uint64)[:, None], np.arange(length, dtype=np.uint64)
    x = mixed(np.frombuffer(digest(key, 8), "<u8"), (block << np.uint64(32)) + place)
    # With its place in the lowest bits no number comes twice, and sorting is faster than asking for the order.
    bits = np.uint64((length - 1).bit_length())
    x = (x >> bits << bits) | place
    x.sort(axis=1)
    return (x & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
