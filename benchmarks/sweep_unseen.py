"""Searches on five spaces that tuned nothing: 50 trials each, the true value of the trial that reported the best one.

    python benchmarks/sweep_unseen.py [--quick] [--seeds N] [--spaces NAME,…] [--engines NAME,…] [--results FILE]
        [--json FILE]

What people search and what makes it hard: noise, parameters that exist only beside a choice, plateaus, a third of the
space that fails with the best beside it, and rotated axes with heavy-tailed noise. None of these may be used to choose
a number of the package. A pair is one seed of `bayes` and of a peer; equal ones count half.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # several runs share the machine

import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sweep_peers
from measure import Lines, Result, flags
from sweep_surfaces import Surface, cube

TRIALS = 50
Params = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space(Surface):
    """A surface whose parameters may depend on each other, and whose noise may have a heavy tail."""

    extras: dict[str, Any] = field(default_factory=dict)
    """`when` and `constraints` of a sweep."""
    active: Mapping[str, Callable[[Params], bool]] = field(default_factory=dict)
    """The same conditions for a peer, which branches in Python."""
    outliers: float = 0.0
    """The share of trials whose value is about 1 too high."""

    def measure(self, params: Params, seed: int, trial: int) -> float | None:
        value, rng = self.value(params), random.Random(f"{self.name}/{seed}/{trial}")
        outlier = abs(rng.gauss(0.0, 1.0)) if rng.random() < self.outliers else 0.0
        return None if value is None else value + rng.gauss(0.0, self.noise) + outlier


def of_logs(low: float, high: float) -> dict[str, Any]:
    return {"distribution": "log_uniform_values", "min": low, "max": high}


def mixed(p: Params) -> float:
    best = {"sgd": -1.5, "adamw": -3.0, "lion": -3.7}[p["opt"]]
    off = math.log10(p["lr"]) - best - 0.5 * math.log10(p["batch"] / 64) + 0.21 * math.log2(p["dim"] / 128)
    value = 3.0 + (0.35 if off < 0 else 0.9) * off * off
    value += {"sgd": 0.35, "adamw": 0.0, "lion": 0.05}[p["opt"]]
    value += {"relu": 0.06, "gelu": 0.0, "silu": 0.01, "tanh": 0.2, "mish": 0.03}[p["act"]]
    value += (p["dropout"] - 0.08) ** 2 + 0.02 * (math.log10(p["wd"]) + 1.5) ** 2
    value -= 0.12 * math.log10(p["dim"] ** 2 * p["layers"] / 1e5)
    warm = p["warmup"] / 1000
    value += 0.3 * max(0.0, 0.25 - warm) * (1 + max(0.0, off)) + 0.05 * warm
    value += 0.02 * abs(math.log10(p["clip"])) + (0.0 if p["tie"] else 0.03)
    return value + 0.04 * min(4.0, (p["init"] - 0.4) ** 2)


def conditional(p: Params) -> float:
    value, lr = 2.0, math.log10(p["lr"])
    if p["opt"] == "sgd":
        value += 0.25 + 0.3 * (lr - math.log10(1 - p["momentum"])) ** 2
    else:
        centre, level = (-2.7, 0.0) if p["opt"] == "adam" else (-3.5, -0.03)
        value += level + 0.4 * (lr - centre) ** 2 + 8 * (p["beta2"] - 0.95) ** 2
    if p["moe"]:
        value -= 0.05 * math.log2(p["experts"]) + 0.06 * abs(math.log2(p["top_k"]) - 1) + 0.02
        value += 0.1 * (math.log10(p["aux"]) + 2) ** 2
    value += {"cos": 0.02, "lin": 0.03, "const": 0.15, "wsd": 0.0}[p["sched"]]
    value += 0.4 * (p["decay"] - 0.2) ** 2 if p["sched"] == "wsd" else 0.0
    return value + 0.5 / p["depth"] + 0.012 * p["depth"] * (1.0 if p["opt"] == "sgd" else 0.6)


def plateaus(p: Params) -> float:
    x = [p[f"x{number}"] for number in range(14)]
    total = sum(
        w * abs(x[i] - c) for i, c, w in ((0, 0.13, 3), (1, 0.77, 2), (2, 0.42, 4), (3, 0.9, 1), (4, 0.28, 1.5))
    )
    total += 2 * abs(x[0] - 0.28) * abs(x[2] - 0.42)
    return min(4.0, math.floor(total * 4) / 4) + 0.002 * sum(x[5:])


def border(p: Params) -> float | None:
    memory = p["bs"] * p["seq"] * p["dim"] * (1 if p["remat"] else 4) / 1e9
    rate = math.log10(p["lr"] * p["mult"] * p["dim"] / 512)
    if memory > 1.2 or rate > -1.2:
        return None
    value = 2.5 + 0.3 * (rate + 1.6) ** 2 - 0.105 * math.log2(p["dim"] / 128)
    value += 0.02 * max(0.0, math.log10(p["eps"]) + 6) ** 2 - 0.05 * math.log2(p["bs"] * p["seq"] / 4096)
    value += 2 * (p["beta"] - 0.92) ** 2 + 0.03 * math.log10(p["mult"]) ** 2
    return value + (0.05 if p["remat"] else 0.0)


TURN = np.linalg.qr(np.random.default_rng(4711).normal(size=(20, 20)))[0]
CENTRE = np.random.default_rng(815).uniform(-1.8, 1.8, 20)


def rotated(p: Params) -> float:
    z = TURN @ (np.array([6 * p[f"x{number}"] - 3 for number in range(20)]) - CENTRE)
    return float(np.log1p((10 ** np.linspace(0, -2.5, 20) * z * z).sum()) + 0.045 * np.sin(3 * z[:4]).sum())


SPACES = (
    Space(
        name="mixed", value=mixed, noise=0.03,
        parameters={
            "lr": of_logs(1e-5, 1e-1), "wd": of_logs(1e-6, 1.0), "dim": {"values": [64, 96, 128, 192, 256, 384, 512]},
            "layers": {"min": 2, "max": 16}, "act": {"values": ["relu", "gelu", "silu", "tanh", "mish"]},
            "opt": {"values": ["sgd", "adamw", "lion"]}, "dropout": {"min": 0.0, "max": 0.6},
            "warmup": {"distribution": "q_uniform", "min": 0, "max": 1000, "q": 50},
            "batch": {"values": [16, 32, 64, 128, 256]}, "clip": of_logs(0.1, 10.0), "tie": {"values": [True, False]},
            "init": {"distribution": "normal", "mu": 0.0, "sigma": 1.0},
        },
    ),
    Space(
        name="conditional", value=conditional, noise=0.03,
        parameters={
            "opt": {"values": ["sgd", "adam", "lion"]}, "lr": of_logs(1e-5, 1.0), "moe": {"values": [True, False]},
            "depth": {"min": 1, "max": 12}, "sched": {"values": ["cos", "lin", "const", "wsd"]},
            "momentum": {"min": 0.0, "max": 0.99}, "beta2": {"min": 0.8, "max": 0.9999},
            "experts": {"values": [2, 4, 8, 16]}, "top_k": {"values": [1, 2, 4]}, "aux": of_logs(1e-4, 1.0),
            "decay": {"min": 0.05, "max": 0.9},
        },
        extras={
            "when": {
                "momentum": "opt == 'sgd'", "beta2": "opt != 'sgd'", "experts": "moe", "top_k": "moe", "aux": "moe",
                "decay": "sched == 'wsd'",
            },
            "constraints": ["top_k <= experts"],
        },
        active={
            "momentum": lambda p: p["opt"] == "sgd", "beta2": lambda p: p["opt"] != "sgd",
            "experts": lambda p: p["moe"], "top_k": lambda p: p["moe"], "aux": lambda p: p["moe"],
            "decay": lambda p: p["sched"] == "wsd",
        },
    ),
    Space(name="plateaus", value=plateaus, parameters=cube(14)),
    Space(
        name="border", value=border, noise=0.02,
        parameters={
            "lr": of_logs(1e-5, 1.0), "mult": of_logs(0.1, 10.0), "dim": {"values": [128, 256, 512, 1024, 2048, 4096]},
            "bs": {"values": [8, 16, 32, 64, 128, 256, 512]}, "seq": {"values": [256, 512, 1024, 2048]},
            "eps": of_logs(1e-12, 1e-2), "beta": {"min": 0.5, "max": 0.999}, "remat": {"values": [True, False]},
        },
    ),
    Space(name="rotated", value=rotated, noise=0.05, outliers=0.08, parameters=cube(20)),
)  # fmt: skip
NAMES = tuple(space.name for space in SPACES)
ENGINES = (sweep_peers.OURS, "random", "tpe", sweep_peers.TORCH)
"""`tpe` is Optuna's TPESampler. Failures are told to it as such."""


class Optuna(sweep_peers.Optuna):
    """A sampler that is asked only for the parameters that a trial has."""

    def __init__(self, space: Space, sampler: Any) -> None:
        super().__init__(space.parameters, sampler)
        self._active = space.active

    def suggest(self, trial: Any) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for name, spec in self._parameters.items():
            if self._active.get(name, lambda _: True)(params):
                params |= sweep_peers.suggest(trial, {name: spec})
        if "experts" in params:
            params["top_k"] = min(params["top_k"], params["experts"])
        return params


def engine(name: str, space: Space, seed: int) -> Any:
    """Raises ImportError where what it needs is not installed."""
    if name in (sweep_peers.OURS, "random"):
        from roxxel_dist.sweep import make
        from roxxel_dist.sweep.space.sweep_file import sweep_of

        return make(sweep_of({"parameters": space.parameters}, space.extras or None), seed, name)
    from optuna.samplers import GPSampler, TPESampler

    if name == sweep_peers.TORCH:
        import torch

        torch.set_num_threads(1)
        return Optuna(space, GPSampler(seed=seed, deterministic_objective=not space.noise))
    return Optuna(space, TPESampler(seed=seed))


def search(space: Space, name: str, seed: int) -> dict[str, Any]:
    """One search."""
    searcher, best, failed, begin = engine(name, space, seed), (math.inf, math.inf), 0, time.process_time()
    for _ in range(TRIALS):
        trial, params = searcher.ask()
        value, true = space.measure(params, seed, trial), space.value(params)
        searcher.tell(trial, value)
        failed += value is None
        best = best if value is None or true is None else min(best, (value, true))
    return {"task": [space.name, name, seed], "best": best[1], "failed": failed, "cpu": time.process_time() - begin}


def runs(space: Space, engines: Sequence[str], seeds: range, file: Path | None) -> dict[str, dict[int, dict[str, Any]]]:
    """By engine and seed; what stands in the file is not run again."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in engines}
    for line in file.read_text().splitlines() if file and file.exists() else ():
        where, name, seed = (one := json.loads(line))["task"]
        if where == space.name and name in found and seed in seeds:
            found[name][seed] = one
    for seed in seeds:
        for name in engines:
            if seed not in found[name]:
                found[name][seed] = search(space, name, seed)
                if file is not None:
                    with file.open("a") as lines:
                        lines.write(json.dumps(found[name][seed]) + "\n")
    return found


def compare(space: Space, engines: Sequence[str], seeds: range, file: Path | None) -> Iterator[Result]:
    """Medians, and the pairs that `bayes` wins."""
    found = runs(space, engines, seeds, file)
    ours = found[sweep_peers.OURS]
    for name, theirs in found.items():
        best, failed = (statistics.median(one[key] for one in theirs.values()) for key in ("best", "failed"))
        note = f"{failed:g} of {TRIALS} fail" if failed else ""
        yield Result(what=f"{space.name}: best of {TRIALS}", against=name, measured=best, note=note)
        if name != sweep_peers.OURS:
            won = [(ours[s]["best"] < theirs[s]["best"]) + (ours[s]["best"] == theirs[s]["best"]) / 2 for s in seeds]
            what = f"{space.name}: pairs that {sweep_peers.OURS} wins of {len(seeds)}"
            yield Result(what=what, against=name, measured=sum(won), target=len(seeds) / 2)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int, help="12; with --quick 2, and no sampler that needs torch")
    parser.add_argument("--spaces", default=",".join(NAMES))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--results", type=Path, help="JSON lines, one a run; those in it are not run again")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    report, names, engines = Lines(args.json), args.spaces.split(","), args.engines.split(",")
    if stray := [name for name in (*names, *engines) if name not in (*NAMES, *ENGINES)]:
        parser.error(f"{stray[0]!r} is none: there are spaces {', '.join(NAMES)} and engines {', '.join(ENGINES)}")
    for name in list(engines):
        reason = "it takes a while" if args.quick and name == sweep_peers.TORCH else sweep_peers.missing(name)
        if reason:
            engines.remove(name)
            report.tell(Result(what=f"the engine {name}", against=reason, measured=None))
    for space in SPACES:
        if space.name in names:
            seeds = range(args.seeds or (2 if args.quick else 12))
            report.add(space.name, lambda space=space, seeds=seeds: compare(space, engines, seeds, args.results))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
