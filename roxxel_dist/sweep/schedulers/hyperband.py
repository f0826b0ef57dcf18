"""Which running trials are poor enough to be ended: W&B's hyperband, as its server decides it since 2023.

An iteration is a report, counted from 1. At some iterations (bands) a trial must be among the best `1/eta` of all
that came so far, those that have ended included; it is judged by its best value up to now.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ETA = 3
MOST_BANDS = 100


def bands(rule: Mapping[str, Any], longest: int) -> list[int]:
    """The iterations at which trials are judged, in order, up to the longest trial's.

    Args:
        rule: W&B's `early_terminate`: `min_iter` and `eta` (from it on, each `eta` times the one before), or
            `max_iter`, `s` and `eta` (`s` of them, from `max_iter / eta` down).
        longest: how many reports the longest trial has.

    Raises ValueError where the rule leaves no band.
    """
    eta = rule.get("eta", ETA)
    if not eta > 1:
        raise ValueError(f"early_terminate.eta: {eta} must be more than 1")
    found = []
    if "max_iter" in rule:
        band = rule["max_iter"]
        for _ in range(int(rule["s"])):
            band /= eta
            found = [int(band), *found] if band >= 1 else found
    else:
        band = rule["min_iter"]
        while len(found) < MOST_BANDS and (not found or band <= longest):
            found.append(int(band))
            band *= eta
    if not found:
        raise ValueError("early_terminate: no iteration is left to judge trials at: raise max_iter or s, or lower eta")
    return [band for band in found if band <= longest]


def poor(
    rule: Mapping[str, Any], sign: float, trials: Mapping[int, Sequence[tuple[int, float]]], running: Sequence[int]
) -> dict[int, str]:
    """The running trials that should be stopped, each with the reason.

    Args:
        rule: W&B's `early_terminate`. With `strict`, a trial is judged by its value at the last band that it reached.
        sign: what a value is multiplied by so that less is better.
        trials: the reports (step, value) of every trial, by number, in their order.
        running: the numbers of those that can still be stopped.
    """
    eta = rule.get("eta", ETA)
    levels = bands(rule, max(map(len, trials.values()), default=0))
    limits: dict[int, float] = {}
    found = {}
    for number in running:
        reports = trials[number]
        band = max((level for level in levels if level <= len(reports)), default=None)
        if band is None:
            continue
        if band not in limits:
            values = sorted(sign * other[band - 1][1] for other in trials.values() if len(other) >= band)
            limits[band] = values[math.floor(1.0 / eta * len(values))]
        value = sign * reports[band - 1][1] if rule.get("strict") else min(sign * report for _, report in reports)
        if value > limits[band]:
            found[number] = (
                f"{sign * value:.6g} after {len(reports)} reports; the best 1/{eta:g} of the trials had "
                f"{sign * limits[band]:.6g} or better at report {band}"
            )
    return found
