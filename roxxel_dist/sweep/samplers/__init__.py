"""Search methods of a sweep. `make` gives one; it needs nothing else of this package.

The next trial of a search is a function of its seed, the number of the trial, and the trials and results before:
a new engine with the same history continues as if nothing had happened.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.samplers.base import AskTell, Curve, SpaceExhausted
from roxxel_dist.sweep.space.sweep_file import Params, Sweep, as_sweep

__all__ = ["SAMPLERS", "Engine", "SpaceExhausted", "make"]
SAMPLERS = {
    "bayes": "roxxel_dist.sweep.samplers.bayes:BayesSampler",
    "tpe": "roxxel_dist.sweep.samplers.tpe:TpeSampler",
    "random": "roxxel_dist.sweep.samplers.base:RandomSampler",
    "grid": "roxxel_dist.sweep.samplers.base:GridSampler",
}
"""The `Sampler` of each method, made of a `Sweep`; imported when it is asked for."""


class Engine(Protocol):
    """Proposes trials and gets their results. Several trials may run at once."""

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial (from 0) and its parameters. Raises SpaceExhausted."""
        ...

    def tell(self, trial: int, value: float | None, curve: Curve = ()) -> None:
        """The value of a trial; None: it failed. `curve` is what it reported."""
        ...

    def point(self, trial: int) -> list[float]:
        """The point of a trial in the unit cube, for the journal."""
        ...

    def restore(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Take note of an earlier ask, from the journal."""
        ...


def make(
    sweep: Mapping[str, Any] | str | os.PathLike[str] | Sweep,
    seed: int = 0,
    method: str | None = None,
    *,
    accept: Callable[[Params], None] | None = None,
) -> Engine:
    """A search over the parameters of a sweep, by ask and tell.

        engine = make({"parameters": {"lr": {"min": 1.0e-4, "max": 1.0e-2}}}, seed=1)  # or make("sweep.yaml")
        for _ in range(20):
            trial, params = engine.ask()
            engine.tell(trial, train(**params))

    Args:
        sweep: as W&B's YAML has it: a mapping, or the path of a file.
        seed: of everything random.
        method: bayes, tpe, random or grid; None: the sweep's own.
        accept: raises ValueError for parameters that no trial can be made of; asked only of those about to be chosen.

    Returns:
        A search that nothing was asked of yet.

    Raises:
        ValueError: a mistake in the sweep, no such method, or a grid of endless values.
        ModuleNotFoundError: the method needs a package that is not installed; says which.
    """
    sweep = as_sweep(sweep)
    method = method or sweep.method
    if method not in SAMPLERS:
        raise UserError(f"method: {method!r} does not exist: use one of {', '.join(SAMPLERS)}")
    return AskTell(sweep, seed, resolve_name(SAMPLERS[method])(sweep), accept, fill=method != "grid")
