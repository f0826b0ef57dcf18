"""What the copies in shared memory take from the training loop, with `memory_checkpoint_every: auto`.

python benchmarks/train_memory.py [FOLDER]

Blocks of steps of one run take turns, with the copies and without them.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from measure import Result, table
from training import make_trainer, random_tokens

from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.process.exit_codes import MEMORY_ENV

SIZES = {"small": (64, 4, 60, 61), "large": (320, 10, 20, 31)}
"""Width, blocks, steps of a turn, and turns."""
NEVER = 1_000_000


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        data = random_tokens(Path(folder, "tokens.rox"), 1 << 21, 512)
        print(table(list(memory(data, Path(folder)))))


def memory(data: Roxxel, folder: Path, sizes: Mapping[str, tuple[int, int, int, int]] = SIZES) -> Iterable[Result]:
    """Steps with and without the copies, in turns."""
    for name, (width, blocks, steps, turns) in sizes.items():
        model = ModelConfig(dim=width, num_blocks=blocks, max_context=512, vocab_size=512)
        with memory_folder():
            phase = Phase(steps * (turns + 1) + 30, 4, 65)
            options = {"log_every": 20, "eval_every": NEVER, "checkpoint_every": NEVER}
            trainer = make_trainer(data, [phase], model, folder / name, **options)
            size = sum(leaf.nbytes for leaf in trainer.state.params.values()) * 3
            more, off, taken = take_turns(trainer, steps)
            trainer.close()
        what = f"a state of {size / 1e6:.0f} MB"
        yield Result(
            what=f"copies of {what}, wall clock", against="% of the steps without, median of pairs of turns",
            measured=100 * (more - 1), target=1.0, at_most=True,
        )  # fmt: skip
        yield Result(what="a step without", against="ms", measured=1000 * off)
        yield Result(what="that the loop waited for a copy", against="ms", measured=1000 * statistics.median(taken))
        yield Result(what="copies", against="in 1,000 steps", measured=1000 * len(taken) / (steps * turns / 2))


def take_turns(trainer: Any, block: int) -> tuple[float, float, list[float]]:
    """(a step with copies / without, seconds of one without, seconds of each copy), the first two turns left out."""
    saves, taken, times = trainer.loop.saves, [], ([], [])
    tier = saves.memory
    save, state = tier.save, {"turn": 0, "began": 0.0}

    def timed(*values: Any) -> None:
        begun = time.perf_counter()
        save(*values)
        taken.append(time.perf_counter() - begun)

    def before(step: int) -> None:
        if step < 30 or (step - 30) % block:
            return
        trainer.loop.throttler.wait_for_all()
        now = time.perf_counter()
        if state["turn"]:
            times[state["turn"] % 2].append((now - state["began"]) / block)
        state["turn"] += 1
        if state["turn"] % 2:  # without: for the tier this turn does not happen
            saves.memory = None
        else:
            saves.memory = tier
            tier.drop(step)
        state["began"] = time.perf_counter()

    tier.save, trainer.before = timed, before
    trainer.run()
    saves.memory = tier
    with_copies, without = times[0][1:], times[1][1:]
    ratios = [on / off for on, off in zip(with_copies, without, strict=False)]
    return statistics.median(ratios), statistics.median(without), taken


@contextmanager
def memory_folder() -> Iterator[None]:
    """As the launcher makes it for a job."""
    folder = tempfile.mkdtemp(prefix="bench-memory-", dir="/dev/shm")
    os.environ[MEMORY_ENV] = folder
    try:
        yield
    finally:
        del os.environ[MEMORY_ENV]
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
