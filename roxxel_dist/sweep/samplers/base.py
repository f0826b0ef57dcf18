"""Ask and tell: what all search methods share, and random and grid search.

A method is a sampler, which proposes points of the unit cube. Whatever it proposes, no configuration is run twice, and
none that breaks a rule of the sweep is run at all.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Params, Space, Sweep
from roxxel_dist.sweep.space.values import as_text, excerpt

if TYPE_CHECKING:
    import numpy as np

Point = tuple[float, ...]
PROPOSED = 2_000
"""So many of a sampler's own proposals are looked at before points at random are."""
FIRST = 50
"""So many of them for a trial whose shares are given."""
TRIES = 5_000
"""Points at random, and as many near those of earlier trials, before a space counts as exhausted."""
COUNTABLE = 50_000
"""A space of so many points or fewer is enumerated."""
REFUSALS = 200
"""After so many configurations that `accept` refuses other points are looked at: to look at one takes a while."""
GRID_TRIES = 20_000
"""Points of a grid, one after the other, that cannot run: then the grid ends, and says why."""


Curve = Sequence[tuple[int, Mapping[str, float]]]
"""(step, the loss of each data set, or the metric alone) of each report of a trial, by step."""


class SpaceExhausted(Exception):
    """No configuration is left that was not run; the message is for people."""


@dataclass(kw_only=True)
class SampledTrial:
    """A trial as a sampler sees it."""

    point: Point
    params: Params = field(default_factory=dict)
    curve: Curve = ()
    """Of a trial that has ended, or was stopped: the losses at each report."""
    ended: bool = False
    value: float | None = None
    """Less is better, whatever the goal; None: running, or it failed."""


@dataclass(kw_only=True)
class TrialHistory:
    """All trials so far, by their numbers."""

    seed: int
    trials: dict[int, SampledTrial] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return sum(trial.ended for trial in self.trials.values())


Sampler = Callable[[TrialHistory, int], Iterable[Sequence[float]]]
"""Points for a trial of this number, best first. A function of seed, number and history alone."""


def rng_for(seed: int, trial: int, purpose: str) -> random.Random:
    """Random numbers that depend on these alone, on every machine."""
    return random.Random(f"{seed}/{trial}/{purpose}")


class AskTell:
    """Proposes trials and gets their results. Several trials may run at once.

    Args:
        sweep: the search space, and its rules.
        seed: of everything random.
        sampler: proposes the next point.
        accept: raises ValueError for parameters that make no valid trial.
        fill: whether to try other points if the sampler has no valid one.
    """

    def __init__(
        self,
        sweep: Sweep,
        seed: int,
        sampler: Sampler,
        accept: Callable[[Params], None] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        self._sweep, self._sampler, self._accept, self._fill = sweep, sampler, accept, fill
        self._history = TrialHistory(seed=seed)
        self._keys: set[str] = set()
        self._refused: dict[str, str | None] = {}
        self._reason = ""

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial (from 0) and its parameters: derived ones in, inactive ones out.

        Raises:
            SpaceExhausted: no configuration is left that was not run and keeps the rules.
        """
        trial = max(self._history.trials, default=-1) + 1
        refused: set[str] = set()
        for points, limit, shares in self._sources(trial):
            if self._history.trials and limit is not None:
                refused.clear()
            for u in points:
                try:
                    point, params = self._resolved(u, shares)
                except InfeasibleError as error:
                    self._reason = str(error)
                    continue
                if (key := as_text(params)) in self._keys:
                    continue
                if (reason := self._refusal(key, params)) is None:
                    self.restore(trial, params, point)
                    return trial, params
                self._reason = reason
                refused.add(key)
                if len(refused) == limit:
                    break
                if len(refused) == GRID_TRIES:
                    raise SpaceExhausted(
                        f"{GRID_TRIES:,} points of the grid, one after the other, cannot run: {reason}. Take such "
                        f"values out of the sweep"
                    )
            if len(refused) == limit and not self._history.trials:
                raise SpaceExhausted(f"{limit} configurations were tried, and none of them can run: {self._reason}")
        raise SpaceExhausted(self._ending())

    def _resolved(self, u: Sequence[float], shares: "Sequence[np.ndarray] | None") -> tuple[Point, Params]:
        """The point and the parameters of a trial at u; with these shares instead of its own, where there are any.

        Raises InfeasibleError where they break a rule.
        """
        space, rules = self._sweep.space, self._sweep.rules
        point = canonical(space, u)
        params = space.point(point)
        if shares is not None:
            moved = shares if rules.budget is None else rules.budget.feasible_shares(space.mixtures, shares, params)
            params |= space.params_of(moved)
        return point, rules.resolve(params)

    def tell(self, trial: int, value: float | None, curve: Curve = ()) -> None:
        """The value of a trial; None, or a value that is no finite number: it failed. `curve` is what it reported."""
        if trial not in self._history.trials:
            raise UserError(f"trial {trial} does not exist: call ask first")
        sampled = self._history.trials[trial]
        if sampled.ended:
            raise UserError(f"trial {trial} has a result already")
        number = _as_float(trial, value)
        sampled.ended, sampled.curve = True, curve
        sampled.value = None if number is None else self._sweep.sign * number

    def point(self, trial: int) -> list[float]:
        """The point of a trial in the unit cube: a number for each axis."""
        return list(self._history.trials[trial].point)

    def restore(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Take note of an earlier `ask`, from the journal of a study."""
        if trial in self._history.trials:
            raise UserError(f"trial {trial} exists already")
        if len(point) != len(self._sweep.space.axes):
            raise UserError(
                f"trial {trial} is a point of {len(point)} dimensions, and this sweep has "
                f"{len(self._sweep.space.axes)}: the parameters of the sweep have changed; start a new study"
            )
        space = self._sweep.space
        if space.mixtures and all(key in params for mixture in space.mixtures for key in mixture.keys):
            # Where its shares are now: caps depend on the data, which may have grown since the journal was written.
            point = canonical(space, space.with_shares(point, space.shares_of(params)))
        self._history.trials[trial] = SampledTrial(point=tuple(point), params=params)
        self._keys.add(as_text(params))

    def _refusal(self, name: str, params: Params) -> str | None:
        """Why `accept` refuses a configuration; each is looked at once."""
        if self._accept is None:
            return None
        if name not in self._refused:
            try:
                self._accept(params)
                self._refused[name] = None
            except ValueError as error:
                self._refused[name] = str(error)
        return self._refused[name]

    def _sources(
        self, trial: int
    ) -> "Iterator[tuple[Iterable[Sequence[float]], int | None, Sequence[np.ndarray] | None]]":
        """Where to look, how many refusals to take there, and which shares to take instead of those of the points:
        where the sampler says, then anywhere, then everywhere.

        The first trials have the natural and the uniform shares of all mixtures. The points of a grid, and those of a
        small space in which trials were run, are all looked at.
        """
        space, rng = self._sweep.space, rng_for(self._history.seed, trial, "fill")
        if trial < len(space.baselines):
            proposed = self._sampler(self._history, trial) if self._fill else space.grid()
            yield islice(proposed, FIRST), None, space.baselines[trial]
        proposed = self._sampler(self._history, trial)
        if not self._fill:
            yield proposed, None, None
            return
        yield islice(proposed, PROPOSED), REFUSALS, None
        small = space.size is not None and space.size <= COUNTABLE
        tries = min(space.size or 0, 100) if small else TRIES
        yield ([rng.random() for _ in space.axes] for _ in range(tries)), REFUSALS, None
        if not small and self._history.trials:
            yield self._near(rng), REFUSALS, None
        if small:
            everything = list(space.grid())
            rng.shuffle(everything)
            yield everything, None if self._history.trials else REFUSALS, None

    def _near(self, rng: random.Random) -> Iterator[Sequence[float]]:
        """Points of earlier trials with one number drawn anew, where rules leave little of the space."""
        known = [trial.point for _, trial in sorted(self._history.trials.items())]
        for _ in range(TRIES):
            point = list(rng.choice(known))
            point[rng.randrange(len(point))] = rng.random()
            yield point

    def _ending(self) -> str:
        size, count = self._sweep.space.size, len(self._history.trials)
        if not count:
            return f"there is no configuration that can be run: {self._reason}"
        if size is not None and (size <= COUNTABLE or not self._fill):
            kept = f" that can be run, of {size:,} in all," if self._reason else ""
            why = f"; one of the others: {self._reason}" if self._reason else ""
            if count == 1 and not kept:
                return "nothing is left to search: the only configuration was run"
            return f"nothing is left to search: all {count:,} configurations{kept} were run{why}"
        why = f": {self._reason}" if self._reason else ""
        return f"nothing seems left to search: {count} configurations were run, and random tries found no other{why}"


def _as_float(trial: int, value: object) -> float | None:
    """The value of a trial; None where it failed, or its value is no finite float. Raises UserError for no number."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise UserError(f"trial {trial}: its value is {excerpt(value)}: it must be a number, or None where it failed")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def canonical(space: Space, point: Sequence[float]) -> Point:
    """The point that stands for all points with the same choices."""
    return tuple(
        min(max(float(u), 0.0), 1.0) if kind.choices is None else kind.to_unit(kind.index_at(u))
        for kind, u in zip(space.axes, point, strict=True)
    )


class RandomSampler:
    """Each parameter independently, from its distribution; the shares of a mixture are uniform."""

    def __init__(self, sweep: Sweep) -> None:
        self._dims = len(sweep.space.axes)

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[list[float]]:
        """Points without end."""
        rng = rng_for(history.seed, trial, "random")
        while True:
            yield [rng.random() for _ in range(self._dims)]


class GridSampler:
    """Every point of the space, one after the other. Raises ValueError where they are endless."""

    def __init__(self, sweep: Sweep) -> None:
        next(sweep.space.grid())
        self._points = sweep.space.grid()

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[list[float]]:
        """The points that were not looked at yet: those that were are run, or can never be."""
        return self._points
