"""Another name of `roxxel_dist.sweep.make`."""

from roxxel_dist.sweep.samplers import make

__all__ = ["make"]
