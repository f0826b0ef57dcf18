"""A study as a sweep leaves it, made quickly: a real journal, and run directories with numbers from a formula."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import yaml

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.sweep.study.folder import StudyDir
from roxxel_dist.sweep.study.journal import Journal

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


EVERY_KIND: dict[str, list[Any]] = {
    "warmup_steps": [None, 1, 3],
    "kind": ["a", "b"],
    "deep": [True, False],
    "shape": [[1, 2], [3]],
    "long": [[*range(40)], [*range(60)]],
    "a/b." + "very_long_name_" * 4: [None, 2],
}
RATES = [3.88e-4, 0.00169, 0.00299]


def every_kind(path: Path, count: int = 12) -> Path:
    """A study with values of every kind and a logarithmic parameter, whose trial 7 is far worse than all others."""
    space: dict[str, Any] = {name: {"values": given} for name, given in EVERY_KIND.items()}
    space["lr"] = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}
    path.mkdir()
    (path / "study.yaml").write_text(yaml.safe_dump({"method": "random", "parameters": space}))
    about = {"seed": 0, "metric": "val_loss", "goal": "minimize", "method": "random"}
    events: list[dict[str, Any]] = [{"event": "study", "time": 0.0, "format": 1, **about}]
    for number in range(count):
        params = {name: given[number % len(given)] for name, given in {**EVERY_KIND, "lr": RATES}.items()}
        value = 1e30 if number == 7 else 2.0 + number / 10
        events.append({"event": "ask", "time": 1.0, "trial": number, "params": params, "point": [0.0] * len(space)})
        events.append({"event": "start", "time": 1.0, "trial": number, "attempt": 0, "node": None, "pid": 1})
        more = {"params": params, "metric": "val_loss", "value": value, "seconds": 1.0, "stopped": None, "more": {}}
        events.append({"event": "result", "time": 2.0, "trial": number, **more})
        run = path / "trials" / str(number)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("dim: 8\n")
        rows = [{"step": step, "tokens": 8 * step, "val_loss": value / step} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def made_versus(folder: Path, differences: list[float], **more: Any) -> Path:
    """A comparison of lr 0.001 and 0.002 whose pairs have these differences; NaN: A gave no number."""
    study, base = folder / "compared", Config(tokenizer_type="byte", lr=0.001)
    versus = Versus(changes={"lr": 0.002}, names={"A": "base.yaml", "B": "lr=0.002"}, **more)
    sweep = {"method": "grid", "parameters": Versus.parameters(base.seed)}
    for name, content in {"sweep": sweep, "extras": {"versus": dataclasses.asdict(versus)}}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    StudyDir(study).create(str(folder / "sweep.yaml"), str(folder / "extras.yaml"), base, {"data_path": str(folder)})
    checked = StudyDir(study).sweep()
    engine = make(checked)
    with Journal(study, print) as journal:
        journal.append({"event": "study", "metric": "val_loss", "goal": "minimize", "method": "grid", "seed": 0})
        for value in [value for one in differences for value in (2 + one, 2.0)]:
            trial, params = engine.ask()
            start = {"event": "start", "trial": trial, "attempt": 0, "node": "here", "pid": 1}
            journal.append({"event": "ask", "trial": trial, "params": params, "point": engine.point(trial)}, start)
            if not math.isfinite(value):
                journal.append({"event": "fail", "trial": trial, "kind": "nan", "reason": "no number", "log": None})
                continue
            journal.append({"event": "report", "trial": trial, "step": 9, "value": value})
            end = {"params": params, "value": value, "seconds": 1.0, "stopped": None, "more": {}}
            journal.append({"event": "result", "trial": trial, **end})
    return study
