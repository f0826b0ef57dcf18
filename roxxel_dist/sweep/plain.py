"""Random and grid search."""

from collections.abc import Iterator

from roxxel_dist.sweep.search import Proposer, Record, generator
from roxxel_dist.sweep.space import Sweep


def at_random(sweep: Sweep) -> Proposer:
    """Every parameter by itself, as its distribution says."""
    width = len(sweep.space.free)

    def points(record: Record, trial: int) -> Iterator[list[float]]:
        chance = generator(record.seed, trial, "random")
        while True:
            yield [chance.random() for _ in range(width)]

    return points


def in_order(sweep: Sweep) -> Proposer:
    """The points of a grid, one after the other. Raises ValueError where they are endless."""
    next(sweep.space.grid())
    points = sweep.space.grid()  # gone through once: what was passed was run, or can never be
    return lambda record, trial: points
