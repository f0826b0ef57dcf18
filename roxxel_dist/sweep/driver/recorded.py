"""A search on a table of recorded curves: what engine and scheduler would have done, without training."""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.driver.decisions import Decisions
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.sweep_file import Params, Sweep, as_sweep
from roxxel_dist.sweep.study.journal import History


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Steps spent and values reached by a search, after each report of any trial."""

    steps: NDArray[np.int64]
    """Steps spent by all trials together, int64[n]."""
    best: NDArray[np.float64]
    """The best value so far, in the metric's own sign, float64[n]; NaN before the first one."""


def replay(
    sweep: Mapping[str, Any] | str | os.PathLike[str] | Sweep,
    table: Callable[[Params], ArrayLike],
    seed: int,
    budget_steps: int,
    workers: int = 1,
) -> ReplayResult:
    """Search a table of recorded curves, with the decisions of a real sweep: its engine, `early_terminate`, `run_cap`.

    Args:
        sweep: as W&B's YAML has it: a mapping, or the path of a file. Without `early_terminate` all trials are full.
        table: the metric at each report of the trial of these parameters, float[reports], or, where it is a mean over
            data sets by `weights`, the loss of each of them, float[reports, sets]; a trial fails at a value that is not
            finite. Its attribute `steps_per_report` is the number of steps that a report stands for (1 where it
            has none).
        seed: of everything random.
        budget_steps: no report is made that would need more steps than these, of all trials together.
        workers: trials that run at once; each makes one report in its turn.

    Raises:
        ValueError: a mistake in the sweep, a budget or a number of workers below 1, or a curve that is empty or of
            another shape.
    """
    for name, number in (("budget_steps", budget_steps), ("workers", workers)):
        if number < 1:
            raise UserError(f"{name}: {number} must be 1 or more")
    sweep = as_sweep(sweep)
    search = RecordedSearch(sweep, table, seed)
    steps: list[int] = []
    best: list[float] = []
    while search.history.steps + search.each <= budget_steps and search.advance(workers):
        steps.append(search.history.steps)
        best.append(search.best)
    return ReplayResult(steps=np.array(steps, np.int64), best=np.array(best, np.float64))


class RecordedSearch:
    """A search in which workers take turns; what happens is written into its history as a driver writes a journal.

    Attributes: `history`, what happened so far; `each`, steps that a report stands for; `best`, the best value so far,
    NaN before the first one.
    """

    def __init__(self, sweep: Sweep, table: Callable[[Params], ArrayLike], seed: int) -> None:
        self._sweep, self._table = sweep, table
        self.each: int = int(getattr(table, "steps_per_report", 1))
        self.history: History = History()
        study = {"event": "study", "metric": sweep.metric, "goal": sweep.goal, "method": sweep.method, "seed": seed}
        self.history.apply(study)
        self._decisions = Decisions(sweep, self.history, lambda: make(sweep, seed))
        self._curves: dict[int, NDArray[np.float64]] = {}
        self._running: deque[int] = deque()
        self.best: float = math.nan

    def advance(self, workers: int) -> bool:
        """One report of the worker whose turn it is; False if no worker has anything to do."""
        while len(self._running) < workers and (event := self._decisions.next()) is not None:
            self._apply(event)
            number = event["trial"]
            if number not in self._curves:
                self._curves[number] = _curve(self._table(event["params"]), event["params"], sweep=self._sweep)
            self._running.append(number)
        if not self._running:
            return False
        number = self._running.popleft()
        trial, curve = self.history.trials[number], self._curves[number]
        step, row = trial.step + self.each, curve[len(trial.reports)].tolist()
        weights = self._sweep.weights or {self._sweep.metric: 1.0}
        value = math.fsum(weight * loss for weight, loss in zip(weights.values(), row, strict=True))
        if not math.isfinite(value):
            self.history.steps += self.each
            self._apply({"event": "fail", "trial": number, "kind": "nan", "reason": f"{value}", "log": None})
            self._decisions.decide_end(number)
            return True
        losses = {"losses": dict(zip(weights, row, strict=True))} if self._sweep.weights else {}
        self._apply({"event": "report", "trial": number, "step": step, "value": value, **losses})
        better = min if self._sweep.goal == "minimize" else max
        self.best = value if math.isnan(self.best) else better(self.best, value)
        if len(trial.reports) == len(curve):
            self._end(number, None)
        else:
            self._running.append(number)
        for event in self._decisions.decide_report(number, step):
            if (decided := event["trial"]) in self._running:
                self._running.remove(decided)
                self._apply(event)
                if event["event"] == "stop":
                    self._end(decided, event["rule"])
        return True

    def _end(self, number: int, stopped: str | None) -> None:
        trial = self.history.trials[number]
        value = self.history.best_report(number)
        self._apply({"event": "result", "trial": number, "params": trial.params, "value": value, "stopped": stopped})
        self._decisions.decide_end(number)

    def _apply(self, event: Mapping[str, Any]) -> None:
        self.history.apply({"time": 0.0, "seconds": None, "more": {}, **event})


def _curve(recorded: ArrayLike, params: Params, sweep: Sweep) -> NDArray[np.float64]:
    """float64[reports, sets]: of each data set of which the metric is a mean, or of the metric alone."""
    curve, sets = np.asarray(recorded, np.float64), len(sweep.weights)
    if not curve.size or curve.ndim != (2 if sets else 1) or (sets and curve.shape[1] != sets):
        form = f"rows of {sets} numbers, in the order of `weights`" if sets else "a row of one or more numbers"
        raise UserError(f"table: the curve of {params} must be {form}")
    return curve if sets else curve[:, None]
