"""Real sweeps on real text that may train so many steps: schedulers that pause trials against trials in full.

    python benchmarks/sweep_budget.py FOLDER [--quick] [--seeds N] [--trials 12] [--json FILE]

Each sweep is `roxxel-dist sweep --max_steps_total` with two trials at once, on the sources of Python's standard
library, and trains as many steps as TRIALS full trials have. What counts is the lowest val_loss of any report.
"""

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from measure import Lines, Result, flags
from sweep_real import build_corpus, roxxel

from roxxel_dist.sweep.study.folder import read_study

STEPS, EVERY, TRIALS, SEEDS = 200, 20, 12, 3
BASE = {
    "dim": 64, "num_blocks": 2, "kv_heads": 2, "max_context": 64, "dropout_rate": 0.0, "eval_iters": 8,
    "log_every": EVERY, "eval_every": EVERY, "checkpoint_every": EVERY,
    "phases": [{"steps": STEPS, "batch_size": 8, "seq_len": 65}],
}  # fmt: skip
SWEEP = {
    "method": "bayes",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {
        "lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 0.1},
        "warmup_steps": {"values": [0, 10, 40, 80]},
        "weight_decay": {"distribution": "log_uniform_values", "min": 1e-3, "max": 1.0},
        "optimizer": {"values": ["adamw", "lion", "muon"]},
    },
}
FULL = "full trials"
RULES: dict[str, Mapping[str, Any]] = {
    FULL: {},
    "asha": {"early_terminate": {"type": "asha", "min_iter": 1, "eta": 3}},
}
WORSE = 1.02
"""A seed may be worse by this factor."""


def build(folder: Path) -> None:
    """The corpus and the files of the sweeps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_corpus(folder / "data")
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    for name, rule in RULES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**SWEEP, **rule}))


def search(folder: Path, name: str, seed: int, budget: int) -> dict[str, Any]:
    """One sweep: the best value, the steps it trained, and its minutes."""
    study, begun = folder / f"{name}-{seed}", time.monotonic()
    roxxel("sweep", "--sweep_config", folder / f"{name}.yaml", "--config", folder / "base.yaml", "--data_path",
           folder / "data", "--study", study, "--workers", 2, "--sweep_seed", seed, "--max_steps_total", budget,
           "--wandb", "off")  # fmt: skip
    history = read_study(study).history
    assert history.best is not None
    found = {
        "best": history.best.value, "steps": history.steps, "trials": len(history.trials),
        "minutes": (time.monotonic() - begun) / 60,
    }  # fmt: skip
    print(f"  {name}, seed {seed}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def compare(folder: Path, seeds: int, trials: int) -> Iterable[Result]:
    """The searches of all seeds, in turns."""
    build(folder)
    budget = trials * STEPS
    found = {(name, seed): search(folder, name, seed, budget) for seed in range(seeds) for name in RULES}
    full = [found[FULL, seed] for seed in range(seeds)]
    what = f"best val_loss after {budget:,} steps"
    yield Result(
        what=f"{what}, full trials", against="median", measured=statistics.median(one["best"] for one in full),
        note="; ".join(_told(one) for one in full),
    )  # fmt: skip
    for name in RULES:
        if name == FULL:
            continue
        those = [found[name, seed] for seed in range(seeds)]
        ratios = [one["best"] / other["best"] for one, other in zip(those, full, strict=True)]
        median = statistics.median(one["best"] for one in those) / statistics.median(one["best"] for one in full)
        yield Result(
            what=f"{what}, {name}", against="x full trials, medians", measured=median, target=1.0, at_most=True,
            note="; ".join(_told(one) for one in those),
        )  # fmt: skip
        yield Result(
            what=f"{what}, {name}: the worst seed", against="x full trials", measured=max(ratios), target=WORSE,
            at_most=True,
        )  # fmt: skip


def _told(one: Mapping[str, Any]) -> str:
    return f"{one['best']:.4f} with {one['trials']} trials in {one['minutes']:.1f} min"


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--trials", type=int, default=TRIALS)
    asked = parser.parse_args()
    report = Lines(asked.json)
    seeds = asked.seeds or (1 if asked.quick else SEEDS)
    report.add("searches with a budget of steps", lambda: compare(asked.folder, seeds, asked.trials))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
