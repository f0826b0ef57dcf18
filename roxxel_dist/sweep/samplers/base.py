"""Random and grid search.

What all engines share: the record of what was asked and told, and which points may become trials.

An engine is a `Search` with a way to propose points. Whatever it proposes, no configuration is run twice, and none that
breaks a rule of the sweep is run at all.
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


class UsedUp(Exception):
    """No configuration is left that was not run; the message is for people."""


class RefusedError(ValueError):
    """No trial can be made of these parameters, whatever the sweep's own rules say."""


@dataclass(kw_only=True)
class Asked:
    """A trial as an engine sees it."""

    point: Point
    params: Params
    told: bool = False
    value: float | None = None
    """Less is better, whatever the goal; None: running, or it failed."""


class Record:
    """Everything asked and told so far."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        self.sweep: Sweep = sweep
        self.seed: int = seed
        self.trials: dict[int, Asked] = {}
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
        self.trials[trial] = Asked(point=tuple(point), params=params)
        self.keys.add(key(params))


Proposer = Callable[[Record, int], Iterable[Sequence[float]]]
"""Points for a trial of this number, best first. A function of seed, number and record alone."""


def key(params: Params) -> str:
    """What two equal configurations have in common."""
    return json.dumps(params, sort_keys=True, default=repr)


def snapped(space: Space, point: Sequence[float]) -> Point:
    """The point that stands for all points with the same choices."""
    kinds = [one.distribution for one in space.free]
    return tuple(
        min(max(float(u), 0.0), 1.0) if kind.choices is None else kind.middle(kind.number(u))
        for kind, u in zip(kinds, point, strict=True)
    )


def generator(seed: int, trial: int, purpose: str) -> random.Random:
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


class Search:
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
        propose: Proposer,
        accept: Callable[[Params], None] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        self._record = Record(sweep, seed)
        self._propose, self._accept, self._fill = propose, accept, fill
        self._refused: dict[str, str] = {}
        self._refusal = ""

    def ask(self) -> tuple[int, Params]:
        """The next trial and its parameters: derived ones in, those whose condition does not hold out.

        Raises:
            UsedUp: no configuration is left that was not run and keeps the rules.
        """
        trial = max(self._record.trials, default=-1) + 1
        refused: set[str] = set()
        for points, limit in self._sources(trial):
            if self._record.trials:
                refused.clear()
            for point in points:
                place, name = snapped(self._record.space, point), ""
                try:
                    params = self._record.sweep.rules.complete(self._record.space.point(place))
                    if (name := key(params)) in self._record.keys:
                        continue
                    self._check(name, params)
                    self._record.add(trial, params, place)
                    return trial, params
                except InfeasibleError as error:
                    self._refusal = str(error)
                except RefusedError as error:
                    self._refusal = str(error)
                    refused.add(name)
                    if len(refused) == limit:
                        break
            if len(refused) == limit and not self._record.trials:
                raise UsedUp(f"{limit} configurations were looked at, and none can be run: {self._refusal}")
        raise UsedUp(self._ending())

    def tell(self, trial: int, value: float | None) -> None:
        """What a trial gave; None, or a value that is no finite number: it failed."""
        if trial not in self._record.trials:
            raise ValueError(f"trial {trial} was never asked for")
        one = self._record.trials[trial]
        if one.told:
            raise ValueError(f"trial {trial} was told already")
        one.told = True
        if value is not None and math.isfinite(value):
            one.value = self._record.sweep.sign * float(value)

    def point(self, trial: int) -> list[float]:
        """Where in the unit cube a trial is: one number a free parameter."""
        return list(self._record.trials[trial].point)

    def recall(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """An earlier `ask`, from the journal of a study."""
        self._record.add(trial, params, point)

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
        proposed = self._propose(self._record, trial)
        if not self._fill:
            yield proposed, None
            return
        yield islice(proposed, PROPOSED), REFUSALS
        space, chance = self._record.space, generator(self._record.seed, trial, "fill")
        small = space.size is not None and space.size <= COUNTABLE
        tries = min(space.size or 0, 100) if small else TRIES
        yield ([chance.random() for _ in space.free] for _ in range(tries)), REFUSALS
        if small:
            everything = list(space.grid())
            chance.shuffle(everything)
            yield everything, None if self._record.trials else REFUSALS

    def _ending(self) -> str:
        size, count = self._record.space.size, len(self._record.trials)
        if not count:
            return f"there is no configuration that can be run: {self._refusal}"
        if size is not None and (size <= COUNTABLE or not self._fill):
            kept = f" that can be run, of {size} in all" if self._refusal else ""
            return f"the space is used up: all {count} configurations{kept} were run"
        why = f": {self._refusal}" if self._refusal else ""
        return f"the space looks used up: {count} configurations were run, and random tries found no other{why}"


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
