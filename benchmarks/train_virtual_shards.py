"""What exactness on any devices costs: steps with virtual shards against ordinary ones, on simulated devices.

    python benchmarks/train_virtual_shards.py [FOLDER] [--quick] [--json FILE]

Both kinds of steps take turns in the same processes, which this program starts with `launch local`; the median of the
ratios of neighbours counts. "dispatch" is the CPU time of the main thread in the call of a step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure import Lines, Result, flags
from training import random_tokens

CASES = [
    (1, 8, 8, False, 1.10), (1, 8, 8, True, 1.10), (2, 2, 4, False, 1.10), (1, 8, 16, False, None),
    (1, 8, 32, False, None), (2, 2, 8, False, None), (2, 2, 16, False, None),
]  # fmt: skip
"""Processes, devices of each, virtual shards, whether both kinds of steps have fsdp, and the most that a step may take,
of an ordinary one."""
DISPATCH_MS = 1.0
ROWS, LENGTH = 32, 129
CONFIG: dict[str, Any] = {
    "dim": 128, "num_blocks": 4, "kv_heads": 2, "head_size": 32, "max_context": 256, "vocab_size": 512, "lr": 1e-3,
    "phases": [{"steps": 1000, "batch_size": ROWS, "seq_len": LENGTH}], "val_fraction": 0.0, "wandb": "off",
}  # fmt: skip


def taking_turns(tokens: Path, shards: int, turns: int, *, fsdp: bool) -> dict[str, Any]:
    """In each process of a launch: "wall", "cpu" and "dispatch", seconds of both kinds of steps, ordinary first."""
    import jax

    from roxxel_dist import Config, Roxxel
    from roxxel_dist.cluster.determinism import pin_for_shards
    from roxxel_dist.cluster.distributed import initialize
    from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
    from roxxel_dist.input.stream import Stream
    from roxxel_dist.run.components import build_components
    from roxxel_dist.train.step.compile import AotCompiler
    from roxxel_dist.train.step.optimizer import as_optimizer
    from roxxel_dist.train.step.step import SPIKE_FACTOR
    from roxxel_dist.train.steps import StepOptions, make_steps

    pin_for_shards(shards)
    initialize()
    parts = build_components(Config(**CONFIG), Roxxel(tokens))
    mesh, optimizer = make_mesh(fsdp=jax.device_count() if fsdp else 1), as_optimizer(parts.optimizer)
    sharding, compiler = batch_sharding(mesh), AotCompiler(mesh)
    stream = iter(Stream(parts.curriculum.plan(0), parts.curriculum.datasets, sharding, 0))
    kinds: list[Any] = []
    numbers = optimizer.settings(CONFIG["phases"][0]["steps"]) | {SPIKE_FACTOR: 0.0}
    for count in (0, shards):
        options = StepOptions(fsdp=fsdp, virtual_shards=count)
        steps = make_steps(parts.build, parts.loss, optimizer, mesh, options, numbers)
        state, hparams = steps.init()
        compiler.prepare(count, steps.train, state, hparams, next(stream))
        kinds.append([compiler.get_together(count), state, hparams])
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ("wall", "cpu", "dispatch")}
    for turn in range(turns):
        for kind in (0, 1) if turn % 2 else (1, 0):
            step, state, hparams = kinds[kind]
            batch = jax.block_until_ready(next(stream))
            begun = time.perf_counter(), time.process_time(), time.thread_time()
            state, metrics = step(state, hparams, batch)
            dispatched = time.thread_time()
            jax.block_until_ready((getattr(state, "parts", state), metrics))
            kinds[kind][1] = state
            for name, spent in (
                ("wall", time.perf_counter() - begun[0]),
                ("cpu", time.process_time() - begun[1]),
                ("dispatch", dispatched - begun[2]),
            ):
                times[name][kind].append(spent)
    compiler.close()
    return times if jax.process_index() == 0 else {}


def against_ordinary(folder: Path, case: tuple[int, int, int, bool, float | None], turns: int) -> Iterable[Result]:
    """The rows of a case."""
    processes, devices, shards, fsdp, target = case
    launch = ["launch", "local", "--nprocs", processes, "--devices-per-proc", devices, "--max-restarts", 0, "--"]
    words = [sys.executable, "-m", "roxxel_dist", *launch, "python", __file__, folder, "--turns", turns]
    done = subprocess.run(
        [str(word) for word in (*words, "--shards", shards, *["--fsdp"] * fsdp)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
    times = json.loads((folder / "times.json").read_text())
    late = {name: [kind[turns // 4 :] for kind in both] for name, both in times.items()}
    wall, cpu = ([after / before for before, after in zip(*late[name], strict=True)] for name in ("wall", "cpu"))
    ms = [1e3 * statistics.median(kind) for kind in late["wall"]]
    what = f"a step on {processes} x {devices} simulated devices, {shards} virtual shards{', fsdp' * fsdp}"
    yield Result(
        what=what, against="x an ordinary one", measured=statistics.median(wall), target=target, at_most=True,
        note=f"{ms[0]:.0f} and {ms[1]:.0f} ms, {statistics.median(cpu):.2f} x its CPU time; {turns} turns",
    )  # fmt: skip
    before, after = (1e3 * statistics.median(kind) for kind in late["dispatch"])
    yield Result(
        what=f"dispatch of {what}", against="ms of the main thread", measured=after,
        target=DISPATCH_MS if case[:4] == (1, 8, 8, False) else None, at_most=True,
        note=f"{before:.2f} ms of an ordinary one",
    )  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", nargs="?", help="a folder on a disk")
    parser.add_argument("--shards", type=int, help="of a process of a launch: so many virtual shards")
    parser.add_argument("--fsdp", action="store_true", help="of such a process: with fsdp")
    parser.add_argument("--turns", type=int, default=60, help="steps of each kind")
    options = parser.parse_args()
    if options.shards:
        folder = Path(options.folder)
        if times := taking_turns(folder / "tokens.rox", options.shards, options.turns, fsdp=options.fsdp):
            (folder / "times.json").write_text(json.dumps(times))
        return 0
    report = Lines(options.json)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        random_tokens(folder / "tokens.rox", 1 << 21, 512)
        for case in CASES[:3] if options.quick else CASES:
            turns = 20 if options.quick else options.turns
            report.add("virtual shards", lambda case=case, turns=turns: against_ordinary(folder, case, turns))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
