"""Random and grid search."""

from collections.abc import Iterator

from roxxel_dist.sweep.search import Proposer, Record, generator
from roxxel_dist.sweep.space import Space


def at_random(record: Record, trial: int) -> Iterator[list[float]]:
    """Every parameter by itself, as its distribution says."""
    chance = generator(record.seed, trial, "random")
    while True:
        yield [chance.random() for _ in record.space.free]


def in_order(space: Space) -> Proposer:
    """The points of a grid, one after the other. Raises ValueError where they are endless."""
    next(space.grid())
    points = space.grid()  # gone through once: what was passed was run, or can never be
    return lambda record, trial: points
