"""A search over the shares of three small data sets, of random tokens."""

from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.data_search import with_data
from roxxel_dist.sweep.space.sweep_file import Sweep, sweep_of

SETS = {"self": {"min": 0.2}, "code": {}, "math": {"max": 0.3}}
ONE = {"phases": [1], "datasets": SETS}
LR = {"metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 1e-3, "max": 1e-2}}}


def entry(**changes: Any) -> dict[str, Any]:
    return {"mixtures": [{**ONE, **changes}]}


PHASES = [
    {"steps": 60, "batch_size": 8, "seq_len": 33, "blend": "row"},
    {"steps": 20, "batch_size": 8, "seq_len": 33, "blend": "row"},
]
TOKENS = {"self": 60_000, "code": 12_000, "math": 6_000}


def base_of(folder: Path) -> Config:
    """A config over the data sets, with validation text of each, made in a folder."""
    rng = np.random.default_rng(0)
    for name, count in TOKENS.items():
        np.save(folder / f"{name}.npy", rng.integers(0, 64, count).astype(np.uint16))
        np.save(folder / f"{name}_val.npy", rng.integers(0, 64, 2000).astype(np.uint16))
    return Config(
        datasets={name: str(folder / f"{name}.npy") for name in TOKENS},
        validation={name: str(folder / f"{name}_val.npy") for name in TOKENS},
        phases=PHASES, vocab_size=64, dim=32, num_blocks=1, n_heads=2, kv_heads=1, max_context=32,
    )  # fmt: skip


def opened(base: Config, extras: dict[str, Any], metric: str = "val_loss", **changes: Any) -> Sweep:
    config = Config.from_dict({**base.to_dict(), **changes})
    return with_data(sweep_of({**LR, "metric": {"name": metric}}, extras), config, None, {"lr"})
