"""Optuna's TPE over the unit cube: what searches on where a Gaussian process would be too slow."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from roxxel_dist.sweep.samplers.base import Point, TrialHistory, rng_for
from roxxel_dist.sweep.space.sweep_file import Sweep

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler
    from optuna.trial import FrozenTrial

START = 10
"""Trials at random before TPE has anything to go by."""
OFFERS = 20
CATEGORIES = 30
"""More choices than this, in order, are taken as a range of integers."""


class TpeSampler:
    """Proposes points for a sweep. Choices have no order here: that made it worse when measured.

    Shares of a mixture are log-ratios here, scaled to [0, 1], and what lies outside of the mixture's bounds is moved to
    the nearest shares: on made losses of 5 data sets the median regret after 30 trials was 3.3 %, against 10.8 % with
    the axes of the cube (of 3 data sets 1.4 and 1.5 %).
    """

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ModuleNotFoundError(
                f"method tpe needs a package that is not installed: pip install 'optuna' ({error})"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._kinds = sweep.space.axes
        self._mixtures = tuple(zip(sweep.space.mixtures, sweep.space.share_axes, strict=True))
        self._dims: dict[str, BaseDistribution] = {}
        for dim, kind in enumerate(self._kinds):
            count = len(kind.choices or ())
            if kind.choices is None:
                self._dims[str(dim)] = optuna.distributions.FloatDistribution(0.0, 1.0)
            elif kind.is_ordered and count > CATEGORIES:
                self._dims[str(dim)] = optuna.distributions.IntDistribution(0, count - 1)
            else:
                self._dims[str(dim)] = optuna.distributions.CategoricalDistribution(range(count))
        self._begin()

    def _begin(self) -> None:
        import optuna

        self._study: Study = optuna.create_study(direction="minimize")
        self._numbers: dict[int, int] = {}
        self._ended: set[int] = set()

    def __call__(self, history: TrialHistory, trial: int) -> Iterator[list[float]]:
        """Points, the likeliest to be good first."""
        from optuna.trial import TrialState

        rng = rng_for(history.seed, trial, "tpe")
        if history.ended < START:
            while True:
                yield [rng.random() for _ in self._kinds]
        self._follow(history)
        self._study.sampler = _sampler(self._dims, rng.getrandbits(32))
        for _ in range(OFFERS):
            offer = self._study.ask(self._dims)
            self._study.tell(offer, state=TrialState.FAIL)  # TPE does not look at it: the history says what was run
            point = [
                offer.params[str(dim)] if kind.choices is None else kind.to_unit(offer.params[str(dim)])
                for dim, kind in enumerate(self._kinds)
            ]
            for mixture, axes in self._mixtures:
                low, width = mixture.ratio_span
                point[axes] = mixture.to_cube(mixture.from_log_ratios(low + width * np.array(point[axes]))).tolist()
            yield point

    def _follow(self, history: TrialHistory) -> None:
        """Bring the study up to the history; its trials are in the order of their numbers, whenever they ended."""
        from optuna.trial import TrialState, create_trial

        fresh = sorted(set(history.trials) - set(self._numbers))
        if fresh and self._numbers and fresh[0] < max(self._numbers):
            self._begin()
            fresh = sorted(history.trials)
        for number in fresh:
            params = self._params(history.trials[number].point)
            self._numbers[number] = len(self._study.get_trials(deepcopy=False))
            self._study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=self._dims))
        for number, trial in sorted(history.trials.items()):
            if trial.ended and number not in self._ended:
                self._ended.add(number)
                # Pruned before it reported anything: ranks behind all others, as a failure as bad as the worst would.
                state = TrialState.PRUNED if trial.value is None else TrialState.COMPLETE
                self._study.tell(self._numbers[number], values=trial.value, state=state)

    def _params(self, point: Point) -> dict[str, Any]:
        numbers = list(point)
        for mixture, axes in self._mixtures:
            low, width = mixture.ratio_span
            shares = mixture.from_cube(np.array(point[axes])[None])[0]
            numbers[axes] = np.clip((mixture.log_ratios(shares) - low) / width, 0.0, 1.0).tolist()
        return {
            str(dim): u if kind.choices is None else kind.index_at(u)
            for dim, (kind, u) in enumerate(zip(self._kinds, numbers, strict=True))
        }


def _sampler(dims: "dict[str, BaseDistribution]", seed: int) -> "TPESampler":
    from optuna.samplers import TPESampler

    class FixedSpaceTpe(TPESampler):
        """TPE that is given its dimensions: it would compare those of all trials at each suggestion."""

        def infer_relative_search_space(self, study: "Study", trial: "FrozenTrial") -> "dict[str, BaseDistribution]":
            return dims

    return FixedSpaceTpe(seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True)
