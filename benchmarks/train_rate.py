"""What find-lr suggests: how training at that rate ends, against seven others. A part of `train_loop.py`."""

import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure import Result

from roxxel_dist.corpus.build import build
from roxxel_dist.run.experiment import Experiment
from roxxel_dist.settings.config import Config

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STEPS = 200
WIDTHS = (32, 96)


def suggested_rates(folder: Path, widths: Iterable[int] = WIDTHS) -> Iterable[Result]:
    """The final validation loss at the suggested rate, as a share of the lowest one, for each width."""
    source = Path(sysconfig.get_paths()["stdlib"])
    data = folder / "sources"
    build([source / "email", source / "asyncio"], data, tokenizer="byte").close()
    for dim in widths:
        fields = {
            "dim": dim, "n_heads": dim // 32, "num_blocks": 2, "max_context": 64, "dropout_rate": 0.0, "seed": 0,
            "phases": [{"steps": STEPS, "batch_size": 16, "seq_len": 65}],
            "eval_every": STEPS, "checkpoint_every": STEPS, "log_every": STEPS,
        }  # fmt: skip
        suggested, _, _ = Experiment(Config(**fields)).find_lr(data)
        mine = _final_loss(fields, suggested, data, folder)
        others = {rate: _final_loss(fields, rate, data, folder) for rate in RATES}
        best = min(others, key=others.__getitem__)
        yield Result(
            what=f"{STEPS} steps at find-lr's {suggested:.2e}, dim {dim}: final loss",
            against=f"x the lowest of {len(RATES)} rates, at {best:g}", measured=mine / others[best], target=1.03,
            at_most=True,
        )  # fmt: skip


def _final_loss(fields: dict[str, Any], rate: float, data: Path, folder: Path) -> float:
    run = Experiment(Config(lr=rate, **fields)).fit(data, folder / f"{fields['dim']}-{rate}")
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
