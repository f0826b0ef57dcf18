"""A confirmation: what the study said of its best mixture, and what longer trainings with other seeds measured."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

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

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured less the predicted has 0 in its interval; None where one is missing, and of one seed.

        Both have errors, which are independent: the half of the interval of their difference is the root of the sum of
        the squares of the halves that point to each other.
        """
        if self.predicted is None or self.measured is None or math.isinf(self.measured.high):
            return None
        off = self.measured.value - self.predicted.value
        if off > 0:
            half = math.hypot(self.predicted.high - self.predicted.value, self.measured.value - self.measured.low)
        else:
            half = math.hypot(self.predicted.value - self.predicted.low, self.measured.high - self.measured.value)
        return abs(off) <= half


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
                {"against": one.against, "seeds": one.seeds, "inside": one.is_inside,
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
            if one.measured is not None and one.seeds == 1 and one.predicted is not None:
                lines.append("  one seed has no interval, and so no verdict")
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
        )
        for name in expected.phases
        if name != BEST
    ]
    return Confirmation(expected=expected, values=values, gains=gains, metric=study.sweep.metric)


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Estimate | None:
    """The mean difference over the seeds that both have, with Student's interval; None where there is no such seed.

    A seed has the same initial weights and the same windows for each mixture, so the differences of pairs vary less
    than the values do: over 12 seeds, on five sources of real text (200 steps of a model of 77,000 parameters), the
    variance of a difference of two mixtures was 0.21 (natural and uniform shares) and 0.13 (4 % moved from one set to
    another) of that with seeds of their own. Of one pair the interval is endless.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    mean, count = fmean(differences), len(differences)
    half = STUDENT[count - 1] * stdev(differences) / math.sqrt(count) if count > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)
