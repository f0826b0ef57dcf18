"""`bayes` and its peers on COCO's bbob-mixint, functions that others have made: pairs of searches won.

    python benchmarks/sweep_mixint.py [--quick] [--dims 5,10,20] [--instances 1-3] [--functions 1-24] [--engines NAME,…]
        [--budget 50] [--workers 1] [--fail 0.0] [--all] [--repeats 1] [--results FILE]
        [--json FILE]

A pair is one function in one dimension and instance, searched by two engines with the same seed; the better one is
that whose best trial has the lower value, and a tie counts as half. With `--workers` that many trials run at once, the
oldest ends first. With `--fail` that share of the trials fails whatever its parameters are: the same numbers for all.
Every run is added to FILE at once and what stands there is not run again: take another file once an engine has changed.
Ours is developed on the instances 1 to 3, and 10 to 14 decided between two forms of it; the instances of each published
table stand beside it.

T. Tusar, D. Brockhoff, N. Hansen: Mixed-integer benchmark problems for single- and bi-objective optimization, 2019.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import json
import random
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import sweep_peers
from measure import Lines, Result, flags

OURS = sweep_peers.OURS
ENGINES = (OURS, sweep_peers.MULTIVARIATE, sweep_peers.TORCH, sweep_peers.SMAC, "wandb", "random")
TARGETS = dict.fromkeys(ENGINES, 0.85) | {sweep_peers.MULTIVARIATE: 0.75, sweep_peers.TORCH: 0.6}
AT_ONCE, FAILING = 4, 0.33
HARDER = 0.7
"""The share to win against TPE with several trials at once, or with trials that fail."""
Task = tuple[str, int, int, int, int]
"""Engine, dimension, function, instance, repeat."""


@cache
def suite() -> Any:
    """All problems of bbob-mixint. Raises ImportError where PyPI's `coco-experiment` is not installed."""
    import cocoex

    return cocoex.Suite("bbob-mixint", "", "")


def parameters_of(problem: Any) -> dict[str, dict[str, Any]]:
    """The variables of a problem as those of a sweep; the integer ones come first."""
    integers = problem.number_of_integer_variables
    bounds = zip(problem.lower_bounds.tolist(), problem.upper_bounds.tolist(), strict=True)
    return {
        f"x{index}": {"min": int(low), "max": int(high)} if index < integers else {"min": low, "max": high}
        for index, (low, high) in enumerate(bounds)
    }


def run(task: Task, args: Namespace) -> dict[str, Any]:
    """One search: the best value that a trial gave which did not fail, and the CPU time of a suggestion."""
    name, dim, function, instance, repeat = task
    problem = suite().get_problem_by_function_dimension_instance(function, dim, instance)
    parameters = parameters_of(problem)
    fails = random.Random(f"{dim}/{function}/{instance}/{repeat}/fail")
    failed = [fails.random() < args.fail for _ in range(args.budget)]
    engine = sweep_peers.engine(name, parameters, 100 * instance + repeat)
    running: deque[tuple[int, Any]] = deque()
    best, busy, curve = float("inf"), 0.0, []
    for turn in range(args.budget + args.workers - 1):
        if turn < args.budget:
            start = time.process_time()
            running.append(engine.ask())
            busy += time.process_time() - start
        if len(running) == args.workers or turn >= args.budget:
            trial, params = running.popleft()
            value = None if failed[len(curve)] else float(problem([params[key] for key in parameters]))
            start = time.process_time()
            engine.tell(trial, value)
            busy += time.process_time() - start
            best = best if value is None else min(best, value)
            curve.append(best)
    setting = {"budget": args.budget, "workers": args.workers, "fail": args.fail}
    return {"task": task, **setting, "best": best, "cpu_ms": 1000 * busy / args.budget, "at_50": curve[:50][-1]}


def known(args: Namespace) -> dict[Task, dict[str, Any]]:
    """The runs of the file that were made with these settings."""
    runs = {}
    if args.results is not None and args.results.exists():
        for line in args.results.read_text().splitlines():
            one = json.loads(line)
            if all(one[field] == getattr(args, field) for field in ("budget", "workers", "fail")):
                runs[tuple(one["task"])] = one
    return runs


def search(engines: Sequence[str], dim: int, args: Namespace) -> dict[str, dict[tuple[int, ...], dict[str, Any]]]:
    """The runs of each engine in one dimension by function, instance and repeat."""
    before = known(args)
    runs: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {name: {} for name in engines}
    # An instance at a time, all engines beside each other: a run that is stopped has whole pairs.
    for instance, repeat, function in product(args.instances, range(args.repeats), args.functions):
        for name in engines:
            task = (name, dim, function, instance, repeat)
            if (one := before.get(task)) is None:
                one = run(task, args)
                if args.results is not None:
                    with args.results.open("a") as lines:
                        lines.write(json.dumps(one) + "\n")
            runs[name][function, instance, repeat] = one
    return runs


def compare(engines: Sequence[str], dim: int, args: Namespace) -> Iterator[Result]:
    """The share of the pairs that ours wins, against each peer, and what a suggestion costs."""
    runs = search(engines, dim, args)
    ours = runs.get(OURS, {})
    setting = f"dimension {dim}, best of {args.budget}"
    setting += f", {args.workers} at once" if args.workers > 1 else ""
    setting += f", {args.fail:.0%} fail" if args.fail else ""
    for name, others in runs.items():
        cost = statistics.mean(one["cpu_ms"] for one in others.values())
        if name == OURS:
            yield Result(what=f"{setting}: a suggestion", against="ms CPU, mean", measured=cost)
        elif ours:
            won = sum(ours[key]["best"] < one["best"] for key, one in others.items())
            lost = sum(ours[key]["best"] > one["best"] for key, one in others.items())
            share = (won + (len(others) - won - lost) / 2) / len(others)
            target = min(TARGETS[name], HARDER) if args.workers > 1 or args.fail else TARGETS[name]
            which = f"instances {spelled(args.instances)}, functions {spelled(args.functions)}"
            note = f"{won} won, {lost} lost of {len(others)}: {which}; {cost:.0f} ms CPU a suggestion of {name}"
            yield Result(what=f"{setting}: pairs won", against=name, measured=share, target=target, note=note)
            print(f"  {note}", file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    """'1-3,7' as 1, 2, 3, 7."""
    ends = [part.partition("-") for part in text.split(",")]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]


def spelled(chosen: Sequence[int]) -> str:
    """The numbers of a list, and 1, 2, 3 as '1 to 3'."""
    if len(chosen) > 2 and list(chosen) == list(range(chosen[0], chosen[-1] + 1)):
        return f"{chosen[0]} to {chosen[-1]}"
    return ", ".join(map(str, chosen))


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--dims", type=numbers, default=[5, 10, 20])
    parser.add_argument("--instances", type=numbers, help="1-3; with --quick 1")
    parser.add_argument("--functions", type=numbers, default=list(range(1, 25)))
    parser.add_argument("--engines", help=f"of {', '.join(ENGINES)}; with --quick bayes, TPE and random")
    parser.add_argument("--budget", type=int, default=50, help="trials of a search")
    parser.add_argument("--workers", type=int, default=1, help="trials at once")
    parser.add_argument("--fail", type=float, default=0.0, help="the share of trials that fail at random")
    parser.add_argument(
        "--all", action="store_true", help=f"{AT_ONCE} at once and {FAILING:.0%} failing too".replace("%", "%%")
    )
    parser.add_argument("--repeats", type=int, default=1, help="searches of each problem, with a seed each")
    parser.add_argument("--results", type=Path, help="JSON lines, one a run; those in it are not run again")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.instances = args.instances or ([1] if args.quick else [1, 2, 3])
    engines = args.engines.split(",") if args.engines else ENGINES
    if stray := [name for name in engines if name not in ENGINES]:
        parser.error(f"{stray[0]!r} is none: there are {', '.join(ENGINES)}")
    if args.quick and not args.engines:
        engines = (OURS, sweep_peers.MULTIVARIATE, "random")
    absent = {name: reason for name in engines if (reason := sweep_peers.missing(name))}
    present = [name for name in engines if name not in absent]
    report = Lines(args.json)
    settings = [(args.workers, args.fail), *((AT_ONCE, 0.0), (1, FAILING)) * args.all]
    for (workers, fail), dim in product(settings, args.dims):
        setting = Namespace(**vars(args) | {"workers": workers, "fail": fail})
        report.add(f"dimension {dim}", lambda dim=dim, setting=setting: compare(present, dim, setting))
    for name, reason in absent.items():
        report.tell(Result(what=f"the engine {name}", against=reason, measured=None))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
