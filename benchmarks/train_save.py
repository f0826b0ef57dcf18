"""What a checkpoint takes from the training loop, against a save that the loop waits for.

python benchmarks/train_save.py [FOLDER]
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from measure import Result, table

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster.mesh import make_mesh, replicate

LEAVES, SHAPE = 82, (732, 1000)
"""240 MB of float32."""
SMALL = (64, 64)
ROUNDS = 7


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        print(table([*saving(Path(folder)), *digests(Path(folder)), *restoring(Path(folder))]))


def saving(folder: Path, rounds: int = ROUNDS) -> list[Result]:
    """Saves in the background and saves that are waited for, in turns."""
    state, step = make_state(SHAPE), jax.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    store = CheckpointStore(folder / "large", max_to_keep=1)
    begun: list[float] = []
    whole: list[float] = []
    after: list[float] = []
    quiet: list[float] = []
    for number in range(2 * rounds):
        in_background = number % 2 == 0
        start = time.perf_counter()
        store.save(number, state, {})
        if not in_background:
            store.wait()
        (begun if in_background else whole).append(time.perf_counter() - start)
        for times in (after, quiet) if in_background else ():
            start = time.perf_counter()
            state = jax.block_until_ready(step(state))
            times.append(time.perf_counter() - start)
            store.wait()
    store.close()
    size, median = "save of 240 MB", statistics.median
    ratio = median(begun[1:]) / median(whole)
    return [
        Result(
            what=f"async {size}, taken from the loop",
            against="x a synchronous one",
            measured=ratio,
            target=0.10,
            at_most=True,
        ),
        Result(what=f"async {size}, taken from the loop", against="ms", measured=1000 * median(begun[1:])),
        Result(what="the first one of a process", against="ms", measured=1000 * begun[0]),
        Result(what=f"synchronous {size}", against="ms", measured=1000 * median(whole)),
        Result(
            what="longer step while it is written, its state donated",
            against="ms",
            measured=1000 * (median(after) - median(quiet)),
        ),
    ]


def digests(folder: Path, rounds: int = ROUNDS) -> list[Result]:
    """What hashing adds to a save and to a restore of 240 MB: the same by Orbax alone, in turns."""
    state = make_state(SHAPE)
    costs: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    store, handler, bare = CheckpointStore(folder / "hashed", 1), files.array_handler(), folder / "bare"
    bare.mkdir()
    for number in range(rounds):

        def save(number: int = number) -> None:
            store.save(number, state, {})
            store.wait()

        def restore(number: int = number) -> None:
            jax.block_until_ready(store.restore(number, state))

        def bare_save(number: int = number) -> None:
            shutil.rmtree(bare / str(number - 1), ignore_errors=True)
            for written in files.begin(handler, bare / str(number), state).writes:
                written.result()
            handler.finalize(epath.Path(bare / str(number) / files.STATE))

        def bare_restore(number: int = number) -> None:
            jax.block_until_ready(files.restore_state(handler, bare / str(number), state, whole=True))

        for what, hashed, call in (
            ("save", True, save),
            ("restore", True, restore),
            ("save", False, bare_save),
            ("restore", False, bare_restore),
        ):
            costs.setdefault((what, hashed), []).append(cost(call))
    store.close()
    handler.close()
    results = []
    for what, target in (("save", 0.03), ("restore", 0.10)):
        for unit, name in enumerate(("CPU time", "wall time")):
            # The least of several: what other programs on the machine add is no part of it.
            with_them, without = (min(each[unit] for each in costs[what, hashed][1:]) for hashed in (True, False))
            results.append(
                Result(
                    what=f"digests in a {what} of 240 MB, more {name}",
                    against="x one without",
                    measured=with_them / without - 1,
                    target=target if unit == 0 else None,
                    at_most=True,
                )
            )
            results.append(Result(what=f"{what} of 240 MB without, {name}", against="ms", measured=1000 * without))
    return results


def cost(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of all the process's threads, and of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def restoring(folder: Path) -> list[Result]:
    """What a restart spends on the checkpoint of a small model."""
    state = make_state(SMALL)
    store = CheckpointStore(folder / "small")
    store.save(1, state, {"plan": {}})
    store.close()
    times = {"open, newest step, meta": [], "restore of 82 leaves": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        store = CheckpointStore(folder / "small")
        step = store.latest_step() or 0
        store.meta(step)
        times["open, newest step, meta"].append(time.perf_counter() - start)
        times["restore of 82 leaves"].append(seconds(lambda store=store, step=step: store.restore(step, state)))
        store.close()
    return [Result(what=what, against="ms", measured=1000 * statistics.median(found)) for what, found in times.items()]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def make_state(shape: tuple[int, int]) -> Any:
    rng = np.random.default_rng(0)
    leaves = {f"w{i}": rng.standard_normal(shape, np.float32) for i in range(LEAVES)}
    return jax.block_until_ready(replicate(leaves, make_mesh()))


if __name__ == "__main__":
    main()
