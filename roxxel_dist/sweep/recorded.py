"""A search on a table of recorded curves: what sampler and early stopping would have done, without training."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roxxel_dist.sweep.samplers import SpaceExhausted, make
from roxxel_dist.sweep.schedulers.hyperband import Hyperband
from roxxel_dist.sweep.space.sweep_file import Params, Sweep, read_sweep, sweep_of


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a search has spent and reached, after each report of any trial."""

    steps: NDArray[np.int64]
    """Steps spent by all trials together, int64[n]."""
    best: NDArray[np.float64]
    """The best value so far, in the metric's own sign, float64[n]."""


@dataclass(kw_only=True)
class _RecordedTrial:
    number: int
    curve: list[float]
    reports: list[tuple[int, float]] = field(default_factory=list)


def replay(
    sweep: Mapping[str, Any] | str | os.PathLike[str] | Sweep,
    table: Callable[[Params], ArrayLike],
    seed: int,
    budget_steps: int,
    workers: int = 1,
) -> ReplayResult:
    """Search a table of recorded curves, with the sampler and the early stopping of a real sweep.

    Args:
        sweep: as W&B's YAML has it: a mapping, or the path of a file. Without `early_terminate` all
            trials are full.
        table: the metric at each report of the trial of these parameters, float[reports]. Its attribute
            `steps_per_report` is the number of steps that a report stands for (1 where it has none).
        seed: of everything random.
        budget_steps: no report is made that would need more steps than these, of all trials together.
        workers: trials that run at once; each makes one report in its turn.

    Raises:
        ValueError: a mistake in the sweep, a budget or a number of workers below 1, or a curve that is empty, no row of
            numbers, or not finite.
    """
    for name, number in (("budget_steps", budget_steps), ("workers", workers)):
        if number < 1:
            raise ValueError(f"{name}: {number} must be 1 or more")
    if isinstance(sweep, str | os.PathLike):
        sweep = read_sweep(os.fspath(sweep))
    elif not isinstance(sweep, Sweep):
        sweep = sweep_of(sweep)
    engine, sign = make(sweep, seed), sweep.sign
    stopping = None if sweep.early_terminate is None else Hyperband(sweep.early_terminate, sign)
    each = int(getattr(table, "steps_per_report", 1))
    limit = math.inf if sweep.run_cap is None else sweep.run_cap
    running: list[_RecordedTrial] = []
    best, values, count = math.inf, list[float](), 0
    while (len(values) + 1) * each <= budget_steps:
        while len(running) < workers and count < limit:
            try:
                number, params = engine.ask()
            except SpaceExhausted:
                limit = count
                break
            running.append(_RecordedTrial(number=number, curve=_curve(table(params), params)))
            count += 1
        if not running:
            break
        trial = running.pop(0)
        value = trial.curve[len(trial.reports)]
        trial.reports.append(((len(trial.reports) + 1) * each, value))
        best = min(best, sign * value)
        values.append(sign * best)
        if len(trial.reports) < len(trial.curve):
            running.append(trial)
        else:
            engine.tell(trial.number, trial.curve[-1])
        if stopping is not None:
            stopping.report(trial.number, trial.reports, trial.reports[-1][0])
            stopped = stopping.trials_to_stop([trial.number for trial in running])
            for ended in [trial for trial in running if trial.number in stopped]:
                engine.tell(ended.number, sign * min(sign * value for _, value in ended.reports))
                running.remove(ended)
    return ReplayResult(steps=np.arange(1, len(values) + 1, dtype=np.int64) * each, best=np.array(values, np.float64))


def _curve(recorded: ArrayLike, params: Params) -> list[float]:
    curve = np.asarray(recorded, np.float64)
    if curve.ndim != 1 or not curve.size or not np.isfinite(curve).all():
        raise ValueError(f"table: the curve of {params} must be a row of one or more finite numbers")
    return curve.tolist()
