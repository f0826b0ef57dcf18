"""The training loop: what it costs over the bare compiled step, what it fetches, saves, phase boundaries, restarts.

    python benchmarks/train_loop.py [FOLDER] [--only ROW …] [--quick] [--json FILE]

The rows of `train_save.py`, `train_restart.py` and `train_rate.py` are in the table too. Another row is another
function in ROWS.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import train_memory
import train_rate
import train_restart
import train_save
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import Lines, Result, flags
from training import conversions, make_trainer, random_tokens, stall, step_times, take_turns

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.curriculum.plan import Rows
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.digest_chain import DigestChain

LEAVES, VOCABULARY = 86, 512
NEVER = 1_000_000


@dataclass(frozen=True)
class Setting:
    """What all rows share."""

    data: Roxxel
    folder: Path
    quick: bool


def tiny(dim: int = 32) -> ModelConfig:
    """A small Transformer of many blocks."""
    return ModelConfig(dim=dim, num_blocks=14, max_context=512, vocab_size=VOCABULARY)


def main_thread_time(given: Setting) -> Iterable[Result]:
    """CPU time of the main thread, with a row every 50 steps."""
    block, turns = 100, 3 if given.quick else 6
    phase = Phase(block * (turns + 1) + 25, 2, 33)
    options = {"log_every": 50, "eval_every": NEVER, "checkpoint_every": NEVER}
    trainer = make_trainer(given.data, [phase], tiny(), given.folder / "cpu", leaves=LEAVES, **options)
    assert len(trainer.state.params) == LEAVES
    ((mine, bare),) = take_turns(trainer, block, 25, [time.thread_time])
    trainer.close()
    what = f"main thread a step, {LEAVES} leaves"
    yield Result(what=what, against="ms over the bare step", measured=1000 * (mine - bare), target=0.3, at_most=True)
    yield Result(what="the bare step", against="ms of that thread", measured=1000 * bare)


def wall_time(given: Setting) -> Iterable[Result]:
    """Wall clock with a row every 10 steps and a checkpoint every 100; and what is fetched from the devices."""
    block, turns = 100, 3 if given.quick else 4
    steps = block * (turns + 1) + 50
    options = {"log_every": 10, "eval_every": NEVER, "checkpoint_every": 100}
    trainer = make_trainer(given.data, [Phase(steps, 4, 65)], tiny(), given.folder / "wall", **options)
    with conversions(lambda: trainer.step) as converted:
        ((mine, bare),) = take_turns(trainer, block, 50, [time.perf_counter])
    trainer.close()
    intervals = steps / 10 + 1  # the first step is logged too
    yield Result(
        what="wall clock, logging and checkpointing", against="x the bare step", measured=mine / bare, target=1.03,
        at_most=True,
    )  # fmt: skip
    yield Result(what="the bare step", against="ms", measured=1000 * bare)
    yield Result(
        what="host fetches, by the trainer's count", against="a log interval",
        measured=trainer.fetches / intervals, target=1, at_most=True,
    )  # fmt: skip
    yield Result(
        what="steps in which jax.Array became numpy", against="a log interval", measured=len(converted) / intervals,
        target=1, at_most=True,
    )  # fmt: skip


def running_digest(given: Setting) -> Iterable[Result]:
    """What the running digest costs the main thread, and the devices, a step: of a batch of 512 rows."""
    count, rounds = 500, 3 if given.quick else 10
    rows = Rows(np.zeros(512, np.int32), np.arange(512, dtype=np.int64) * 1025, 1025)
    compiler = AotCompiler(make_mesh())
    loss = jax.device_put(np.float32(3.25), NamedSharding(compiler.mesh, P()))
    chain, host, all_of_it = DigestChain(compiler, "", 0), [], []
    for number in range(rounds + 1):
        begun = time.perf_counter()
        digest = [chain.add(rows, loss) for _ in range(count)][-1]
        dispatched = time.perf_counter() - begun
        digest.block_until_ready()
        if number:  # the first one compiles
            host.append(dispatched / count)
            all_of_it.append((time.perf_counter() - begun) / count)
    compiler.close()
    share = statistics.median(all_of_it) / 0.020
    yield Result(what="running digest", against="of a step of 20 ms", measured=share, target=0.01, at_most=True)
    yield Result(what="running digest, main thread", against="us a step", measured=1e6 * statistics.median(host))


def phase_boundary(given: Setting) -> Iterable[Result]:
    """The first step of a phase whose program was compiled ahead; no program comes from a cache here."""
    first = 120
    phases = [Phase(first, 8, 65), Phase(40, 4, 129)]
    options = {"log_every": 50, "eval_every": NEVER, "checkpoint_every": NEVER}
    trainer = make_trainer(given.data, phases, tiny(), given.folder / "phases", **options)

    def is_step(key: Hashable) -> bool:
        return isinstance(key, tuple) and key[0] != "evaluate"

    def compilations() -> list[float]:
        return [seconds for key, seconds in trainer.loop.held.compiler.seconds.items() if is_step(key)]

    def wait(step: int) -> None:
        while step == first // 2 and len(compilations()) < 2:  # ahead of the boundary on a busy machine too
            time.sleep(0.1)

    times = step_times(trainer, wait)
    trainer.close()
    _, compiling = compilations()
    yield Result(
        what="first step of a phase compiled ahead, over the median", against="x its compilation",
        measured=stall(times, first) / compiling, target=0.05, at_most=True,
    )  # fmt: skip
    yield Result(what="that compilation", against="s", measured=compiling)


def saving(given: Setting) -> Iterable[Result]:
    """Saves in the background against saves that are waited for."""
    rounds = 3 if given.quick else train_save.ROUNDS
    return [*train_save.saving(given.folder / "save", rounds), *train_save.digests(given.folder / "digests", rounds)]


def restarting(given: Setting) -> Iterable[Result]:
    """Whole processes: a restart against a cold start, and ranks of a job that are killed."""
    yield from train_restart.restarts(given.folder, 1 if given.quick else train_restart.ROUNDS)
    folder = given.folder / "kills"
    folder.mkdir()
    yield from train_restart.kills(folder, 3 if given.quick else train_restart.KILLS)


def copies(given: Setting) -> Iterable[Result]:
    """Steps with copies of the state in shared memory, against steps without."""
    sizes = train_memory.SIZES
    folder = given.folder / "memory"
    folder.mkdir()
    return train_memory.memory(given.data, folder, {"small": sizes["small"]} if given.quick else sizes)


def suggested_rates(given: Setting) -> Iterable[Result]:
    """Training at the rate that find-lr suggests against training at seven others."""
    return train_rate.suggested_rates(given.folder, train_rate.WIDTHS[:1] if given.quick else train_rate.WIDTHS)


ROWS: list[Callable[[Setting], Iterable[Result]]] = [
    main_thread_time, wall_time, running_digest, phase_boundary, saving, copies, restarting, suggested_rates,
]  # fmt: skip


def main() -> int:
    """Print the table."""
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=[row.__name__ for row in ROWS])
    asked = parser.parse_args()
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    report = Lines(asked.json)
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        given = Setting(random_tokens(folder / "tokens.rox", 1 << 21, VOCABULARY), folder, asked.quick)
        for row in ROWS:
            if asked.only is None or row.__name__ in asked.only:
                report.add((row.__doc__ or "").splitlines()[0], lambda row=row: row(given))
    return report.end()


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
