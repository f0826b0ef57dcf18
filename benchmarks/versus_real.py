"""Verdicts of `versus` on real text, on this CPU, and whether twenty further pairs, with other seeds, say the same.

    python benchmarks/versus_real.py FOLDER [--quick] [--json FILE]

Trains a small model on the bytes of Python's standard library. Each verdict ends where `versus` ends it; the further
pairs are trials of a sweep over seeds, and all of them count. The same command again continues.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from measure import Lines, Result, flags
from sweep_real import build_corpus, roxxel

from roxxel_dist.sweep.samplers.pairs import Comparison, Pair, compare, comparisons
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.sweep.study.folder import read_study

BASE = {
    "dim": 32, "num_blocks": 2, "n_heads": 4, "max_context": 64, "dropout_rate": 0.0, "lr": 0.004, "warmup_steps": 20,
    "phases": [{"steps": 500, "batch_size": 16, "seq_len": 65}], "log_every": 250, "eval_every": 250,
    "eval_iters": 32, "val_fraction": 0.02, "seed": 1,
}  # fmt: skip
CHANGES = {"lr": 0.002, "dropout_rate": 0.1}
"""B of each comparison; A is BASE."""
FURTHER, QUICK_FURTHER = range(1001, 1021), range(1001, 1004)
"""Seeds."""


def comparing(folder: Path, name: str, seeds: range) -> Iterable[Result]:
    """The verdict on one field, then the further pairs."""
    base, data, to = folder / "base.yaml", folder / "data", CHANGES[name]
    common = ("--data_path", data, "--workers", 2)
    told = roxxel("versus", base, "--set", f"{name}={to}", "--study", folder / f"versus_{name}", "--json", *common,
                  stdout=subprocess.PIPE)  # fmt: skip
    found = json.loads(told)
    what = f"{name} {BASE[name]} against {to}"
    yield Result(what=what, against="val_loss, A less B", measured=found["difference"], note=found["text"])
    values = {"seed": {"values": [*seeds]}, name: {"values": [BASE[name], to]}}
    metric = {"name": "val_loss", "goal": "minimize"}
    search, study = folder / f"{name}.yaml", folder / f"further_{name}"
    search.write_text(yaml.safe_dump({"method": "grid", "metric": metric, "parameters": values}))
    roxxel("sweep", "--sweep_config", search, "--config", base, "--study", study, *common)
    pairs = pairs_of(study, name)
    versus = Versus(changes={name: to}, names={})
    whole, *_, ended = compare(pairs, versus, 1.0), *comparisons(pairs, versus, 1.0)
    yield Result(
        what=f"{what}: {len(pairs)} further pairs", against="val_loss, A less B", measured=whole.difference,
        note=f"{whole.text()}; looked at after each: {ended.text()}", failed=differing(found["verdict"], whole, ended),
    )  # fmt: skip


def pairs_of(study: Path, name: str) -> list[Pair]:
    """The last val_loss of both trials of each seed."""
    values: dict[tuple[int, Any], float] = {
        (one.params["seed"], one.params[name]): one.reports[-1][1] for one in read_study(study).history.trials.values()
    }
    return [
        Pair(seed=seed, a=values[seed, BASE[name]], b=values[seed, CHANGES[name]])
        for seed in sorted({seed for seed, _ in values})
    ]


def differing(verdict: str, *others: Comparison) -> str:
    """What is wrong where a verdict is not that of the others."""
    names = {verdict, *(one.verdict for one in others)}
    return "" if len(names) == 1 else f"verdicts: {', '.join(sorted(names))}"


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    report, folder = Lines(asked.json), asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    if not (folder / "data").exists():
        build_corpus(folder / "data", "byte")
    for name in CHANGES:
        report.add(name, lambda: comparing(folder, name, QUICK_FURTHER if asked.quick else FURTHER))  # noqa: B023
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
