"""Steps that searches with schedulers need to reach what 50 full trials reach, on the recorded table of curves.

    python benchmarks/sweep_steps.py [--quick] [--seeds N] [--part all|apart|tuned] [--results FILE] [--json FILE]

Each seed has its own goal: the best value of 50 full trials of `bayes`, at its own budget of steps. A search ends when
it has that value; one that has not within the budget counts as twice the budget. `tuned` are the four fifths of the
configurations that the constants of freeze_thaw were chosen on, `apart` the fifth that was kept apart, `all` both.
Every seed is added to FILE at once, and what stands there is not run again.
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
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from measure import Lines, Result, flags
from sweep_curves import GRID, KEPT_APART, REPORTS, STEPS, Table

from roxxel_dist.sweep.journal import History
from roxxel_dist.sweep.recorded import RecordedSearch
from roxxel_dist.sweep.schedulers.freeze_thaw import FreezeThaw
from roxxel_dist.sweep.space.sweep_file import Sweep, sweep_of

TRIALS, SEEDS, QUICK_SEEDS = 50, 20, 2
BUDGET = TRIALS * STEPS
ASHA = {"type": "asha", "min_iter": 1, "eta": 3}
SEARCHES: dict[str, tuple[str, dict[str, Any] | None, int]] = {
    "full": ("bayes", None, 1),
    "freeze_thaw": ("bayes", {"type": "freeze_thaw"}, 1),
    "asha, random": ("random", ASHA, 1),
    "freeze_thaw, 4 workers": ("bayes", {"type": "freeze_thaw"}, 4),
    "asha, bayes": ("bayes", ASHA, 1),
}
"""Method, early_terminate and workers."""
PARTS = {"all": [], "apart": [KEPT_APART], "tuned": [f"not ({KEPT_APART})"]}
MANY = 500
"""Trials of the choice that is timed."""


def sweep_for(part: str, method: str, rule: dict[str, Any] | None) -> Sweep:
    definition = {
        "method": method, "metric": {"name": "val_loss", "goal": "minimize"}, "early_terminate": rule,
        "parameters": {name: {"values": values} for name, values in GRID.items()},
    }  # fmt: skip
    return sweep_of(definition, {"constraints": PARTS[part]} if PARTS[part] else {})


@lru_cache
def table() -> Table:
    return Table()


def search(task: tuple[str, int]) -> dict[str, Any]:
    """Of one seed: steps after which each search has the best value of its full trials; None: not within the budget."""
    warnings.simplefilter("ignore")
    part, seed = task
    goal, steps, cpu = -math.inf, {}, {}
    for name, (method, rule, workers) in SEARCHES.items():
        began, reached = time.process_time(), None
        trials = RecordedSearch(sweep_for(part, method, rule), table(), seed)
        while trials.history.steps < BUDGET and trials.advance(workers):
            if reached is None or trials.best < reached[1]:
                reached = trials.history.steps, trials.best
            if trials.best <= goal:
                break
        assert reached is not None
        goal = reached[1] if name == "full" else goal
        steps[name] = reached[0] if reached[1] <= goal else None
        cpu[name] = round(time.process_time() - began, 2)
    return {"task": task, "goal": goal, "steps": steps, "cpu_s": cpu}


def searches(part: str, seeds: Sequence[int], file: Path | None) -> dict[int, dict[str, Any]]:
    """All searches of a part of the table, by seed; those that a file has, and those that are run now."""
    known = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []
    found = {run["task"][1]: run for run in known if run["task"][0] == part and run["task"][1] in seeds}
    missing = [(part, seed) for seed in seeds if seed not in found]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for run in pool.imap_unordered(search, missing):
            found[run["task"][1]] = run
            if file is not None:
                with file.open("a") as lines:
                    lines.write(json.dumps(run) + "\n")
    return found


def compare(part: str, seeds: Sequence[int], file: Path | None) -> Iterable[Result]:
    found = searches(part, seeds, file)
    shares = {
        name: {seed: (run["steps"][name] or 2 * BUDGET) / BUDGET for seed, run in found.items()} for name in SEARCHES
    }
    medians = {name: statistics.median(share.values()) for name, share in shares.items()}
    what = f"steps to the best value of {TRIALS} full trials, {part}, median of {len(seeds)} seeds"

    def note(name: str) -> str:
        return f"{min(shares[name].values()):.3f} to {max(shares[name].values()):.3f}"

    yield Result(
        what=f"{what}: freeze_thaw", against="of the steps of full trials", measured=medians["freeze_thaw"],
        target=1 / 3, at_most=True, note=note("freeze_thaw"),
    )  # fmt: skip
    for name in ("asha, random", "asha, bayes"):
        yield Result(
            what=f"{what}: freeze_thaw", against=f"x those of {name}", measured=medians["freeze_thaw"] / medians[name],
            target=2 / 3, at_most=True, note=f"{name}: {medians[name]:.3f} ({note(name)})",
        )  # fmt: skip
    yield Result(
        what=f"{what}: freeze_thaw with 4 workers", against="x one worker",
        measured=medians["freeze_thaw, 4 workers"] / medians["freeze_thaw"], target=1.2, at_most=True,
        note=note("freeze_thaw, 4 workers"),
    )  # fmt: skip
    yield Result(
        what=f"{what}: full trials until then", against="of their steps", measured=medians["full"], note=note("full")
    )


def many_trials(sweep: Sweep) -> History:
    """A history of 500 trials of 20 reports: one in ten has ended, the others are paused after as many."""
    history, rng = History(), np.random.default_rng(0)
    history.apply({"event": "study", "metric": "val_loss", "goal": "minimize", "method": "bayes", "seed": 0})
    curves = list(table().curves.values())
    for number in range(MANY):
        point = rng.random(len(sweep.space.free)).tolist()
        history.apply({"event": "ask", "trial": number, "params": {}, "point": point})
        ended, curve = number % 10 == 0, curves[number % len(curves)]
        for index, value in enumerate(curve[: REPORTS if ended else REPORTS - 1], 1):
            history.apply({"event": "report", "trial": number, "step": index, "value": value})
        ending = {"params": {}, "value": min(curve), "seconds": 1.0, "stopped": None, "more": {}, "time": 0.0}
        pause = {"step": REPORTS - 1, "value": curve[-2], "rule": "", "reason": "", "seconds": 1.0, "time": 0.0}
        kind, values = ("result", ending) if ended else ("pause", pause)
        history.apply({"event": kind, "trial": number, **values})
    return history


def choice() -> Iterable[Result]:
    """CPU of a choice; each time by a scheduler that knows nothing yet."""
    sweep = sweep_for("all", "bayes", {"type": "freeze_thaw"})
    history, times = many_trials(sweep), []
    for seed in range(7):
        scheduler = FreezeThaw({}, sweep, seed)
        began = time.thread_time()
        scheduler.choose(history, can_ask=True)
        times.append(1000 * (time.thread_time() - began))
    what = f"a choice of freeze_thaw, {MANY} trials of {REPORTS} reports"
    yield Result(what=what, against="ms CPU, median of 7", measured=statistics.median(times), target=100, at_most=True)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--part", choices=list(PARTS), default="all")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    report = Lines(asked.json)
    seeds = range(asked.seeds or (QUICK_SEEDS if asked.quick else SEEDS))
    report.add("the choice of a scheduler", choice)
    report.add("searches on recorded curves", lambda: compare(asked.part, seeds, asked.results))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
