"""Functions to search: a written surface over the 22 parameters of a real sweep, with failures too, and two known ones.

The surface is made of what people find when they tune language models: the best learning rate depends on optimizer,
width and batch; depth and width pay until the data is used up, and dropout and fewer epochs then help; experts, windows
and sinks each have a knob of their own that matters only while they are on.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NOISE = 0.005
BEST = 0.099
"""About the least value of the surface without noise: found by descent from 60 starts; with failures it is 0.109."""
SPACE: dict[str, dict[str, Any]] = {
    "epochs": {"values": [12, 16, 20, 24]},
    "optimizer": {"values": ["adamw", "adafactor", "lion"]},
    "tokenizer_type": {"values": ["char", "bpe"]},
    "max_context": {"values": [256, 512]},
    "weight_tying": {"values": [True, False]},
    "dropout_rate": {"values": [0.0, 0.1, 0.15]},
    "lr": {"distribution": "log_uniform_values", "min": 0.0001, "max": 0.005},
    "batch_size": {"values": [16, 32, 64]},
    "grad_accum": {"values": [2, 4, 8]},
    "warmup_steps": {"values": [50, 100, 200]},
    "dim": {"values": [256, 512]},
    "num_blocks": {"values": [4, 8, 12]},
    "kv_heads": {"values": [2, 4]},
    "use_moe": {"values": [True, False]},
    "n_experts": {"values": [4]},
    "top_k_mlp": {"values": [1, 2]},
    "expansion": {"values": [2, 4]},
    "alpha_balance": {"distribution": "uniform", "min": 0.01, "max": 0.15},
    "sliding_window": {"values": [True, False]},
    "context_window": {"values": [32, 64, 128]},
    "no_sink": {"values": [True, False]},
    "pos_encoding": {"values": ["rotary", "absolute"]},
}


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Something to minimise."""

    name: str
    parameters: dict[str, dict[str, Any]]
    value: Callable[[Mapping[str, Any]], float | None]
    """Without noise; None: the trial fails."""
    noise: float = 0.0

    def measure(self, params: Mapping[str, Any], seed: int, trial: int) -> float | None:
        """What a trial would report."""
        value = self.value(params)
        return None if value is None else value + self.noise * random.Random(f"{seed}/{trial}").gauss(0.0, 1.0)


def loss(p: Mapping[str, Any]) -> float:
    """The surface."""
    tokens = math.log2(p["batch_size"] * p["grad_accum"] / 128)
    size = math.log2(p["dim"] / 256) * 2 + math.log2(p["num_blocks"] / 4) + math.log2(p["expansion"] / 2) * 0.6
    size += 0.7 * p["use_moe"]
    value = 0.1
    value += 0.03 * (size - 4.2) ** 2 / (1 + 0.2 * max(size - 4.2, 0))
    best_lr = {"adamw": -2.9, "adafactor": -2.6, "lion": -3.6}[p["optimizer"]]
    best_lr += 0.15 * tokens - 0.12 * math.log2(p["dim"] / 256) - 0.05 * math.log2(p["num_blocks"] / 4)
    off = math.log10(p["lr"]) - best_lr
    value += (0.35 if off > 0 else 0.22) * off * off * (1.3 if p["warmup_steps"] == 50 and off > 0 else 1.0)
    value += {"adamw": 0.0, "adafactor": 0.03, "lion": 0.012}[p["optimizer"]]
    value += 0.008 * tokens**2
    spare = p["epochs"] / 24 * (0.6 + 0.1 * size) - 0.55 - 2.0 * p["dropout_rate"]
    value += 0.25 * spare * spare + 0.04 * (1 - p["epochs"] / 24)
    if p["use_moe"]:
        value += 6.0 * (p["alpha_balance"] - 0.045) ** 2 + (0.012 if p["top_k_mlp"] == 1 else 0.0) - 0.012
    if p["sliding_window"]:
        value += 0.015 * math.log2(128 / p["context_window"]) + (0.0 if p["max_context"] == 512 else 0.008)
    else:
        value += 0.010
    value += 0.02 if p["pos_encoding"] == "absolute" else 0.0
    value += 0.012 if p["no_sink"] and p["sliding_window"] else 0.004
    value += 0.03 if (p["tokenizer_type"] == "char") == (p["max_context"] == 256) else 0.0
    value += 0.012 if p["weight_tying"] == (p["dim"] == 512) else 0.0
    value += 0.006 if p["kv_heads"] == 2 else 0.0
    return value


def failing(p: Mapping[str, Any]) -> float | None:
    """The surface with a fifth of the space failing: too large for the device, or diverged."""
    memory = math.log2(p["dim"] / 256) + math.log2(p["num_blocks"] / 4) + math.log2(p["batch_size"] / 16)
    memory += math.log2(p["max_context"] / 256) + 0.5 * p["use_moe"] + 0.5 * math.log2(p["expansion"] / 2)
    heat = math.log10(p["lr"]) + (0.45 if p["optimizer"] == "lion" else 0.0) + (0.15 if p["warmup_steps"] == 50 else 0)
    return None if memory > 5.4 or heat > -2.32 else loss(p)


def branin(p: Mapping[str, Any]) -> float:
    """Regret on Branin."""
    x, y = 15 * p["x0"] - 5, 15 * p["x1"]
    bowl = (y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6) ** 2
    return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.397887


ALPHA = (1.0, 1.2, 3.0, 3.2)
A = ((10, 3, 17, 3.5, 1.7, 8), (0.05, 10, 17, 0.1, 8, 14), (3, 3.5, 1.7, 10, 17, 8), (17, 8, 0.05, 10, 0.1, 14))
P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def hartmann6(p: Mapping[str, Any]) -> float:
    """Regret on Hartmann's function of six dimensions."""
    total = 0.0
    for weight, steep, centre in zip(ALPHA, A, P, strict=True):
        total += weight * math.exp(
            -sum(a * (p[f"x{i}"] - c) ** 2 for i, (a, c) in enumerate(zip(steep, centre, strict=True)))
        )
    return 3.32237 - total


def cube(dims: int) -> dict[str, dict[str, Any]]:
    return {f"x{number}": {"min": 0.0, "max": 1.0} for number in range(dims)}


SURFACES = (
    Surface(name="surface", parameters=SPACE, value=loss, noise=NOISE),
    Surface(name="failing", parameters=SPACE, value=failing, noise=NOISE),
    Surface(name="hartmann6", parameters=cube(6), value=hartmann6),
    Surface(name="branin", parameters=cube(2), value=branin),
)
