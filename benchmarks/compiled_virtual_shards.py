"""What exactness on any devices costs by count: FLOPs of a device and bytes that it sends, against an ordinary step.

    python benchmarks/compiled_virtual_shards.py [--quick] [--json FILE]

Both steps have fsdp. They are compiled, and not run: for 8 simulated devices (the model of `train_virtual_shards.py`)
by XLA for CPUs, and, four times as wide, for v5e:4x4 by `roxxel-dist plan --target` with the environment of `make tpu`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from compiled import ENVIRONMENTS
from measure import Lines, Result, flags
from train_virtual_shards import CONFIG

TARGET, DEVICES = "v5e:4x4", 16
LARGER = CONFIG | {"dim": 512, "head_size": 64, "bf16_compute": True, "scan_layers": True}


def simulated(shards: int, folder: Path) -> dict[str, Any]:
    """A training step on 8 simulated devices, in a process of its own."""
    from types import SimpleNamespace

    from roxxel_dist import Config
    from roxxel_dist.cluster.determinism import pin_for_run
    from roxxel_dist.cluster.mesh import batch_sharding, simulate_devices
    from roxxel_dist.input.stream import Stream
    from roxxel_dist.run.components import build_components, open_corpus
    from roxxel_dist.run.estimate.target_steps import TargetCompiler, measure_step

    class Simulated(TargetCompiler):
        def __init__(self) -> None:
            self.target: Any = SimpleNamespace(compiler_options=None)
            self._report = lambda what, is_done: None
            self.device_bytes = None

    pin_for_run(shards, None)
    simulate_devices(8)
    config = Config(**CONFIG, virtual_shards=shards, fsdp=True)
    with open_corpus(config, folder / "tokens.npy", folder / "data") as data:
        components = build_components(config, data)
        mesh, plan = components.mesh(), components.curriculum.plan(0)
        steps = components.steps(mesh, plan.total_steps)
        batch = Stream(plan, components.curriculum.datasets, batch_sharding(mesh), 0).abstract()
    return vars(measure_step(Simulated(), "step", steps, "training", batch, 0.0, steps)[0])


def here(folder: Path, shards: int) -> dict[str, Any]:
    """`simulated` in a process of its own."""
    words = [sys.executable, __file__, "--shards", str(shards), "--folder", str(folder)]
    done = subprocess.run(words, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    return json.loads(done.stdout.splitlines()[-1])


def planned(folder: Path, shards: int) -> dict[str, Any]:
    """A training step of `LARGER` on v5e:4x4."""
    fields = LARGER | {"fsdp": True, "virtual_shards": shards}
    (folder / "config.yaml").write_text(json.dumps(fields))
    words = [ENVIRONMENTS / "tpu" / "bin" / "python", "-m", "roxxel_dist", "plan", "--config", "config.yaml", "--json"]
    words += ["--data_path", "tokens.npy", "--target", TARGET]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)["phases"][0]["target"]


def against_ordinary(what: str, exact: dict[str, Any], ordinary: dict[str, Any]) -> Iterable[Result]:
    """FLOPs and bytes of one over those of the other."""
    sent = [sum(step["collectives"].values()) for step in (exact, ordinary)]
    kinds = [
        ", ".join(f"{kind} {count / 1e6:.1f}" for kind, count in step["collectives"].items())
        for step in (exact, ordinary)
    ]
    yield Result(
        what=f"{what}: FLOPs of a device",
        against="x an ordinary step with fsdp",
        measured=exact["flops_per_device"] / ordinary["flops_per_device"],
        note=f"{exact['flops_per_device']:.4g} and {ordinary['flops_per_device']:.4g}",
    )
    yield Result(
        what=f"{what}: bytes that a device sends",
        against="x an ordinary step with fsdp",
        measured=sent[0] / sent[1],
        note=f"MB: {kinds[0]}; and {kinds[1]}",
    )
    longest = [1e3 * max(step["bound_seconds"].values(), default=0.0) for step in (exact, ordinary)]
    if all(longest):
        yield Result(
            what=f"{what}: the least time of a step, by data sheets",
            against="x an ordinary step with fsdp",
            measured=longest[0] / longest[1],
            note=f"{longest[0]:.3g} and {longest[1]:.3g} ms",
        )


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--shards", type=int, help="of a process that compiles for simulated devices")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.shards is not None:
        print(json.dumps(simulated(asked.shards, asked.folder)))
        return 0
    report = Lines(asked.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 512, 1 << 21).astype(np.uint16))
        cases = [("8 simulated devices, 8 virtual shards", partial(here, folder), 8)]
        if not asked.quick:
            cases.append((f"{TARGET}, {DEVICES} virtual shards", partial(planned, folder), DEVICES))
        for what, cost, shards in cases:
            report.add(what, lambda what=what, cost=cost, of=shards: against_ordinary(what, cost(of), cost(0)))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
