"""A space of every kind, engines over it, and what they find: shared by the tests of the engines."""

import json
import math
from collections.abc import Mapping
from typing import Any

from roxxel_dist.sweep.samplers import Engine, make
from roxxel_dist.sweep.space.sweep_file import sweep_of

MIXED = {
    "lr": {"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0e-2},
    "dim": {"values": [64, 128, 256, 512]},
    "optimizer": {"values": ["adamw", "lion", "adafactor"]},
    "moe": {"parameters": {"use": {"values": [True, False]}, "experts": {"min": 2, "max": 8}}},
    "drop": {"values": [0.0, 0.1], "probabilities": [0.8, 0.2]},
    "seed": {"value": 7},
}


def engine(parameters: Mapping[str, Any], method: str = "bayes", seed: int = 0, **options: Any) -> Engine:
    extras = {name: options.pop(name) for name in ("constraints", "when", "derived") if name in options}
    sweep = {"parameters": parameters, "metric": {"name": "loss", "goal": options.pop("goal", "minimize")}}
    return make(sweep_of(sweep, extras), seed, method, **options)


def loss(params: Mapping[str, Any]) -> float | None:
    """Less is better; a fifth of the space fails."""
    if params["dim"] == 512 and params["lr"] > 1e-3:
        return None
    off = math.log10(params["lr"]) + 3 - 0.3 * math.log2(params["dim"] / 64)
    return off * off + (params["optimizer"] != "lion") + 0.1 * params["moe"]["experts"] * params["moe"]["use"]


def searched(found: Engine, count: int, function: Any = loss) -> list[tuple[dict[str, Any], float | None]]:
    rows = []
    for _ in range(count):
        trial, params = found.ask()
        rows.append((params, function(params)))
        found.tell(trial, rows[-1][1])
    return rows


def named(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)
