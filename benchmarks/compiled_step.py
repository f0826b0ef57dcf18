"""A training step that the compiler of an accelerator makes, without one: FLOPs, bytes, bytes sent, kernels.

    python benchmarks/compiled_step.py TARGET [--plain] [--hlo FILE] [FIELD=VALUE ...]

Such as h200:1x1 rows=32 length=1025 num_blocks=2. Fields are those of a configuration; --plain compiles the step of
`plain_step.py` in place of ours. Needs a Python that has the compiler: `make cuda`, `make tpu`.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from roxxel_dist.devices.targets import parse_target

FIELDS: dict[str, Any] = {
    "dim": 768, "num_blocks": 12, "n_heads": 12, "vocab_size": 50_304, "max_context": 1024, "bf16_compute": True,
    "val_fraction": 0.0, "wandb": "off",
}  # fmt: skip


def measured(
    devices: Any,
    rows: int,
    length: int,
    fields: Mapping[str, Any],
    *,
    plain: bool = False,
    hlo: str = "",
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Of a step of `rows` x `length` tokens: flops, bytes, sent, launches, roofline_ms, peak_bytes, parts.

    Of the devices of a target in a process with its environment and with the compiler's options of it.
    """
    import jax

    from roxxel_dist.devices.program_cost import program_cost
    from roxxel_dist.devices.targets import hosts_of
    from roxxel_dist.run.estimate.step_costs import costs_of, roofline_seconds
    from roxxel_dist.train.step.compile import StepMemory

    fields = FIELDS | dict(fields)
    mesh, step, args = (_plain if plain else _ours)(devices, rows, length, fields)
    with jax.set_mesh(mesh):
        program = step.lower(*args).compile(compiler_options=None if options is None else dict(options))
    text = program.as_text()
    if hlo:
        Path(hlo).write_text(text)
    cost = program_cost(text, hosts_of(list(mesh.devices.flat)))
    parts = costs_of(cost, mesh.devices.flat[0].device_kind)
    return {
        "flops": cost.flops, "bytes": cost.bytes_accessed, "sent": sum(cost.collectives.values()),
        "launches": cost.launches, "roofline_ms": 1000 * roofline_seconds(parts),
        "peak_bytes": StepMemory.of_program(program).peak,
        "parts": [vars(part) for part in parts],
    }  # fmt: skip


def _ours(devices: Any, rows: int, length: int, fields: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    import numpy as np

    from roxxel_dist.cluster.mesh import batch_sharding
    from roxxel_dist.input.stream import Stream
    from roxxel_dist.run.components import build_components, open_corpus
    from roxxel_dist.settings.config import Config

    phase = {"steps": 1, "batch_size": rows, "seq_len": length} | fields.pop("phase", {})
    config = Config(**fields, phases=[phase])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.npy")
        tokens = np.random.default_rng(0).integers(0, fields["vocab_size"], 2 * rows * length)
        np.save(path, tokens.astype(np.uint16))
        with open_corpus(config, path, Path(folder, "data")) as data:
            components = build_components(config, data, devices=devices)
            mesh = components.mesh(len({device.process_index for device in devices}))
            steps = components.steps(mesh, 1)
            plan = components.curriculum.plan(0)
            sharding = batch_sharding(mesh)
            batch = Stream(plan, components.curriculum.datasets, sharding, 0, components.grad_accum).abstract()
    return mesh, steps.train, steps.args("training", batch)


def _plain(devices: Any, rows: int, length: int, fields: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    import numpy as np
    from jax.sharding import AxisType, Mesh
    from plain_step import Size, plain_step

    size = Size(
        dim=fields["dim"], blocks=fields["num_blocks"], heads=fields["n_heads"], vocabulary=fields["vocab_size"],
        checkpointing=bool(fields.get("gradient_checkpointing")), hidden=fields.get("hidden_dim") or 2048,
    )  # fmt: skip
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return mesh, *plain_step(size, mesh, rows, length, fsdp=bool(fields.get("fsdp")))


def main() -> int:
    """Print the figures as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--hlo", default="")
    asked = parser.parse_intermixed_args()
    given = {name: _value(text) for name, _, text in (field.partition("=") for field in asked.fields)}
    rows, length = given.pop("rows", 32), given.pop("length", 1025)
    target = parse_target(asked.target)
    os.environ |= target.environment()
    from roxxel_dist.run.estimate.target_steps import TargetCompiler

    devices, options = TargetCompiler(target, lambda what, is_done: None).devices, target.compiler_options
    found = measured(devices, rows, length, given, plain=asked.plain, hlo=asked.hlo, options=options)
    for part in found.pop("parts"):
        print(
            f"{part['part']:24} {part['milliseconds']:8.3f} ms ({part['limit']}) {part['flops'] / 1e12:8.3f} TFLOP "
            f"{part['bytes'] / 1e9:8.3f} GB {part['sent_bytes'] / 1e6:8.1f} MB sent {part['launches']:6g} launches"
        )
    print(json.dumps(found))
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
