"""A real sweep on real text, on this CPU: twelve short trials, two at once, against the default configuration.

    python benchmarks/sweep_real.py FOLDER [--count 12]

Trains on the sources of Python's standard library. Says how long it took, how many trials reported, what the best one
gave, and what the same training gives with the defaults of the searched fields.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import yaml

from roxxel_dist.sweep.study import read_study

ROOT = Path(__file__).parent.parent
SWEEP = ROOT / "sweeps" / "demo.yaml"
LIMIT_S = 15 * 60


def roxxel(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "roxxel_dist", *map(str, words)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def default_loss(folder: Path) -> float:
    """The best val_loss of the sweep's constants with the defaults of everything else."""
    told = yaml.safe_load(SWEEP.read_text())["parameters"]
    constants = {name: one["value"] for name, one in told.items() if "value" in one}
    (folder / "default.yaml").write_text(yaml.safe_dump(constants))
    run = folder / "default"
    roxxel("train", "--config", folder / "default.yaml", "--data_path", folder / "data", "--run_dir", run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return min(row["val_loss"] for row in rows if "val_loss" in row)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=12)
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    asked.folder.mkdir(parents=True)
    source = sysconfig.get_paths()["stdlib"]
    left_out = ("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
    roxxel("data", "build", source, "--out", asked.folder / "data", "--tokenizer", "bpe", "--vocab_size", 1024,
           "--include", "*.py", "--exclude", *left_out)  # fmt: skip
    study, begun = asked.folder / "study", time.monotonic()
    roxxel("sweep", "--sweep_config", SWEEP, "--data_path", asked.folder / "data", "--study", study,
           "--count", asked.count, "--workers", 2)  # fmt: skip
    took = time.monotonic() - begun
    found = read_study(study)
    reported = sum(bool(one.reports) for one in found.history.trials.values())
    best, usual = found.done[0], default_loss(asked.folder)
    print(f"\n{'':32}  seen        target")
    print(f"{'minutes':32}  {took / 60:<10.1f}  {LIMIT_S / 60:g}  {'met' if took <= LIMIT_S else 'NOT MET'}")
    met = "met" if reported == asked.count else "NOT MET"
    print(f"{'trials that reported':32}  {reported:<10}  {asked.count}  {met}")
    met = "met" if float(best.value or 0) < usual else "NOT MET"
    print(f"{'best val_loss, beside the default':32}  {best.value:<10.4f}  < {usual:.4f}  {met}")


if __name__ == "__main__":
    main()
