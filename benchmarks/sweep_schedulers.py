"""Schedulers and engines at equal budgets of steps, on made learning curves of kinds that tuned nothing.

    python benchmarks/sweep_schedulers.py [--quick] [--seeds N] [--part apart|tuned] [--processes N] [--results FILE]
        [--json FILE]

The budgets are 1/10, 1/5, 2/5 and all of the reports of 50 full trials. What counts is the loss without noise of the
report with the lowest loss so far, as far above the best loss of the instance as a share of the median's distance (0:
the best one, 1: a full trial at random). Each seed has an instance of its own, the same for all searches. Every search
is added to FILE at once, and what stands there is not run again: take another file once an engine has changed.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import json
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from curve_surfaces import APART, TUNED, CurveSurface, surface
from measure import Lines, Result, flags

from roxxel_dist.sweep.driver.recorded import RecordedSearch
from roxxel_dist.sweep.space.sweep_file import sweep_of

TRIALS, SEEDS, QUICK_SEEDS = 50, 20, 2
BUDGETS, WORDS = (0.1, 0.2, 0.4, 1.0), ("1/10", "1/5", "2/5", "all")
OURS_BY_DEFAULT = "asha, bayes"
OURS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "full trials, bayes": ("bayes", None),
    "asha, bayes": ("bayes", {"type": "asha", "min_iter": 1, "eta": 3}),
}
"""Method and early_terminate."""
PEERS = {"Optuna TPE, full trials": False, "Optuna TPE, successive halving": True}
"""Whether trials are pruned."""
Task = tuple[str, str, int]
"""Search, kind, seed."""


@lru_cache(maxsize=4)
def instance(kind: str, seed: int) -> CurveSurface:
    return surface(kind, seed)


class Track:
    """The regret at each budget, as reports come in."""

    def __init__(self, table: CurveSurface) -> None:
        self._table, self._lowest, self._regret = table, math.inf, math.nan
        self.spent, self.regrets = 0, list[float]()
        self.budgets = [round(share * TRIALS * table.kind.reports) for share in BUDGETS]

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.budgets[-1]

    def report(self, params: Mapping[str, Any], index: int, value: float) -> None:
        """A trial has reported for the index-th time, from 0."""
        self.spent += 1
        if value < self._lowest:
            self._lowest = value
            self._regret = (float(self._table.clean(params)[index]) - self._table.best) / self._table.spread
        if self.spent in self.budgets:
            self.regrets.append(round(self._regret, 5))


def ours(name: str, table: CurveSurface, seed: int, track: Track) -> None:
    method, rule = OURS[name]
    definition = {"method": method, "metric": {"name": "val_loss", "goal": "minimize"}, "early_terminate": rule}
    search = RecordedSearch(sweep_of({**definition, "parameters": table.kind.parameters}), table, seed)
    while not track.is_spent and search.advance(1):
        assert search.history.last is not None
        trial = search.history.trials[search.history.last[1]]
        if trial.state == "failed":
            track.report(trial.params, 0, math.inf)
        else:
            track.report(trial.params, len(trial.reports) - 1, trial.reports[-1][1])


def optuna(name: str, table: CurveSurface, seed: int, track: Track) -> None:
    """Optuna's multivariate TPE; its pruner stops trials for good."""
    import optuna as library
    from sweep_peers import suggest

    library.logging.set_verbosity(library.logging.ERROR)
    pruner = (
        library.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        if PEERS[name]
        else library.pruners.NopPruner()
    )
    sampler = library.samplers.TPESampler(seed=seed, multivariate=True, group=True)
    study = library.create_study(direction="minimize", sampler=sampler, pruner=pruner)
    while not track.is_spent:
        trial = study.ask()
        params = suggest(trial, table.kind.parameters)
        curve, state = table(params), library.trial.TrialState.COMPLETE
        for index, value in enumerate(curve):
            if track.is_spent:
                return
            track.report(params, index, value if math.isfinite(value) else math.inf)
            if not math.isfinite(value):
                state = library.trial.TrialState.FAIL
                break
            trial.report(float(value), index + 1)
            if trial.should_prune():
                state = library.trial.TrialState.PRUNED
                break
        values = None if state != library.trial.TrialState.COMPLETE else float(min(curve))
        study.tell(trial, values, state=state)


def run(task: Task) -> dict[str, Any]:
    """One search: the regret at each budget."""
    warnings.simplefilter("ignore")
    name, kind, seed = task
    table, began = instance(kind, seed), time.process_time()
    track = Track(table)
    (ours if name in OURS else optuna)(name, table, seed, track)
    regrets = [*track.regrets, *[track.regrets[-1]] * (len(BUDGETS) - len(track.regrets))]
    return {"task": task, "regrets": regrets, "cpu_s": round(time.process_time() - began, 2)}


def searches(
    names: Iterable[str], kinds: Iterable[str], seeds: Sequence[int], processes: int, file: Path | None
) -> dict[Task, list[float]]:
    """The regrets of all searches at each budget: those that a file has, and those that are run now."""
    wanted = [(name, kind, seed) for seed, kind, name in product(seeds, kinds, names)]
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    found = {tuple(one["task"]): one["regrets"] for one in map(json.loads, lines)}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for one in pool.imap(run, [task for task in wanted if task not in found]):
            found[one["task"]] = one["regrets"]
            if file is not None:
                with file.open("a") as opened:
                    opened.write(json.dumps(one) + "\n")
    return {task: found[task] for task in wanted}


def compare(names: Sequence[str], regrets: Mapping[Task, Sequence[float]]) -> Iterable[Result]:
    """The medians over all kinds at each budget, and over each kind at its last one."""
    instances = sorted({task[1:] for task in regrets})
    for at, words in enumerate(WORDS):
        for name in names:
            pairs = [(regrets[name, *one][at], regrets[OURS_BY_DEFAULT, *one][at]) for one in instances]
            won = statistics.mean(0.5 * ((mine < other) + (mine <= other)) for mine, other in pairs)
            note = (
                "" if name == OURS_BY_DEFAULT else f"it wins {won:.0%} of {len(pairs)} pairs against {OURS_BY_DEFAULT}"
            )
            median = statistics.median(mine for mine, _ in pairs)
            yield Result(what=f"all kinds, {words} of the steps", against=name, measured=median, note=note)
    for kind, name in product(dict.fromkeys(kind for kind, _ in instances), names):
        rows = [regrets[name, *one] for one in instances if one[0] == kind]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        note = ", ".join(f"{median:.3g} after {words}" for median, words in zip(medians[:-1], WORDS, strict=False))
        yield Result(
            what=f"{kind}, all of the steps", against=name, measured=medians[-1], note=f"{note}; {len(rows)} instances"
        )


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int, help=f"{SEEDS}; with --quick {QUICK_SEEDS}")
    parser.add_argument("--part", choices=("apart", "tuned"), default="apart")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="JSON lines, one a search; those in it are not run again")
    asked = parser.parse_args()
    report, names = Lines(asked.json), [*OURS, *PEERS]
    seeds = range(asked.seeds or (QUICK_SEEDS if asked.quick else SEEDS))
    kinds = APART if asked.part == "apart" else TUNED

    def measured() -> Iterable[Result]:
        return compare(names, searches(names, kinds, seeds, asked.processes, asked.results))

    report.add("searches on made learning curves", measured)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
