"""Rows that are cut over devices along their tokens: memory, work and time of a device, and what fits an accelerator.

    python benchmarks/long_rows.py [--only NAME] [--quick] [--json FILE] [--tpu PYTHON] [--gpu PYTHON]

Accelerators are compiled for by `plan --target`, with a Python that has their compiler (`make tpu`, `make cuda`). On a
CPU the devices are simulated ones of a process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measure import Lines, Result, flags
from training import random_tokens

ROOT = Path(__file__).parent.parent
LARGE = {"dim": 768, "num_blocks": 12, "kv_heads": 12, "head_size": 64}
SMALL = {"dim": 256, "num_blocks": 2, "kv_heads": 4, "head_size": 64}
MODELS = {"14M": SMALL, "124M": LARGE}
"""With a vocabulary of 50,257, which is tied."""
LONG = 32_769
CPU_MODEL: dict[str, Any] = {
    "dim": 256, "num_blocks": 2, "kv_heads": 4, "head_size": 64, "vocab_size": 8192, "max_context": 65_536,
}  # fmt: skip
SAME_CHUNKS = {"loss_chunk": 1024}
"""With auto one device makes its logits in chunks, and so again in the backward pass, where each of eight has few
enough to make them once: that would count for the eight."""
MEMORY, WORK, TIME, FEW_ROWS, ONCE = 1 / 6, 1.15, 1.15, 1.2, 1.01
"""Targets: of one device's memory, FLOPs and CPU time x devices, FLOPs of 2, 3 and 6 rows x devices, gathered bytes."""


def planned(python: Path, model: str, target: str, rows: int, length: int, **more: Any) -> dict[str, Any]:
    """What `plan --target` says of the training step; `more` are other fields of the configuration."""
    fields = {**MODELS[model], "vocab_size": 50_257, "max_context": 1 << 22, "bf16_compute": True, "val_fraction": 0.0}
    fields |= more | {"phases": [{"steps": 1, "batch_size": rows, "seq_len": length}], "wandb": "off"}
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder, "tokens.rox"), max(1 << 20, 2 * rows * length), 50_257)
        Path(folder, "plan.yaml").write_text(json.dumps(fields))
        words = ["--config", "plan.yaml", "--data_path", "tokens.rox", "--target", target, "--json"]
        done = subprocess.run(
            [python, "-m", "roxxel_dist", "plan", *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)["phases"][0]["target"]


def on_target(python: Path, one: str, many: str, devices: int) -> Iterable[Result]:
    """Memory, FLOPs and gathered bytes of a device of 1 x 32,769, against those of a single one."""
    alone, cut = (planned(python, "14M", target, 1, LONG) for target in (one, many))
    model, here = MODELS["14M"], (LONG - 1) // devices
    once = 2 * 2 * here * model["kv_heads"] * model["head_size"] * (devices - 1) * model["num_blocks"]
    what = f"14M, 1 x {LONG:,} on {many}"
    frugal = [planned(python, "14M", target, 1, LONG, fsdp=True, **SAME_CHUNKS) for target in (one, many)]
    for how, (whole, part) in {"": (alone, cut), ", fsdp and loss_chunk 1,024": frugal}.items():
        yield Result(
            what=f"{what}{how}: memory of a device", against=f"x {one}", target=MEMORY, at_most=True,
            measured=part["peak_bytes"] / whole["peak_bytes"],
            note=f"{whole['peak_bytes'] / 1e9:.2f} and {part['peak_bytes'] / 1e9:.2f} GB",
        )  # fmt: skip
    yield Result(
        what=f"{what}: FLOPs x {devices}", against=f"x {one}", target=WORK, at_most=True,
        measured=cut["flops_per_device"] * devices / alone["flops_per_device"],
    )  # fmt: skip
    yield Result(
        what=f"{what}: bytes that all-gather sends", against="x keys and values of each layer, forward and backward",
        measured=cut["collectives"].get("all-gather", 0) / (2 * once), target=ONCE, at_most=True,
        note=f"gathered: {', '.join(cut['gathered'])}",
    )  # fmt: skip


def fits(python: Path) -> Iterable[Result]:
    """What sixteen chips have room for."""
    for model, length in (("14M", LONG), ("124M", 131_073)):
        step = planned(python, model, "v5e:4x4", 1, length)
        yield Result(
            what=f"{model}, 1 x {length:,} on v5e:4x4: memory of a device", against="x what it has", at_most=True,
            measured=step["peak_bytes"] / step["device_bytes"], target=1.0, note=f"{step['peak_bytes'] / 1e9:.2f} GB",
        )  # fmt: skip


def largest(python: Path, model: str, quick: bool) -> Iterable[Result]:
    """The longest row of 2^k + 1 tokens that fits."""
    length = 32_768
    for target in ("v5e:2x2", "v5e:4x4", "v5e:8x8")[: 2 if quick else 3]:
        while planned(python, model, target, 1, 2 * length + 1)["fits"]:
            length *= 2
        yield Result(what=f"{model}: the longest row that fits {target}", against="tokens", measured=length + 1)


def step_of(devices: int, rows: int, length: int, fields: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """A compiled training step on simulated devices, and its arguments; `fields` are more ones of the model."""
    import jax
    import numpy as np

    from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
    from roxxel_dist.model.config import ModelConfig
    from roxxel_dist.model.loss import token_losses
    from roxxel_dist.model.transformer import TransformerBuilder
    from roxxel_dist.train.step.compile import AotCompiler
    from roxxel_dist.train.step.optimizer import NamedOptimizer, OptimizerConfig
    from roxxel_dist.train.step.step import SPIKE_FACTOR
    from roxxel_dist.train.steps import StepOptions, make_steps

    mesh, optimizer = make_mesh(devices), NamedOptimizer(OptimizerConfig(lr=1e-3, warmup_steps=0))
    builder = TransformerBuilder(ModelConfig(**CPU_MODEL | fields), 0, 1)
    numbers = {**optimizer.settings(100), SPIKE_FACTOR: 0.0}
    steps = make_steps(builder, token_losses, optimizer, mesh, StepOptions(), numbers)
    state, hparams = steps.init()
    tokens = np.random.default_rng(0).integers(0, CPU_MODEL["vocab_size"], (rows, length)).astype(np.int32)
    batch = jax.device_put(tokens, fit_sharding(steps.sharding, tokens.shape))
    compiler = AotCompiler(mesh)
    compiler.prepare("step", steps.train, state, hparams, batch)
    program = compiler.get("step")
    compiler.close()
    return program, (state, hparams, batch)


def cost_of(devices: int, rows: int, length: int, fields: Mapping[str, Any]) -> tuple[float, int]:
    """(FLOPs, bytes) of a device."""
    from roxxel_dist.devices.program_cost import program_cost
    from roxxel_dist.train.step.compile import StepMemory

    program, _ = step_of(devices, rows, length, fields)
    return program_cost(program.as_text(), [0] * devices).flops, StepMemory.of_program(program).peak


def on_cpu() -> Iterable[Result]:
    """Memory and FLOPs of a simulated device."""
    (alone, whole), (cut, part) = (cost_of(devices, 1, LONG, {}) for devices in (1, 8))
    what = f"1 x {LONG:,} on 8 simulated devices"
    yield Result(what=f"{what}: memory of a device", against="x one", measured=part / whole, target=MEMORY,
                 at_most=True, note=f"{whole / 1e9:.2f} and {part / 1e9:.2f} GB")  # fmt: skip
    yield Result(what=f"{what}: FLOPs x 8", against="x one", measured=8 * cut / alone, target=WORK, at_most=True)


def few_rows() -> Iterable[Result]:
    """2, 3 and 6 rows on 8 simulated devices."""
    for rows in (2, 3, 6):
        alone, cut = (cost_of(devices, rows, 4097, SAME_CHUNKS)[0] for devices in (1, 8))
        yield Result(what=f"{rows} x 4,097 on 8 simulated devices: FLOPs x 8", against="x one",
                     measured=8 * cut / alone, target=FEW_ROWS, at_most=True)  # fmt: skip


def seconds_of(devices: int, steps: int) -> list[float]:
    """CPU seconds of this process for each of some steps of 1 x 8,193."""
    import jax

    program, (state, hparams, batch) = step_of(devices, 1, 8193, SAME_CHUNKS)
    found = []
    for _ in range(steps + 1):
        begun = time.process_time()
        state, _ = jax.block_until_ready(program(state, hparams, batch))
        found.append(time.process_time() - begun)
    return found[1:]


def cpu_time(quick: bool) -> Iterable[Result]:
    """A step on 8 simulated devices and on one, in turns of processes."""
    steps, found = 2 if quick else 5, {1: list[float](), 8: list[float]()}
    for _ in range(1 if quick else 3):
        for devices, times in found.items():
            words = [sys.executable, __file__, "--steps", str(steps), "--devices", str(devices)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            times.extend(json.loads(done.stdout.splitlines()[-1]))
    alone, cut = (statistics.median(times) for times in found.values())
    yield Result(what="1 x 8,193 on 8 simulated devices: CPU time of a step", against="x one", measured=cut / alone,
                 target=TIME, at_most=True, note=f"{alone:.1f} and {cut:.1f} s")  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--only", help="a part of the table: cpu, rows, time, tpu, gpu, fits, largest")
    parser.add_argument("--tpu", type=Path, default=ROOT / ".cache" / "tpu" / "bin" / "python")
    parser.add_argument("--gpu", type=Path, default=ROOT / ".cache" / "cuda" / "bin" / "python")
    parser.add_argument("--steps", type=int, help="print the seconds of so many steps, on --devices")
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.steps or options.only in (None, "cpu", "rows"):
        import jax

        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.steps:
        print(json.dumps(seconds_of(options.devices, options.steps)))
        return 0
    parts = {
        "cpu": on_cpu,
        "rows": few_rows,
        "time": lambda: cpu_time(options.quick),
        "tpu": lambda: on_target(options.tpu, "v5e:1x1", "v5e:2x4", 8),
        "gpu": lambda: on_target(options.gpu, "h100:1x1", "h100:1x8", 8),
        "fits": lambda: fits(options.tpu),
        "largest": lambda: largest(options.tpu, "14M", options.quick),
    }
    report = Lines(options.json)
    for name, part in parts.items():
        if options.only in (None, name):
            report.add("long rows", part)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
