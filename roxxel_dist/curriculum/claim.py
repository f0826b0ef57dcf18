"""What a stretch of steps reads of one data set: units of a pass, and their windows in a keyed order."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from roxxel_dist.curriculum.permutation import Permutation
from roxxel_dist.curriculum.pool import Pool
from roxxel_dist.data.units import Units

# What an order is of: part of its key, so that two orders never share one.
OF_UNITS, OF_WINDOWS, OF_BLEND = 0, 1, 2
MOST_CHUNK, LEAST_CHUNK, CHUNKS = 256, 16, 8


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set as the plan sees it."""

    name: str
    units: Units

    @cached_property
    def key(self) -> int:
        """A number that stands for the name in keys, whatever other data sets there are."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

    def beginning(self, seed: int, pass_index: int) -> "Position":
        """Before the first token of a pass."""
        return Position(
            pass_index=pass_index, pool=Pool.first(self.units.count, (seed, self.key, pass_index, OF_UNITS))
        )

    @property
    def chunk(self) -> int:
        """Units whose windows are shuffled together; an amendment gives up at most the rest of one chunk."""
        return max(LEAST_CHUNK, min(MOST_CHUNK, self.units.count // CHUNKS))


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a data set has been read."""

    pass_index: int
    pool: Pool
    used: int = 0
    """Units given out in this pass."""
    out: bool = False
    """It had too little left for a batch, and waits until all are used up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What a segment reads of one data set: the units [position.used, position.used + units) of its pass."""

    source: Source
    position: Position
    units: int
    seq_len: int
    key: tuple[int, ...]
    """(seed, data set, pass, amendments before)."""

    @property
    def per_unit(self) -> int:
        """Windows of a unit."""
        return self.source.units.size // self.seq_len

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop), counted in the order they are read in."""
        windows_a_chunk = self.source.chunk * self.per_unit
        parts = []
        while first < stop:
            number, inside = divmod(first, windows_a_chunk)
            count = min(stop - first, windows_a_chunk - inside)
            parts.append(_chunk(self, number).offsets(inside, inside + count))
            first += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def units_after(self, windows: int) -> int:
        """Units of the pass that are given out once so many windows of the claim are read, whole chunks."""
        chunks = -(-windows // (self.source.chunk * self.per_unit))
        return self.position.used + min(self.units, chunks * self.source.chunk)

    def moved(self, position: Position) -> "Claim":
        """The same of another pass."""
        seed, name, _, *others = self.key
        return replace(self, position=position, key=(seed, name, position.pass_index, *others))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Units of a claim whose windows are shuffled together."""

    order: Permutation
    """Of the windows of all its units."""
    starts: np.ndarray
    """int64: the first token of each unit."""
    per_unit: int
    seq_len: int

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """int64[stop - first]: the first tokens of the windows [first, stop) of the order."""
        window = self.order(np.arange(first, stop))
        unit = window // self.per_unit
        window -= unit * self.per_unit
        window *= self.seq_len
        window += self.starts[unit]
        return window


# Steps that follow each other read from the same chunk: its order and its units are found once.
@lru_cache(maxsize=64)
def _chunk(claim: Claim, number: int) -> Chunk:
    first = number * claim.source.chunk
    size = min(claim.source.chunk, claim.units - first)
    at = claim.position.used + first
    units = claim.position.pool.units(np.arange(at, at + size))
    order = Permutation(size * claim.per_unit, (*claim.key, OF_WINDOWS, at))
    return Chunk(order=order, starts=claim.source.units.start(units), per_unit=claim.per_unit, seq_len=claim.seq_len)
