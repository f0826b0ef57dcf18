"""Engines of sweeps against each other: the best of 50 trials, failures, several trials at once, CPU a suggestion.

    python benchmarks/sweep_engines.py [--quick] [--seeds N] [--surfaces NAME,…] [--engines NAME,…] [--results FILE]
        [--json FILE]

A run's result is the value without noise of the trial that reported the best one. Each median is over the seeds.
A line is printed as each cell ends, and every run is added to FILE at once: what stands there already is not run again,
so take another file once an engine has changed.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # the peers' threads would wait for each other: two runs share the machine

import json
import multiprocessing
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sweep_peers
from measure import Lines, Result, flags
from sweep_surfaces import SURFACES, Surface

TRIALS = 50
AT_ONCE = 4
WASTED = 5.0
SUGGESTION_MS = 60.0
NAMES = tuple(one.name for one in SURFACES)
ENGINES = (sweep_peers.OURS, *sweep_peers.PEERS, sweep_peers.TORCH)
Cell = tuple[str, str, int]
"""Surface, engine, trials at once."""
Runs = dict[Cell, dict[int, dict[str, Any]]]
"""What each run gave, by its cell and seed."""


def surface_of(name: str) -> Surface:
    return next(one for one in SURFACES if one.name == name)


def run(task: tuple[str, str, int, int]) -> dict[str, Any]:
    """One search of 50 trials; the oldest that runs is the first to finish."""
    warnings.simplefilter("ignore")
    name, peer, at_once, seed = task
    surface = surface_of(name)
    engine = sweep_peers.engine(peer, surface.parameters, seed)
    running: deque[tuple[int, Any]] = deque()
    curve, failed, best, busy = [], 0, (float("inf"), float("inf")), 0.0
    for turn in range(TRIALS + at_once - 1):
        if turn < TRIALS:
            start = time.process_time()
            running.append(engine.ask())
            busy += time.process_time() - start
        if len(running) == at_once or turn >= TRIALS:
            trial, params = running.popleft()
            told, true = surface.measure(params, seed, trial), surface.value(params)
            engine.tell(trial, told)
            failed += told is None
            best = best if told is None or true is None else min(best, (told, true))
            curve.append(best[1])
    return {"task": task, "best": best[1], "curve": curve, "failed": failed, "cpu_ms": 1000 * busy / TRIALS}


def cells(surfaces: Iterable[str], engines: Iterable[str]) -> Iterator[Cell]:
    """What is compared: the sampler that needs torch takes a while, and only where a target names it."""
    for surface in surfaces:
        for name in engines:
            if name != sweep_peers.TORCH or surface in ("surface", "failing"):
                yield surface, name, 1
            if name == sweep_peers.OURS:
                yield surface, name, AT_ONCE


def known(file: Path | None) -> Runs:
    """The runs of a file."""
    found: Runs = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            one = json.loads(line)
            surface, name, at_once, seed = one["task"]
            found.setdefault((surface, name, at_once), {})[seed] = one
    return found


def search(runs: Runs, wanted: Iterable[Cell], seeds: Sequence[int], processes: int, file: Path | None) -> Runs:
    """The runs of these cells and seeds, those that stand in `runs` and those that are run now."""
    found: Runs = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for cell in wanted:
            had = found[cell] = {seed: one for seed, one in runs.get(cell, {}).items() if seed in seeds}
            for one in pool.imap_unordered(run, [(*cell, seed) for seed in seeds if seed not in had]):
                had[one["task"][3]] = one
                if file is not None:
                    with file.open("a") as lines:
                        lines.write(json.dumps(one) + "\n")
            surface, name, at_once = cell
            print(
                f"{surface:10} {name:10} {at_once} at once: best {median(had, 'best'):.4f}, "
                f"failed {mean(had, 'failed'):.1f}, {mean(had, 'cpu_ms'):.0f} ms CPU a suggestion, {len(had)} seeds",
                flush=True,
            )
    return found


def median(found: dict[int, dict[str, Any]], field: str) -> float:
    return statistics.median(one[field] for one in found.values())


def mean(found: dict[int, dict[str, Any]], field: str) -> float:
    return statistics.mean(one[field] for one in found.values())


def compare(found: Runs, surface: str) -> Iterator[Result]:
    """What was asked of a surface, and what came of it: a peer's own result is the target."""
    ours = sweep_peers.OURS
    mine = found[surface, ours, 1]
    best = median(mine, "best")
    kind = "regret" if surface in ("hartmann6", "branin") else "best"
    for (where, name, at_once), other in found.items():
        if where == surface and name != ours and at_once == 1:
            target = median(other, "best")
            yield Result(
                what=f"{surface}: {kind} of {TRIALS}", against=name, measured=best, target=target, at_most=True
            )
    if surface == "failing":
        yield Result(
            what=f"{surface}: trials failed of {TRIALS}",
            against="mean",
            measured=mean(mine, "failed"),
            target=WASTED,
            at_most=True,
        )
    together = median(found[surface, ours, AT_ONCE], "best")
    what = f"{surface}: {kind} with {AT_ONCE} at once"
    if kind == "regret":  # a multiple of next to nothing says nothing
        yield Result(what=what, against=f"one at a time {best:.3g}", measured=together)
    else:
        yield Result(what=what, against="x one at a time", measured=together / best, target=1.1, at_most=True)


def suggestion(surface: Surface, finished: int, repeats: int = 5) -> float:
    """CPU milliseconds of the process for a suggestion, after so many finished trials; the median."""
    times = []
    for seed in range(repeats):
        engine = sweep_peers.engine(sweep_peers.OURS, surface.parameters, seed)
        source = sweep_peers.engine("random", surface.parameters, seed)
        for _ in range(finished):
            trial, params = source.ask()
            engine.restore(trial, params, source.point(trial))
            engine.tell(trial, surface.measure(params, seed, trial))
        engine.tell(engine.ask()[0], 1.0)  # what is imported and looked up once is not a suggestion's cost
        start = time.process_time()
        engine.ask()
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times)


def costs(surfaces: Iterable[str]) -> Iterator[Result]:
    """What a suggestion costs."""
    for name in surfaces:
        if name in ("surface", "failing"):
            for finished in (50, 150, 290, 500):
                cost = suggestion(surface_of(name), finished)
                what = f"{name}: a suggestion after {finished} trials"
                yield Result(what=what, against="ms CPU", measured=cost, target=SUGGESTION_MS, at_most=True)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int, help="20; with --quick 4, and no sampler that needs torch")
    parser.add_argument("--surfaces", default=",".join(NAMES))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="JSON lines, one a run; those in it are not run again")
    asked = parser.parse_args()
    report, absent = Lines(asked.json), dict[str, str]()
    surfaces, engines = asked.surfaces.split(","), asked.engines.split(",")
    if stray := [name for name in (*surfaces, *engines) if name not in (*NAMES, *ENGINES)]:
        parser.error(f"{stray[0]!r} is none: there are surfaces {', '.join(NAMES)} and engines {', '.join(ENGINES)}")
    engines = [name for name in engines if not (asked.quick and name == sweep_peers.TORCH)]
    for name in list(engines):
        if reason := sweep_peers.missing(name):
            absent[name] = reason
            engines.remove(name)
    seeds = range(asked.seeds or (4 if asked.quick else 20))

    def compared(name: str) -> Iterator[Result]:
        """A surface is told as soon as its searches have ended."""
        runs = known(asked.results)
        found = search(runs, cells([name], engines), seeds, asked.processes, asked.results)
        return compare(found, name) if sweep_peers.OURS in engines else iter(())

    for name in surfaces:
        report.add(name, lambda name=name: compared(name))
    if sweep_peers.OURS in engines:
        report.add("suggestions", lambda: costs(surfaces))
    for name, reason in absent.items():
        report.tell(Result(what=f"the engine {name}", against=reason, measured=None))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
