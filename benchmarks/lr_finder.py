"""How near to the best is a training at the rate of `find-lr`? Ten settings, each against a grid of rates."""

import contextlib
import io
import json
import math
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from measure import Lines, Result, flags

from roxxel_dist import Config, Experiment
from roxxel_dist.corpus.build import build

STEPS = 200
PER_DECADE, DECADES = 2, 3
"""The grid of rates: so many in each of so many decades."""
COMMON: dict[str, Any] = {
    "dim": 64, "n_heads": 2, "num_blocks": 2, "max_context": 64, "dropout_rate": 0.0, "seed": 0, "n_devices": 1,
    "eval_every": STEPS, "checkpoint_every": STEPS, "log_every": STEPS, "export_weights": False, "sample": "off",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw, dim 32, cosine": {"dim": 32, "n_heads": 1},
    "adamw, dim 128, wsd": {"dim": 128, "lr_schedule": "wsd"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon"},
    "adafactor, linear": {"optimizer": "adafactor", "lr_schedule": "linear"},
    "sgd": {"optimizer": "sgd"},
    "adamw, 4 rows, constant": {"rows": 4, "lr_schedule": "constant"},
    "adamw, 64 rows, dropout": {"rows": 64, "dropout_rate": 0.1},
    "schedule-free adamw, constant": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"},
    "adamw, experts, 8 rows, linear": {"dim": 32, "use_moe": True, "rows": 8, "lr_schedule": "linear"},
}
"""None of them tuned the rule."""
LOWEST = {"lion": 1e-5, "sgd": 1e-2}
"""The lowest rate of a grid, by optimizer."""
OTHERS = 1e-4
MAX_LR = {"sgd": 10.0}
"""The highest rate of a sweep, where it is not the default."""


def config_of(setting: Mapping[str, Any], **more: Any) -> Config:
    """Of a short run: a setting's fields, and `rows` of 65 tokens, 16 by default."""
    fields = {**COMMON, **setting, **more}
    rows = fields.pop("rows", 16)
    return Config(**fields, phases=[{"steps": STEPS, "batch_size": rows, "seq_len": 65}])


def rates_of(optimizer: str) -> list[float]:
    """The grid of an optimizer."""
    lowest = LOWEST.get(optimizer, OTHERS)
    return [lowest * 10 ** (step / PER_DECADE) for step in range(PER_DECADE * DECADES + 1)]


def loss_at(setting: Mapping[str, Any], data: Path, rate: float) -> float:
    """The validation loss at the end of a training; infinity where it went bad."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            run = Experiment(config_of(setting, lr=rate)).fit(data, Path(folder, "run"))
        except Exception as error:  # a loss that is no number
            print(f"{rate:.2e}: {error}", file=sys.stderr)
            return math.inf
        row = json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])
    return math.inf if row["val_loss"] is None else row["val_loss"]


def sweep_of(setting: Mapping[str, Any], data: Path, num_steps: int = 100) -> tuple[float, list[float], list[float]]:
    """What `find-lr` suggests, its rates and its losses."""
    max_lr = MAX_LR.get(setting.get("optimizer", ""), 0.1)
    return Experiment(config_of(setting)).find_lr(data, max_lr=max_lr, num_steps=num_steps)


def distance(name: str, data: Path) -> Iterable[Result]:
    """How far the loss at the suggested rate is above the lowest of the grid."""
    setting = SETTINGS[name]
    suggested, _, _ = sweep_of(setting, data)
    losses = {rate: loss_at(setting, data, rate) for rate in rates_of(setting.get("optimizer", ""))}
    best = min(losses, key=losses.__getitem__)
    found = loss_at(setting, data, suggested)
    yield Result(
        what=f"find-lr: {name}", against="loss at its rate over the lowest of a grid", measured=found / losses[best],
        target=1.05, at_most=True,
        note=f"{suggested:.2g} (loss {found:.3f}); of {len(losses)} rates the best is {best:.2g} ({losses[best]:.3f}), "
        f"the worst has {max(losses.values()):.3f}",
    )  # fmt: skip


def main() -> int:
    """1 where something could not be measured."""
    options = flags(__doc__).parse_args()
    lines, source = Lines(options.json), Path(sysconfig.get_paths()["stdlib"])
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        build([source / "email", source / "asyncio"], data, tokenizer="byte").close()
        for name in list(SETTINGS)[: 2 if options.quick else None]:
            lines.add(name, partial(distance, name, data))
    return lines.end()


if __name__ == "__main__":
    raise SystemExit(main())
