"""What the compilers of accelerators make of a training step: the FLOPs of all devices together over those of one.

    python benchmarks/compiled.py [--quick] [--json FILE]

`roxxel-dist plan --target` compiles each step with the environments of `make tpu` and `make cuda`; no accelerator is
needed, and nothing is run. A step has as many rows as devices.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Lines, Result, flags

ENVIRONMENTS = Path(__file__).parent.parent / ".cache"
COMPILERS = {"v5e": "tpu", "h100": "cuda"}
TARGETS = {"v5e:1x1": 1, "v5e:2x2": 4, "v5e:4x4": 16, "v5e:8x8": 64, "v5e:16x16": 256, "h100:1x8": 8, "h100:8x8": 64}
QUICK = ("v5e:2x2", "h100:1x8")
MODELS: dict[str, dict[str, Any]] = {
    "124M": {"dim": 768, "num_blocks": 12, "n_heads": 12, "vocab_size": 50_304, "max_context": 1024},
    "1.3B": {"dim": 2048, "num_blocks": 24, "n_heads": 16, "vocab_size": 50_304, "max_context": 2048},
}
LEAST_DEVICES = {"124M": 1, "1.3B": 4}
"""Parameters and moments of 1.3B take 16 GB, as much as a v5e chip has."""
OPTIONS = {"bf16_compute": True, "fsdp": True, "scan_layers": True, "gradient_checkpointing": True, "val_fraction": 0}
AT_MOST = 1.05


def main() -> int:
    asked = flags(__doc__).parse_args()
    report = Lines(asked.json)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50_000, 1 << 21).astype(np.uint16)
        np.save(Path(folder, "tokens.npy"), tokens)
        for target, count in TARGETS.items():
            if asked.quick and target not in QUICK:
                continue
            for name in MODELS if not asked.quick else ["124M"]:
                if count >= LEAST_DEVICES[name]:
                    report.add(f"{target}, {name}", partial(compiled, Path(folder), target, count, name))
    return report.end()


def compiled(folder: Path, target: str, count: int, name: str) -> Iterable[Result]:
    """One model on one target."""
    what, against = f"{target}, {count} x the FLOPs of a device", f"x one device, {name} parameters"
    python = ENVIRONMENTS / COMPILERS[target.split(":", maxsplit=1)[0]] / "bin" / "python"
    if not python.exists():
        yield Result(what=what, against=against, measured=None, target=AT_MOST, at_most=True)
        return
    model = MODELS[name]
    phase = {"steps": 1, "batch_size": count, "seq_len": model["max_context"] + 1}
    (folder / "config.yaml").write_text(json.dumps(OPTIONS | model | {"phases": [phase]}))
    words = [python, "-m", "roxxel_dist", "plan", "--config", "config.yaml", "--data_path", "tokens.npy", "--json"]
    before = cpu_seconds_of_children()
    done = subprocess.run([*words, "--target", target], cwd=folder, capture_output=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr.decode().strip().splitlines()[-1])
    step = json.loads(done.stdout)["phases"][0]["target"]
    took = f"planned in {cpu_seconds_of_children() - before:.0f} s of CPU time"
    if step["flops_ratio"] is None:
        yield Result(what=what, against=against, measured=None, failed="does not fit", note=took)
        return
    share = step["peak_bytes"] / step["device_bytes"]
    note = f"{step['peak_bytes'] / 1e9:.2f} GB of a device, {share:.0%} of its memory; {took}"
    yield Result(what=what, against=against, measured=step["flops_ratio"], target=AT_MOST, at_most=True, note=note)


def cpu_seconds_of_children() -> float:
    """Of all processes that have ended: unlike wall time it is the same beside other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
