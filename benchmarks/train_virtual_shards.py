"""What exactness on any devices costs: steps with virtual shards against ordinary ones, on simulated devices.

    python benchmarks/train_virtual_shards.py [FOLDER] [--quick] [--json FILE]

Runs of the command take turns; the median of a run's logged ms/step counts, without its first third.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from measure import Lines, Result, flags
from training import random_tokens

CASES = [(1, 8, 8, 1.10), (2, 2, 4, 1.10), (1, 4, 8, None), (1, 2, 8, None)]
"""Processes, devices of each, virtual shards, and the most that a step may take, of an ordinary one."""
CONFIG: dict[str, Any] = {
    "dim": 128, "num_blocks": 4, "kv_heads": 2, "head_size": 32, "max_context": 256, "vocab_size": 512, "lr": 1e-3,
    "log_every": 1, "eval_every": 1_000_000, "checkpoint_every": 1_000_000, "memory_checkpoint_every": 0,
    "export_weights": False, "wandb": "off", "val_fraction": 0.0,
}  # fmt: skip


def ms_per_step(folder: Path, processes: int, devices: int, shards: int, steps: int) -> float:
    """Of one run."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    phase = {"steps": steps, "batch_size": 16, "seq_len": 129}
    config = CONFIG | {"phases": [phase], "virtual_shards": shards}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = [
        sys.executable,
        "-m",
        "roxxel_dist",
        "launch",
        "local",
        "--nprocs",
        processes,
        "--devices-per-proc",
        devices,
    ]
    words += ["--", "train", "--config", "config.yaml", "--data_path", "tokens.rox", "--run_dir", run]
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["ms_per_step"] for row in rows[steps // 3 :])


def against_ordinary(
    folder: Path, case: tuple[int, int, int, float | None], steps: int, turns: int
) -> Iterable[Result]:
    """One row."""
    processes, devices, shards, target = case
    pairs = [[ms_per_step(folder, processes, devices, count, steps) for count in (0, shards)] for _ in range(turns)]
    ordinary, sharded = (statistics.median(values) for values in zip(*pairs, strict=True))
    yield Result(
        what=f"a step on {processes} x {devices} simulated devices, {shards} virtual shards",
        against="x an ordinary one",
        measured=statistics.median(after / before for before, after in pairs), target=target, at_most=True,
        note=f"{ordinary:.0f} and {sharded:.0f} ms; {turns} turns",
    )  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", nargs="?", help="a folder on a disk")
    options = parser.parse_args()
    report = Lines(options.json)
    steps, turns = (30, 1) if options.quick else (60, 3)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        random_tokens(folder / "tokens.rox", 1 << 21, 512)
        for case in CASES:
            report.add("virtual shards", lambda case=case: against_ordinary(folder, case, steps, turns))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
