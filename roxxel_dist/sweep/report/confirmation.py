"""A confirmation: what the study said of its best mixture, and what longer trainings with other seeds measured."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roxxel_dist.place.directory import is_study
from roxxel_dist.sweep.report.surface import Estimate
from roxxel_dist.sweep.study.confirm import BEST, FOLDER, Expected
from roxxel_dist.sweep.study.folder import Study
from roxxel_dist.utils.display import aligned

STUDENT = {1: 6.314, 2: 2.920}
"""Quantiles of Student's t at 0.95, for intervals of 90 %, by degrees of freedom: there are at most three seeds."""


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """The best mixture against one baseline; differences are the metric of the best less its own."""

    against: str
    predicted: Estimate | None
    """Of the law, for the steps of a trial; None where there was none."""
    measured: Estimate | None
    """The mean over the seeds that both have, and its interval; None before there is one."""
    seeds: int
    noise: float | None
    """The variance of these differences over that of differences with seeds of their own (`noise_ratio`); None for
    fewer than two seeds."""

    @property
    def is_inside(self) -> bool | None:
        """Whether what was measured is within the interval that was predicted; None where one is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.low <= self.measured.value <= self.predicted.high


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Of a study."""

    expected: Expected
    values: dict[str, dict[int, float]]
    """By mixture and seed."""
    gains: list[Confirmed]
    metric: str

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        expected = self.expected
        return {
            "factor": expected.factor, "trial": expected.trial, "seeds": expected.seeds,
            "values": {name: list(values.values()) for name, values in self.values.items()},
            "gains": [
                {"against": one.against, "seeds": one.seeds, "inside": one.is_inside, "noise": one.noise,
                 "predicted": one.predicted and one.predicted._asdict(),
                 "measured": one.measured and one.measured._asdict()}
                for one in self.gains
            ],
        }  # fmt: skip

    def text(self) -> list[str]:
        """For people."""
        expected = self.expected
        lines = [
            f"confirmation of trial {expected.trial}: {expected.factor} x its steps, seeds "
            f"{', '.join(map(str, expected.seeds))}"
        ]
        rows = [["mixture", f"mean {self.metric}", "seeds"]]
        for name, values in self.values.items():
            mean = f"{fmean(values.values()):.4f}" if values else "-"
            rows.append([name, mean, f"{len(values)} of {len(expected.seeds)}"])
        lines += aligned(rows)
        if expected.factor > 1 and expected.gains:
            lines.append(f"predictions are for the steps of a trial: {expected.factor} x may give more or less")
        interval = "the interval" if expected.factor == 1 else "the interval of 1 x the steps"
        for one in self.gains:
            predicted = "no prediction" if one.predicted is None else f"predicted {one.predicted}"
            measured = "not measured yet" if one.measured is None else f"measured {one.measured}"
            verdict = {True: f": inside {interval}", False: f": OUTSIDE {interval}", None: ""}[one.is_inside]
            lines.append(f"best less {one.against}: {predicted}, {measured}{verdict}")
            if one.noise is not None:
                lines.append(
                    f"  common random numbers: the variance of this difference is {one.noise:.2f} x that without"
                )
        return lines


def confirmation(study: Study) -> Confirmation | None:
    """The confirmation of a study, also while it is trained; None where none was begun."""
    expected, folder = Expected.read(study.path), study.path / FOLDER
    if expected is None:
        return None
    values = expected.measured(folder) if is_study(folder) else {name: {} for name in expected.phases}
    gains = [
        Confirmed(
            against=name,
            predicted=Estimate(*expected.gains[name]) if name in expected.gains else None,
            measured=paired(values[BEST], values[name]),
            seeds=len(values[BEST].keys() & values[name].keys()),
            noise=_noise(values[BEST], values[name]),
        )
        for name in expected.phases
        if name != BEST
    ]
    return Confirmation(expected=expected, values=values, gains=gains, metric=study.sweep.metric)


def _noise(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    both = sorted(ours.keys() & theirs.keys())
    return noise_ratio([ours[seed] for seed in both], [theirs[seed] for seed in both]) if len(both) > 1 else None


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Estimate | None:
    """The mean difference over the seeds that both have, with Student's interval; None where there is no such seed.

    A seed has the same initial weights and the same windows for each mixture, so the differences of pairs vary less
    than the values do. Of one pair the interval is endless.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    mean, count = fmean(differences), len(differences)
    half = STUDENT[count - 1] * stdev(differences) / math.sqrt(count) if count > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def noise_ratio(first: ArrayLike, second: ArrayLike) -> float:
    """The variance of a difference of two curricula with common seeds, over that with seeds of their own.

    var(a - b) / (var(a) + var(b)): below 1 where what luck does to one, it does to the other. Trials of a search have
    one seed: initial weights, dropout and held-out text are the same, and with `passes: apart` so are the windows of
    each data set, in their order. Measured over 12 seeds, on five sources of real text (200 steps of a model of 77,000
    parameters): 0.21 (natural and uniform shares) and 0.13 (4 % moved from one set to another). With `passes: together`
    it was 2.0 and 1.4 times that.

    Args:
        first: float64[seeds], a number of the first curriculum, such as its last val_loss, by seed.
        second: of the second curriculum, with the same seeds.

    Raises:
        ValueError: fewer than two seeds, or not the same number of both.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ValueError(f"shapes {a.shape} and {b.shape}: two rows of numbers of the same seeds, at least two")
    apart = a.var(ddof=1) + b.var(ddof=1)
    return float((a - b).var(ddof=1) / apart) if apart else 0.0
