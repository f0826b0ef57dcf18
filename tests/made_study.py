"""A study as a sweep leaves it, made quickly: a real journal, and run directories with numbers from a formula."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from roxxel_dist.config import Config
from roxxel_dist.sweep.journal import Journal
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.study import StudyDir

SWEEP = {
    "name": "made",
    "method": "random",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {
        "dim": {"values": [32, 64]},
        "use_moe": {"values": [True, False]},
        "optimizer": {"values": ["adamw", "lion"]},
        "lr": {"distribution": "log_uniform_values", "min": 0.0005, "max": 0.02},
    },
}
STEPS = 6


def loss(params: dict[str, Any], step: int) -> float:
    """Falls with the step; dim and experts help, and a rate of 3e-3 is best; the optimizer does not matter."""
    quality = 0.3 * abs(math.log(params["lr"] / 3e-3)) + 0.3 * (not params["use_moe"]) + 16 / params["dim"]
    return 2 + quality + 3 * math.exp(-step / 2)


def made_study(folder: Path, count: int = 24, **changes: Any) -> Path:
    """A study of `count` trials: every ninth failed, every seventh stopped early, and the last one runs."""
    study, sweep = folder / "study", {**SWEEP, **changes}
    (folder / "made.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    base = Config(dim=32, tokenizer_type="byte")
    checked, _ = StudyDir(study).open(str(folder / "made.yaml"), None, base, None)
    StudyDir(study).create(str(folder / "made.yaml"), None, base, {"data_path": str(folder)})
    engine = make(checked, seed=1)
    told = {"metric": "val_loss", "goal": checked.goal, "method": "random", "seed": 1, "driver": {}}
    with Journal(study, print) as journal:
        journal.append({"event": "study", **told})
        for number in range(count):
            trial, params = engine.ask()
            journal.append(
                {"event": "ask", "trial": trial, "params": params, "point": engine.point(trial)},
                {"event": "start", "trial": trial, "attempt": 0, "node": "here", "pid": 1},
            )
            _train(study / "trials" / str(trial), base, params, journal, trial)
            if number == count - 1:
                break
            if number % 9 == 8:
                journal.append({"event": "fail", "trial": trial, "kind": "nan", "reason": "<no> number", "log": "x"})
            else:
                stopped = "hyperband" if number % 7 == 6 else None
                value = loss(params, STEPS - 1)
                journal.append(
                    {"event": "result", "trial": trial, "params": params, "metric": "val_loss", "value": value,
                     "seconds": 60.0 + number, "stopped": stopped, "more": {}}
                )  # fmt: skip
    return study


def _train(run: Path, base: Any, params: dict[str, Any], journal: Journal, trial: int) -> None:
    run.mkdir(parents=True)
    Config.from_dict(base.to_dict() | params).save_yaml(run / "config.yaml", {"host": "here"})
    (run / "model_summary.json").write_text(json.dumps({"parameters": params["dim"] ** 2 * 20}))
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(STEPS):
            row = {"step": step, "tokens": 1000 * step, "val_loss": loss(params, step), "ram_gb": params["dim"] / 32}
            file.write(json.dumps(row) + "\n")
            journal.append({"event": "report", "trial": trial, "step": step, "value": row["val_loss"]})
