"""A restart of a run against its cold start: whole processes of the command line, from nothing to the first row logged.

python benchmarks/train_restart.py [FOLDER]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from measure import Result, table

from roxxel_dist.data.dataset import Roxxel

ROUNDS = 2
LIMIT_S = 300.0
MODELS = {
    "demo's model": ["--dim", "128", "--num_blocks", "4"],
    "14 blocks": ["--dim", "128", "--num_blocks", "14"],
}
"""The one of `make demo`, and a deeper one."""
CONFIG = """
phases:
  - {steps: 320, batch_size: 16, seq_len: 129}
  - {steps: 80, batch_size: 8, seq_len: 257}
log_every: 1
eval_every: 1000
checkpoint_every: 4
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        print(table(restarts(Path(folder))))


def restarts(folder: Path, rounds: int = ROUNDS) -> Iterable[Result]:
    """Cold starts and restarts in turns; what a killed run had cached and saved is what its restart finds."""
    data, config = folder / "corpus.rox", folder / "config.yaml"
    tokens = np.random.default_rng(0).integers(0, 2048, 1 << 20, np.uint16)
    Roxxel(data).write([tokens], separator=None, vocab_size=2048)
    config.write_text(CONFIG, encoding="utf-8")
    for name, model in MODELS.items():
        cold, warm = [], []
        for number in range(rounds):
            run, cache = folder / f"run-{len(name)}-{number}", folder / f"cache-{len(name)}-{number}"
            command = [sys.executable, "-m", "roxxel_dist", "train", "--config", config, "--data_path", data]
            command += ["--run_dir", run, "--resume", *model]
            cold.append(seconds_to_first_row(command, cache, run, until_saved=8))
            warm.append(seconds_to_first_row(command, cache, run))
        what, median = f"restart to its first step, {name}", statistics.median
        yield Result(
            what=what, against="x the cold start", measured=median(warm) / median(cold), target=0.35, at_most=True
        )
        yield Result(what=what, against="s", measured=median(warm))
        yield Result(what=f"cold start to its first step, {name}", against="s", measured=median(cold))


def seconds_to_first_row(command: list[object], cache: Path, run: Path, until_saved: int = 0) -> float:
    """Seconds until a new process has logged a step; it is killed when the checkpoint of `until_saved` is there."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = []
        for line in process.stdout or ():
            said.append(line)
            if line.startswith("Step"):
                break
        else:
            raise RuntimeError(f"the run ended before its first step:\n{''.join(said)}")
        taken = time.perf_counter() - start
        while until_saved and not (run / "checkpoints" / str(until_saved)).is_dir():
            if time.perf_counter() - start > LIMIT_S or process.poll() is not None:
                raise RuntimeError(f"step {until_saved} was not saved within {LIMIT_S:.0f} s")
            time.sleep(0.05)
        return taken
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
