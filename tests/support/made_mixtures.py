"""A study with mixtures as a sweep leaves it, made quickly: a real journal, and losses of a law that is known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.study.folder import StudyDir
from roxxel_dist.sweep.study.journal import Journal

PHASES = [{"steps": 30, "batch_size": 4, "seq_len": 9, "blend": "row"}, {"steps": 10, "batch_size": 4, "seq_len": 9}]
SWEEP: dict[str, Any] = {"method": "random", "parameters": {"lr": {"values": [0.01, 0.0101]}}}


def losses(shares: Sequence[float]) -> dict[str, float]:
    """Of the validation text of each data set: its own share lowers its loss, and the first one helps the second."""
    row = np.array(shares)
    tilts = -2.0 * np.eye(len(row)) + 0.2
    tilts[1, 0] = -1.0
    return dict(zip(NAMES, (2.0 + np.exp(tilts @ row)).tolist(), strict=False))


def excess(lr: float) -> float:
    """What a wrong lr adds to every loss; 0.01 is right."""
    return 0.2 * np.log10(lr / 0.01) ** 2


NAMES = ("self", "code", "math", "web")


def made_mixtures(
    folder: Path,
    sets: int = 3,
    count: int = 24,
    *,
    weighted: bool = True,
    flat: bool = False,
    base: Any = None,
    goal: str = "minimize",
    rates: dict[str, Any] | None = None,
) -> Path:
    """A study of `count` trials over the shares of so many data sets, whose metric is the mean of their losses.

    Not `weighted`, the metric is val_loss, and the trials have no logs. `flat`, shares change no loss. `base` is the
    config that they begin from. Where the goal is to maximize, the metric is less the mean. `rates` are of a search of
    the lr, which then counts: `excess` is what it adds.
    """
    study, names = folder / f"mixtures-{sets}", NAMES[:sets]
    metric = {"name": "mean_loss", "goal": "minimize", "weights": dict.fromkeys(names, 1 / sets)}
    sweep = {**SWEEP, "metric": metric if weighted else {"name": "val_loss", "goal": goal}}
    sweep |= {} if rates is None else {"parameters": {"lr": rates}}
    extras = {"mixtures": [{"phases": [1, 2], "datasets": {name: {} for name in names}}]}
    for name, content in (("mixed", sweep), ("extras", extras)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    base = base or Config(dim=16, tokenizer_type="byte", phases=PHASES, max_context=8)
    files = str(folder / "mixed.yaml"), str(folder / "extras.yaml")
    checked, _ = StudyDir(study).open(*files, base, None)
    StudyDir(study).create(*files, base, {"data_path": None if base.datasets else str(folder)})
    engine, rng = make(checked, seed=1), np.random.default_rng(0)
    told = {"metric": checked.metric, "goal": checked.goal, "method": "random", "seed": 1, "driver": {}}
    told_losses = (lambda row: losses([1 / sets] * len(row))) if flat else losses
    with Journal(study, print) as journal:
        journal.append({"event": "study", **told})
        for number in range(count):
            trial, params = engine.ask()
            assert trial == number
            shares = [params[f"mixture.1.{name}"] for name in names]
            each = {name: loss + rng.normal(0, 0.002) for name, loss in told_losses(shares).items()}
            each = {name: loss + (0.0 if rates is None else excess(params["lr"])) for name, loss in each.items()}
            value = sum(each.values()) / sets * (1 if goal == "minimize" else -1)
            report = {"event": "report", "trial": trial, "step": 40, "value": value}
            journal.append(
                {"event": "ask", "trial": trial, "params": params, "point": engine.point(trial)},
                {"event": "start", "trial": trial, "attempt": 0, "node": "here", "pid": 1},
                report | ({"losses": each} if weighted else {}),
                {"event": "result", "trial": trial, "params": params, "metric": checked.metric, "value": value,
                 "seconds": 1.0, "stopped": None, "more": {}},
            )  # fmt: skip
            run = study / "trials" / str(trial)
            run.mkdir(parents=True)
            phases = [{**phase, "weights": dict(zip(names, shares, strict=True))} for phase in PHASES]
            Config.from_dict({**base.to_dict(), "phases": phases, "lr": params["lr"]}).save_yaml(run / "config.yaml")
    return study
