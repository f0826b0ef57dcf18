"""The losses of data sets over the shares of mixtures, as a study has them: what laws are fitted to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roxxel_dist.sweep.space.extras import SHARE
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.journal import History, Trial


@dataclass(frozen=True, kw_only=True)
class SetLosses:
    """The trials of a study that reported losses, at their last reports.

    Args:
        trials: int64[n], their numbers.
        shares: float64[n, K], by `keys`.
        losses: float64[n, t], of each data set in `names`, or of the metric alone.
        steps: int64[n], of these reports.
        keys: the K parameters that are shares.
        names: of the t data sets; of the metric where it is no mean of several.
        weights: float64[t], of the data sets in the metric; they sum to 1.
    """

    trials: np.ndarray
    shares: np.ndarray
    losses: np.ndarray
    steps: np.ndarray
    keys: tuple[str, ...]
    names: tuple[str, ...]
    weights: np.ndarray

    def at_the_end(self) -> "SetLosses":
        """The trials that came as far as the furthest one."""
        return self.where(self.steps == self.steps.max(initial=0))

    def where(self, kept: np.ndarray) -> "SetLosses":
        """The trials that bool[n] marks, of the n."""
        rows = {name: getattr(self, name)[kept] for name in ("trials", "shares", "losses", "steps")}
        return replace(self, **rows)


def share_keys(params: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The parameters that are shares, in the order of the first trial that has them."""
    return tuple(dict.fromkeys(key for one in params for key in one if key.startswith(SHARE)))


def set_losses(history: History, sweep: Sweep) -> SetLosses:
    """What the trials of a study reported of each data set; those that failed, and have not reported, are left out."""
    trials = [trial for _, trial in sorted(history.trials.items()) if trial.reports and trial.state != "failed"]
    keys, names = share_keys(trial.params for trial in trials), tuple(sweep.weights) or (sweep.metric,)
    shares = [[float(trial.params.get(key, 0.0)) for key in keys] for trial in trials]
    return SetLosses(
        trials=np.array([trial.number for trial in trials], np.int64),
        shares=np.array(shares, np.float64).reshape(len(trials), len(keys)),
        losses=np.array([_last(trial, names) for trial in trials], np.float64).reshape(len(trials), len(names)),
        steps=np.array([trial.step for trial in trials], np.int64),
        keys=keys,
        names=names,
        weights=np.array([*sweep.weights.values()] or [1.0]),
    )


def _last(trial: Trial, names: Sequence[str]) -> list[float]:
    step, value = trial.reports[-1]
    return [trial.losses[step][name] for name in names] if step in trial.losses else [value]
