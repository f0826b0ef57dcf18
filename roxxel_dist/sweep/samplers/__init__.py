"""Engines: what asks for trials. `make` gives one; it needs nothing else of this package.

    engine = make({"parameters": {"lr": {"min": 1.0e-4, "max": 1.0e-2}}})
    trial, params = engine.ask()
    engine.tell(trial, train(**params))

What an engine asks for next is a function of its seed, the number of the trial, and what was asked and told before:
made anew and given the same history, it goes on as if nothing had happened.
"""

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from roxxel_dist.sweep.samplers.base import AskTell, SpaceExhausted
from roxxel_dist.sweep.space.sweep_file import Params, Sweep, sweep_of

__all__ = ["SAMPLERS", "Engine", "SpaceExhausted", "make"]
SAMPLERS = {
    "bayes": "roxxel_dist.sweep.samplers.bayes:BayesSampler",
    "random": "roxxel_dist.sweep.samplers.base:RandomSampler",
    "grid": "roxxel_dist.sweep.samplers.base:GridSampler",
    "tpe": "roxxel_dist.sweep.samplers.tpe:TpeSampler",
    "wandb": "roxxel_dist.sweep.samplers.wandb_engine:WandbSampler",
}
"""What makes the `Sampler` of a sweep, by the name of its method; imported when it is asked for."""


class Engine(Protocol):
    """Asks for trials and is told what they gave. Several may run at once."""

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial (from 0) and its parameters. Raises SpaceExhausted."""
        ...

    def tell(self, trial: int, value: float | None) -> None:
        """What a trial gave; None: it failed."""
        ...

    def point(self, trial: int) -> list[float]:
        """Where a trial is in the unit cube, for the journal."""
        ...

    def restore(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Take note of an earlier ask, from the journal."""
        ...


def make(
    sweep: Mapping[str, Any] | Sweep,
    seed: int = 0,
    method: str | None = None,
    *,
    accept: Callable[[Params], None] | None = None,
) -> Engine:
    """An engine for a sweep.

    Args:
        sweep: as W&B's YAML has it, or read already.
        seed: of everything random.
        method: one of SAMPLERS; None: the sweep's own.
        accept: raises ValueError for parameters that no trial can be made of; asked only of those about to be chosen.

    Returns:
        An engine that nothing was asked of yet.

    Raises:
        ValueError: no such method, or a grid of endless values.
        ModuleNotFoundError: the method needs a package that is not installed; says which.
    """
    sweep = sweep if isinstance(sweep, Sweep) else sweep_of(sweep)
    method = method or sweep.method
    if method not in SAMPLERS:
        raise ValueError(f"method: {method!r} is none: there are {', '.join(SAMPLERS)}")
    sampler = resolve_name(SAMPLERS[method])(sweep)
    return AskTell(sweep, seed, sampler, accept, fill=method != "grid")
