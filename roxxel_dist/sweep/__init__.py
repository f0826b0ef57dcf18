"""Many runs: a search space, a sampler that proposes trials, and the record of their results."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roxxel_dist.sweep.driver.recorded import replay as replay
    from roxxel_dist.sweep.samplers import make as make

__all__ = ["make", "replay"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{__name__}.{'samplers' if name == 'make' else 'driver.recorded'}:{name}")
