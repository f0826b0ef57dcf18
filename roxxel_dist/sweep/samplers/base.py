"""Random and grid search.

What all engines share: the history of what was asked and told, and which points may become trials.

An engine is an `AskTell` with a sampler, which proposes points. Whatever that is, no configuration is run twice, and
none that breaks a rule of the sweep is run at all.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Params, Space, Sweep

Point = tuple[float, ...]
PROPOSED = 2_000
"""So many of an engine's own proposals are looked at before points at random are."""
TRIES = 2_000
"""Points at random before a space counts as used up."""
COUNTABLE = 50_000
"""A space of so many points or fewer is gone through to the last one."""
REFUSALS = 200
"""After so many configurations that `accept` refuses the engine looks elsewhere: to look at one takes a while."""


class SpaceExhausted(Exception):
    """No configuration is left that was not run; the message is for people."""


class RefusedError(ValueError):
    """No trial can be made of these parameters, whatever the sweep's own rules say."""


@dataclass(kw_only=True)
class SampledTrial:
    """A trial as an engine sees it."""

    point: Point
    params: Params
    told: bool = False
    value: float | None = None
    """Less is better, whatever the goal; None: running, or it failed."""


class TrialHistory:
    """Everything asked and told so far."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        self.sweep: Sweep = sweep
        self.seed: int = seed
        self.trials: dict[int, SampledTrial] = {}
        self.keys: set[str] = set()

    @property
    def space(self) -> Space:
        """What is searched."""
        return self.sweep.space

    @property
    def told(self) -> int:
        """How many trials have ended."""
        return sum(one.told for one in self.trials.values())

    def add(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Take note of a trial that was asked for."""
        if trial in self.trials:
            raise ValueError(f"trial {trial} was asked for already")
        if len(point) != len(self.space.free):
            raise ValueError(
                f"trial {trial} is a point of {len(point)} dimensions, and this sweep has {len(self.space.free)}: "
                "it was asked for under other parameters; start a study of its own for a changed sweep"
            )
        self.trials[trial] = SampledTrial(point=tuple(point), params=params)
        self.keys.add(config_key(params))


Sampler = Callable[[TrialHistory, int], Iterable[Sequence[float]]]
"""Points for a trial of this number, best first. A function of seed, number and history alone."""


def config_key(params: Params) -> str:
    """What two equal configurations have in common."""
    return json.dumps(params, sort_keys=True, default=repr)


def canonical(space: Space, point: Sequence[float]) -> Point:
    """The point that stands for all points with the same choices."""
    kinds = [one.distribution for one in space.free]
    return tuple(
        min(max(float(u), 0.0), 1.0) if kind.choices is None else kind.to_unit(kind.index_at(u))
        for kind, u in zip(kinds, point, strict=True)
    )


def rng_for(seed: int, trial: int, purpose: str) -> random.Random:
    """Random numbers that depend on these alone, on every machine."""
    return random.Random(f"{seed}/{trial}/{purpose}")


@lru_cache(maxsize=1)
def _threads() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def one_thread() -> AbstractContextManager[Any]:
    """Matrices this small are faster without the threads of the linear algebra, and those spin while they wait."""
    return _threads().limit(limits=1, user_api="blas")


@contextmanager
def packages(method: str, package: str) -> Iterator[None]:
    """Says what to install where an import inside fails."""
    try:
        yield
    except ImportError as error:
        raise ModuleNotFoundError(
            f"method {method} needs a package that is not installed: pip install '{package}' ({error})"
        ) from error


class AskTell:
    """An engine: see `roxxel_dist.sweep.samplers.Engine`.

    Args:
        sweep: what is searched, and its rules.
        seed: of everything random.
        propose: where to look next.
        accept: raises ValueError for parameters of which no trial can be made.
        fill: whether other points are tried where `propose` has none that can be run.
    """

    def __init__(
        self,
        sweep: Sweep,
        seed: int,
        propose: Sampler,
        accept: Callable[[Params], None] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        self._history = TrialHistory(sweep, seed)
        self._propose, self._accept, self._fill = propose, accept, fill
        self._refused: dict[str, str] = {}
        self._refusal = ""

    def ask(self) -> tuple[int, Params]:
        """The next trial and its parameters: derived ones in, those whose condition does not hold out.

        Raises:
            SpaceExhausted: no configuration is left that was not run and keeps the rules.
        """
        trial = max(self._history.trials, default=-1) + 1
        refused: set[str] = set()
        for points, limit in self._sources(trial):
            if self._history.trials:
                refused.clear()
            for point in points:
                place, name = canonical(self._history.space, point), ""
                try:
                    params = self._history.sweep.rules.resolve(self._history.space.point(place))
                    if (name := config_key(params)) in self._history.keys:
                        continue
                    self._check(name, params)
                    self._history.add(trial, params, place)
                    return trial, params
                except InfeasibleError as error:
                    self._refusal = str(error)
                except RefusedError as error:
                    self._refusal = str(error)
                    refused.add(name)
                    if len(refused) == limit:
                        break
            if len(refused) == limit and not self._history.trials:
                raise SpaceExhausted(f"{limit} configurations were looked at, and none can be run: {self._refusal}")
        raise SpaceExhausted(self._ending())

    def tell(self, trial: int, value: float | None) -> None:
        """What a trial gave; None, or a value that is no finite number: it failed."""
        if trial not in self._history.trials:
            raise ValueError(f"trial {trial} was never asked for")
        one = self._history.trials[trial]
        if one.told:
            raise ValueError(f"trial {trial} was told already")
        one.told = True
        if value is not None and math.isfinite(value):
            one.value = self._history.sweep.sign * float(value)

    def point(self, trial: int) -> list[float]:
        """Where in the unit cube a trial is: one number a free parameter."""
        return list(self._history.trials[trial].point)

    def restore(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """An earlier `ask`, from the journal of a study."""
        self._history.add(trial, params, point)

    def _check(self, name: str, params: Params) -> None:
        if self._accept is None:
            return
        if name not in self._refused:
            try:
                self._accept(params)
            except ValueError as error:
                self._refused[name] = str(error)
        if name in self._refused:
            raise RefusedError(self._refused[name])

    def _sources(self, trial: int) -> Iterator[tuple[Iterable[Sequence[float]], int | None]]:
        """Where to look, and how many refusals to take there: where the engine says, then anywhere, then everywhere.

        The points of a grid, and those of a small space in which trials were run, are all looked at.
        """
        proposed = self._propose(self._history, trial)
        if not self._fill:
            yield proposed, None
            return
        yield islice(proposed, PROPOSED), REFUSALS
        space, rng = self._history.space, rng_for(self._history.seed, trial, "fill")
        small = space.size is not None and space.size <= COUNTABLE
        tries = min(space.size or 0, 100) if small else TRIES
        yield ([rng.random() for _ in space.free] for _ in range(tries)), REFUSALS
        if small:
            everything = list(space.grid())
            rng.shuffle(everything)
            yield everything, None if self._history.trials else REFUSALS

    def _ending(self) -> str:
        size, count = self._history.space.size, len(self._history.trials)
        if not count:
            return f"there is no configuration that can be run: {self._refusal}"
        if size is not None and (size <= COUNTABLE or not self._fill):
            kept = f" that can be run, of {size} in all" if self._refusal else ""
            return f"the space is used up: all {count} configurations{kept} were run"
        why = f": {self._refusal}" if self._refusal else ""
        return f"the space looks used up: {count} configurations were run, and random tries found no other{why}"


def RandomSampler(sweep: Sweep) -> Sampler:
    """Every parameter by itself, as its distribution says."""
    width = len(sweep.space.free)

    def points(history: TrialHistory, trial: int) -> Iterator[list[float]]:
        rng = rng_for(history.seed, trial, "random")
        while True:
            yield [rng.random() for _ in range(width)]

    return points


def GridSampler(sweep: Sweep) -> Sampler:
    """The points of a grid, one after the other. Raises ValueError where they are endless."""
    next(sweep.space.grid())
    points = sweep.space.grid()  # gone through once: what was passed was run, or can never be
    return lambda history, trial: points
