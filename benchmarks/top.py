"""What `roxxel-dist top` costs: CPU seconds of a frame of a run of a million rows, and of a folder of 100 runs.

python benchmarks/top.py [--rows N] [--runs N]
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from roxxel_dist.view.run import RunReader

LIVE_S = 10


def write_run(run: Path, rows: int) -> None:
    """A run's logs as a training writes them: a row of metrics and one of the timeline a logged step."""
    run.mkdir(parents=True)
    with (run / "metrics.jsonl").open("w") as metrics, (run / "timeline.jsonl").open("w") as timeline:
        for step in range(1, rows + 1):
            row = {
                "step": step, "train_loss": 2 + 3 / step**0.5, "train_bal": 0.0, "ms_per_step": 6.927796600211877,
                "tokens_per_s": 19053.677181567797, "phase": 1, "tokens": step * 4096, "ram_gb": 0.541679616,
                "grad_norm": 0.9930827021598816, "lr": 3.182659611411509e-06, "digest": "5" * 32,
            } | ({"val_loss": 2 + 3.1 / step**0.5} if step % 100 == 0 else {})  # fmt: skip
            metrics.write(json.dumps(row) + "\n")
            spent = {"attempt": 0, "activity": "step", "begin": 1.7e9 + step, "seconds": 1.0, "steps": [step, step]}
            timeline.write(json.dumps(spent) + "\n")


def once(*words: str) -> tuple[float, float]:
    """(CPU, wall) seconds of `top --once`, its start included: the best of three."""
    times = []
    for _ in range(3):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "roxxel_dist", "top", "--once", *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((cpu, time.perf_counter() - begun))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long, runs = Path(folder, "long"), Path(folder, "runs")
        write_run(long, args.rows)
        write_run(runs / "0", 10_000)
        for number in range(1, args.runs):
            shutil.copytree(runs / "0", runs / str(number))
        cpu, _ = once(str(long))
        print(f"a run of {args.rows:,} rows, one frame: {cpu:.2f} s CPU")
        cpu, wall = once(str(runs))
        print(f"{args.runs} runs in a folder, first frame: {wall:.2f} s, {cpu:.2f} s CPU")
        reader = RunReader(long)
        reader.read()
        begun = time.process_time()
        with (long / "metrics.jsonl").open("a") as file:
            for step in range(LIVE_S):
                file.write(json.dumps({"step": args.rows + step, "train_loss": 2.0}) + "\n")
                file.flush()
                reader.read()
        print(f"then, read once a second: {(time.process_time() - begun) / LIVE_S:.2%} of a core, the drawing aside")


if __name__ == "__main__":
    main()
