"""Engines of sweeps against each other: the best of 50 trials, failures, several trials at once, CPU a suggestion.

    python benchmarks/sweep_engines.py [--quick] [--seeds N] [--only SURFACE,…] [--engines NAME,…] [--json FILE]

A run's result is the value without noise of the trial that reported the best one. Each median is over the seeds.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # the peers' threads would wait for each other: two runs share the machine

import argparse
import json
import multiprocessing
import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sweep_peers
from measure import Result, table
from sweep_surfaces import SURFACES, Surface

TRIALS = 50
AT_ONCE = 4
Key = tuple[str, str, int]
"""Surface, engine, trials at once."""


def run(task: tuple[str, str, int, int]) -> dict[str, Any]:
    """One search of 50 trials; the oldest that runs is the first to finish."""
    warnings.simplefilter("ignore")
    name, peer, at_once, seed = task
    surface = next(one for one in SURFACES if one.name == name)
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


def median(found: Iterable[dict[str, Any]], field: str) -> float:
    return statistics.median(one[field] for one in found)


def tasks(surfaces: Iterable[str], engines: Iterable[str]) -> Iterable[Key]:
    """What is compared: the sampler that needs torch takes a while, and only where a target names it."""
    for surface in surfaces:
        for name in engines:
            if name != sweep_peers.TORCH or surface in ("surface", "failing"):
                yield surface, name, 1
        if sweep_peers.OURS in engines:
            yield surface, sweep_peers.OURS, AT_ONCE


def compare(
    found: dict[Key, list[dict[str, Any]]], surfaces: Iterable[str], engines: Iterable[str]
) -> Iterable[Result]:
    """The rows of the table."""
    ours = sweep_peers.OURS
    for surface in surfaces:
        mine = median(found[surface, ours, 1], "best")
        yield Result(what=f"{surface}: best of {TRIALS}, {ours}", against="(less is better)", measured=mine)
        for name in engines:
            if (surface, name, 1) in found:
                other = median(found[surface, name, 1], "best")
                yield Result(what=f"  {name}", against="must be more", measured=other, target=mine)
        if surface == "failing":
            for name in (ours, *engines):
                if (surface, name, 1) in found:
                    wasted = statistics.mean(one["failed"] for one in found[surface, name, 1])
                    target = 5.0 if name == ours else None
                    yield Result(
                        what=f"  {name}", against="trials failed", measured=wasted, target=target, at_most=True
                    )
        together = median(found[surface, ours, AT_ONCE], "best")
        yield Result(
            what=f"  {AT_ONCE} trials at once",
            against="x one at a time",
            measured=together / mine,
            target=1.1,
            at_most=True,
        )


def suggestion(surface: Surface, finished: int, repeats: int = 5) -> float:
    """CPU milliseconds of the process for a suggestion, after so many finished trials; the median."""
    times = []
    for seed in range(repeats):
        engine = sweep_peers.engine(sweep_peers.OURS, surface.parameters, seed)
        source = sweep_peers.engine("random", surface.parameters, seed)
        for _ in range(finished):
            trial, params = source.ask()
            engine.recall(trial, params, source.point(trial))
            engine.tell(trial, surface.measure(params, seed, trial))
        engine.tell(engine.ask()[0], 1.0)  # what is imported and looked up once is not a suggestion's cost
        start = time.process_time()
        engine.ask()
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 seeds, and no sampler that needs torch")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default=",".join(one.name for one in SURFACES))
    parser.add_argument("--engines", default=",".join((*sweep_peers.PEERS, sweep_peers.TORCH)))
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    surfaces = flags.only.split(",")
    peers = [name for name in flags.engines.split(",") if name and not (flags.quick and name == sweep_peers.TORCH)]
    for name in list(peers):
        if reason := sweep_peers.missing(name):
            print(f"{name} is left out: {reason}")
            peers.remove(name)
    seeds = range(4 if flags.quick else flags.seeds)
    work = [(*key, seed) for key in tasks(surfaces, (sweep_peers.OURS, *peers)) for seed in seeds]
    found: dict[Key, list[dict[str, Any]]] = {}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for one in pool.imap_unordered(run, work):
            found.setdefault(one["task"][:3], []).append(one)
    rows = list(compare(found, surfaces, peers))
    for finished in (50, 500):
        cost = suggestion(SURFACES[0], finished)
        what = f"a suggestion at {finished} finished trials"
        rows.append(Result(what=what, against="ms CPU", measured=cost, target=60, at_most=True))
    for name in peers:
        cost = statistics.mean(one["cpu_ms"] for one in found[surfaces[0], name, 1])
        rows.append(Result(what=f"  {name}, mean of the first {TRIALS}", against="ms CPU", measured=cost))
    print(table(rows))
    if flags.json:
        flags.json.write_text(json.dumps([one for many in found.values() for one in many]))


if __name__ == "__main__":
    main()
