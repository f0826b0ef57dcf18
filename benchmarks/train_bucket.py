"""What a run that is kept in a bucket takes from the training loop, over the same run in a folder.

python benchmarks/train_bucket.py [FOLDER] [--quick] [--json FILE]

Both runs log every 10 steps and save every 50. Each takes turns with the bare compiled step, which is what they are
compared by: the machine is the same for a run and its bare step. The server (MinIO's gateway of JuiceFS) takes a share
of the same cores, so the main thread's CPU time says what the loop does, and the wall clock is an upper bound.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from measure import Lines, Result, flags
from training import make_trainer, random_tokens, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from servers import S3Server

from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.place.bucket_run import BucketRun

BLOCK, OFFSET = 100, 50
TURNS = 8
NEVER = 1_000_000
CLOCKS = (time.thread_time, time.perf_counter)
MODEL = ModelConfig(dim=64, num_blocks=4, max_context=512, vocab_size=512)


def times(data: Roxxel, folder: Path, turns: int, **more: Any) -> list[list[float]]:
    """[seconds a step of the run, of the bare step] of the main thread's CPU and of the wall clock."""
    phase = Phase(BLOCK * (turns + 1) + OFFSET, 4, 65)
    trainer = make_trainer(
        data, [phase], MODEL, folder, log_every=10, eval_every=NEVER, checkpoint_every=50, max_to_keep=2, **more
    )
    try:
        return take_turns(trainer, BLOCK, OFFSET, CLOCKS)
    finally:
        trainer.close()


def loop(folder: Path, turns: int) -> Iterable[Result]:
    """A run in a folder, and one in a bucket."""
    data = random_tokens(folder / "tokens.rox", 1 << 21, MODEL.vocab_size)
    local = times(data, folder / "local", turns)
    with S3Server(folder / "s3") as server, server.environment():
        bucket = BucketRun(server.url("runs/bench"), folder / "disk")
        bucket.take()
        bucket.begin()
        try:
            remote = times(data, bucket.folder, turns, bucket=bucket)
        finally:
            bucket.close()
    clocks = ("main thread", "wall clock, the server on the same cores")
    for name, here, there in zip(clocks, local, remote, strict=True):
        ratio = (there[0] / there[1]) / (here[0] / here[1])
        each = "{:.2f} ms a step, {:.2f} bare"
        note = each.format(*(1e3 * s for s in there)) + "; in a folder " + each.format(*(1e3 * s for s in here))
        yield Result(what=f"a run in a bucket, {name}", against="x a run in a folder", measured=ratio, note=note)


def main() -> int:
    """Print the table."""
    parser: argparse.ArgumentParser = flags(__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    options = parser.parse_args()
    report = Lines(options.json)
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve()) as folder:
        report.add("the loop", partial(loop, Path(folder), TURNS // 2 if options.quick else TURNS))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
