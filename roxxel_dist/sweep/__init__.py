"""Many runs: a search space, a sampler that proposes trials, and the record of their results."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roxxel_dist.sweep.driver.recorded import replay as replay
    from roxxel_dist.sweep.samplers import make as make

__all__ = ["make", "replay"]


def __getattr__(name: str) -> Any:
    if name == "make":
        from roxxel_dist.sweep.samplers import make

        return make
    if name == "replay":
        from roxxel_dist.sweep.driver.recorded import replay

        return replay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
