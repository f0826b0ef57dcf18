"""Mixtures that the law of the trials proposes to `bayes`, where it predicts the trials better than the process does.

Both are asked what each trial would have been without itself, and the one with the smaller error proposes. The law
knows how a data set acts on the loss of each set, so a few trials tell it more; the process knows what no such law has:
other parameters, and shares that interact.

A trial that was stopped has no loss at the end. That of set i is taken to be a_i + b_i x its loss at its last report,
by least squares over the trials that came to the end. On 300 recorded mixtures of two phases, 30 trials of which a
third came to the end, the error of the law was 0.041 with them and 0.121 without (stopped after 3 of 4 reports), and
0.085 and 0.094 (stopped after 2, before the second phase had begun); with a constant in place of the line 0.041 and
0.088, with a law of the difference between report and end 0.055 and 0.132.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from roxxel_dist.sweep.samplers.acquisition import is_diverged
from roxxel_dist.sweep.samplers.base import Curve, SampledTrial, TrialHistory
from roxxel_dist.sweep.samplers.gp import condition, fit_hyperparameters
from roxxel_dist.sweep.samplers.law import FEWEST, Law, propose
from roxxel_dist.sweep.space.mixture import split_shares
from roxxel_dist.sweep.space.sweep_file import Sweep

LINE = 5
"""Trials that came to the end, of which a line is made; of fewer a constant."""
KL = 0.02
"""What a nat away from natural shares counts, over the deviation of the trials' metric: it decides where the law says
that nearly nothing is gained."""
MOST = 250
"""Trials that a law is fitted to, the latest."""


class LawProposals:
    """Proposals for a sweep with mixtures whose metric is minimised; for any other it has none."""

    def __init__(self, sweep: Sweep) -> None:
        self._space = sweep.space
        self._applies = bool(sweep.space.mixtures) and sweep.goal == "minimize"
        self._names = tuple(sweep.weights) or (sweep.metric,)
        self._weights = np.array([*sweep.weights.values()] or [1.0])

    def points(
        self, history: TrialHistory, trial: int, features: Mapping[int, np.ndarray], other: Sequence[float]
    ) -> list[tuple[float, ...]]:
        """Points of the cube, best first; none where the law does not apply, or predicts worse than the process.

        Args:
            history: of the search.
            trial: number of the trial that is asked for: the law's best mixture and one drawn from it take turns.
            features: float64[width] of each trial, as the process sees it.
            other: the point whose parameters beside the shares are taken.
        """
        if not self._applies:
            return []
        ended = [(number, one) for number, one in sorted(history.trials.items()) if one.value is not None][-MOST:]
        losses = at_the_end([one.curve for _, one in ended], self._names)
        known = np.asarray(np.isfinite(losses).all(1))
        for column in losses.T if known.any() else ():  # a loss that diverged says nothing of the law
            known[known] &= ~is_diverged(column[known])
        if known.sum() < len(self._names) + FEWEST:
            return []
        kept = [ended[index] for index in np.flatnonzero(known).tolist()]
        law = Law.fit(np.stack([self._shares(one) for _, one in kept]), losses[known])
        metric, error = losses[known] @ self._weights, law.leave_one_out() @ self._weights
        if not _rms(error) <= process_error(np.stack([features[number] for number, _ in kept]), metric):
            return []
        rng, kl = np.random.default_rng([history.seed, trial, 1]), KL * float(metric.std())
        spaces = self._space.mixtures
        found = [propose(law, self._weights, spaces, kl), propose(law, self._weights, spaces, kl, rng)]
        return [
            self._space.with_shares(other, split_shares(spaces, one)) for one in (found if trial % 2 else found[::-1])
        ]

    def _shares(self, trial: SampledTrial) -> np.ndarray:
        """float64[K], of all mixtures side by side."""
        return np.concatenate(self._space.shares_of(trial.params))


def at_the_end(curves: Sequence[Curve], names: Sequence[str]) -> np.ndarray:
    """float64[n, t]: the loss of each set at the furthest step of any trial; of trials that were stopped, what it is
    taken to be. NaN where nothing says so.

    Args:
        curves: of n trials; a trial without reports has an empty one.
        names: of the t sets.
    """
    rows = [{step: np.array([losses[name] for name in names]) for step, losses in curve} for curve in curves]
    last = max((max(row) for row in rows if row), default=0)
    whole = [row for row in rows if last in row]
    found = np.full((len(rows), len(names)), np.nan)
    for number, row in enumerate(rows):
        if not row:
            continue
        if last in row:
            found[number] = row[last]
        elif both := [(one[max(row)], one[last]) for one in whole if max(row) in one]:
            then, end = (np.stack(part) for part in zip(*both, strict=True))
            found[number] = _extrapolated(row[max(row)], then, end)
    return found


def _extrapolated(loss: np.ndarray, then: np.ndarray, end: np.ndarray) -> np.ndarray:
    """float64[t]: where losses float64[t] end, when others went from float64[n, t] to float64[n, t]."""
    centre, spread = then.mean(0), then.var(0)
    slope = ((then - centre) * (end - end.mean(0))).mean(0) / np.where(spread > 0, spread, 1.0)
    slope = np.where((spread > 0) & (len(then) >= LINE), slope, 1.0)
    return end.mean(0) + slope * (loss - centre)


def process_error(features: np.ndarray, values: np.ndarray) -> float:
    """The root of the mean squared error of a process that predicts each value from all others.

    Args:
        features: float64[n, width].
        values: float64[n].
    """
    spread = float(values.std()) or 1.0
    scaled = (values - values.mean()) / spread
    said, _ = condition(features, scaled, fit_hyperparameters(features, scaled)).leave_one_out()
    return _rms(said - scaled) * spread


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))
