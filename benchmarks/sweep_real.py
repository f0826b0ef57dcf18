"""A real sweep on real text, on this CPU: twelve short trials, two at once, against the default configuration.

    python benchmarks/sweep_real.py FOLDER [--count 12] [--quick] [--json FILE]

Trains on the sources of Python's standard library. Says how long it took, how many trials reported, what the best one
gave, and what the same training gives with the defaults of the searched fields.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import yaml
from measure import Lines, Result, flags

from roxxel_dist.sweep.study.folder import read_study

ROOT = Path(__file__).parent.parent
SWEEP = ROOT / "sweeps" / "demo.yaml"
COUNT, QUICK_COUNT = 12, 4
MINUTES = 15
"""What twelve trials may take."""


def roxxel(*words: object, stdout: int | None = None) -> str:
    """Run the command; returns what it printed, where `stdout` is a pipe."""
    command, env = [sys.executable, "-m", "roxxel_dist", *map(str, words)], os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=stdout, text=True).stdout


def build_corpus(data: Path, *tokenizer: object) -> None:
    """A data set of the sources of Python's standard library; its tokenizer is bpe where none is named."""
    left_out = ("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
    words = tokenizer or ("bpe", "--vocab_size", 1024)
    roxxel("data", "build", sysconfig.get_paths()["stdlib"], "--out", data, "--include", "*.py", "--exclude", *left_out,
           "--tokenizer", *words)  # fmt: skip


def default_loss(folder: Path) -> float:
    """The best val_loss of the sweep's constants with the defaults of everything else."""
    told = yaml.safe_load(SWEEP.read_text())["parameters"]
    constants = {name: one["value"] for name, one in told.items() if "value" in one}
    (folder / "default.yaml").write_text(yaml.safe_dump(constants))
    run = folder / "default"
    roxxel("train", "--config", folder / "default.yaml", "--data_path", folder / "data", "--run_dir", run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return min(row["val_loss"] for row in rows if "val_loss" in row)


def sweeping(folder: Path, count: int) -> Iterable[Result]:
    """The sweep, then the same training with the defaults."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_corpus(folder / "data")
    study, begun = folder / "study", time.monotonic()
    roxxel("sweep", "--sweep_config", SWEEP, "--data_path", folder / "data", "--study", study,
           "--count", count, "--workers", 2)  # fmt: skip
    took = time.monotonic() - begun
    found = read_study(study)
    reported = sum(bool(one.reports) for one in found.history.trials.values())
    best, usual = float(found.done[0].value or 0), default_loss(folder)
    what = f"a sweep of {count} trials"
    yield Result(what=what, against="minutes", measured=took / 60, target=MINUTES * count / COUNT, at_most=True)
    yield Result(what=what, against="trials that reported", measured=reported, target=count)
    yield Result(
        what=f"{what}: the best val_loss", against="x that of the defaults", measured=best / usual, target=1.0,
        at_most=True, note=f"{best:.4f}, the defaults {usual:.4f}",
    )  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int)
    asked = parser.parse_args()
    report = Lines(asked.json)
    count = asked.count or (QUICK_COUNT if asked.quick else COUNT)
    report.add("a real sweep", lambda: sweeping(asked.folder, count))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
