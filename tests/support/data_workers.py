"""A program with data workers, as data loaders have them: it saves when it is asked to stop, and resumes.

`roxxel-dist launch … -- python data_workers.py FOLDER STEPS`. The batches come from processes that it spawns. When all
steps are done, FOLDER/state.npz holds what an undisturbed run has, to the bit.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

SAVED = 42
WIDTH = 32
AHEAD = 3


def batch(step: int) -> np.ndarray:
    """Rows [8, WIDTH] of a step, float32, as a worker makes them."""
    return np.random.default_rng(step).standard_normal((8, WIDTH), np.float32)


def main(folder: Path, steps: int) -> int:
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    file = folder / "state.npz"
    weights, done = np.zeros(WIDTH, np.float32), 0
    if file.exists():
        with np.load(file) as saved:
            weights, done = saved["weights"], int(saved["done"])
    gradient = jax.jit(jax.grad(lambda w, rows: jnp.mean((jnp.tanh(rows @ w) - rows[:, 0]) ** 2)))
    mine = slice(jax.process_index(), None, jax.process_count())
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        rows = deque(workers.submit(batch, step) for step in range(done + 1, done + 1 + AHEAD))
        while done < steps:
            rows.append(workers.submit(batch, done + 1 + AHEAD))
            part = gradient(weights, rows.popleft().result()[mine])
            both = multihost_utils.process_allgather((np.asarray(part), np.array(bool(stop))))
            weights, done = weights - 0.1 * np.asarray(both[0]).mean(0), done + 1
            if jax.process_index() == 0:
                (folder / "step").write_text(str(done))
            if np.asarray(both[1]).any():
                break
    if jax.process_index() == 0:
        with (folder / "state.part").open("wb") as part_file:
            np.savez(part_file, weights=weights, done=done)
        os.replace(folder / "state.part", file)
    multihost_utils.sync_global_devices("saved")
    return 0 if done == steps else SAVED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
