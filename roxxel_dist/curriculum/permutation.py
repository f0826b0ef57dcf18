"""Keyed bijections of [0, n): shuffling without a table (`Permutation`), and the order of a pass (`SpreadOrder`).

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
from functools import lru_cache

import numpy as np

from roxxel_dist.process.exit_codes import UserError

ROUNDS, ROUNDS_IF_SMALL, SMALL = 6, 12, 64
"""A domain of few numbers takes more rounds until every order is as likely."""
NARROW = 1 << 22
"""Domains up to this size are computed in 32 bits, which is faster; larger ones need more bits of a hash."""
STRATA_BITS, UNITS_A_STRATUM_BITS = 8, 4
"""There are at most 2^8 strata, of at least 2^4 units each (one stratum, if there are fewer units)."""
BLOCKS_TOGETHER = 4
Key = tuple[np.unsignedinteger, np.unsignedinteger]


class Permutation:
    """A bijection of [0, n), n from 1 to 2^62 - 1, chosen by `key`: whole numbers >= 0, such as (seed, data set, pass).
    Different keys give unrelated orders."""

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


def splitmix64(word: np.ndarray | np.unsignedinteger, number: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): a uint64 for each number, by the key `word`."""
    x = word + number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled_blocks(first: int, count: int, length: int, key: Sequence[int]) -> np.ndarray:
    """A permutation of [0, length) for each of the blocks first, first + 1, …: int64[count, length]. Block b's depends
    on (key, b) alone. For short blocks: it sorts `length` random numbers each."""
    block, place = np.arange(first, first + count, dtype=np.uint64)[:, None], np.arange(length, dtype=np.uint64)
    x = splitmix64(np.frombuffer(digest(key, 8), "<u8"), (block << np.uint64(32)) + place)
    # With its place in the lowest bits no number comes twice, and sorting is faster than asking for the order.
    bits = np.uint64((length - 1).bit_length())
    x = (x >> bits << bits) | place
    x.sort(axis=1)
    return (x & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


class SpreadOrder:
    """A bijection of [0, n) chosen by `key`, from places in the order of a pass to units, every stretch of it spread.

    The n units are cut in S strata of neighbours (stratified sampling), all of one size or one more. The order visits
    them round after round. In round t, place s is of the stratum `reversed(s) xor mask(t)`, where `reversed` turns the
    bits of s around (the sequence of van der Corput, 1935; the mask is a digital shift, as in randomised
    quasi-Monte Carlo): each 2^b places of a round that begin at a multiple of 2^b are of 2^b different parts of the
    data set. So the count of a part of share p in any k places is within a few units of p k, where k draws at random
    miss it by about sqrt(k p (1 - p)).

    Within a stratum, units that are neighbours on disk form blocks, and a few blocks at a time are shuffled: a long run
    reads S x BLOCKS_TOGETHER stretches of the data set at a time, not all of it. n is at most 2^50, and `block` the
    number of neighbouring units that are read at about the same time.
    """

    def __init__(self, n: int, key: Sequence[int], block: int) -> None:
        self.n = n
        bits = max(0, min(STRATA_BITS, n.bit_length() - 1 - UNITS_A_STRATUM_BITS))
        self._strata = 1 << bits
        edges = np.arange(self._strata + 1, dtype=np.int64) * n // self._strata
        self._first, self._size = edges[:-1], np.diff(edges)
        self._rounds: int = n // self._strata
        words = np.frombuffer(digest((*key, 2, 0), 8 * (self._strata + 1)), "<u8")
        self._word = words[0]
        # Each stratum is turned by a number of its own, or all would be read at the same place.
        self._turned = (words[1:] % self._size.astype(np.uint64)).astype(np.int64)
        self._longer = np.flatnonzero(self._size > self._rounds)
        places = range(self._strata)
        self._reversed = np.array([int(f"{place:0{bits}b}"[::-1], 2) for place in places], np.int64)
        self._inside = _BlockOrder(self._rounds, key, block)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """The units at these places (integers in [0, n), any shape): int64 of the same shape."""
        turn, slot = np.divmod(index.astype(np.int64).ravel(), self._strata)
        mask = splitmix64(self._word, turn) & np.uint64(self._strata - 1)  # a number for each round
        stratum, place = self._reversed[slot] ^ mask.astype(np.int64), turn
        is_last = turn == self._rounds  # the round of the strata that have one unit more
        if is_last.any():
            stratum[is_last] = self._longer[slot[is_last]]
        place[~is_last] = self._inside(turn[~is_last])
        unit = self._first[stratum] + (place + self._turned[stratum]) % self._size[stratum]
        return unit.reshape(index.shape)


class _BlockOrder:
    """A bijection of [0, n) that shuffles blocks of neighbours, and then all numbers of a few blocks at a time. Numbers
    that fill no block are shuffled together with the last blocks."""

    def __init__(self, n: int, key: Sequence[int], block: int) -> None:
        self._n, self._key, self._block = n, tuple(key), block
        self._blocks: int = n // block
        self._windows: int = max(1, self._blocks // BLOCKS_TOGETHER)
        self._width: int = BLOCKS_TOGETHER * block
        """Numbers of a window; the last one has the rest too."""

    def __call__(self, index: np.ndarray) -> np.ndarray:
        if self._windows == 1:
            return self._shuffle(0)(index)
        result, window = np.empty_like(index), np.minimum(index // self._width, self._windows - 1)
        for number in np.unique(window).tolist():
            here = window == number
            result[here] = self._shuffle(number)(index[here] - number * self._width)
        place, inside = np.divmod(result, self._block)
        place += window * BLOCKS_TOGETHER
        in_block = place < self._blocks
        place[in_block] = _permutation(self._blocks, (*self._key, 3, 0))(place[in_block])
        return place * self._block + inside

    def _shuffle(self, window: int) -> Permutation:
        size = self._width if window < self._windows - 1 else self._n - window * self._width
        return _permutation(size, (*self._key, 4, window))


# Chunks that follow each other are of the same window.
@lru_cache(maxsize=256)
def _permutation(n: int, key: tuple[int, ...]) -> Permutation:
    return Permutation(n, key)
