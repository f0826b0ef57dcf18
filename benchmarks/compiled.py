"""What the compilers of accelerators make of a training step, beside a step of flax and optax alone, and MaxText's.

    python benchmarks/compiled.py [--quick] [--minutes M] [--json FILE]

The FLOPs of all devices together over those of one, with as many rows as devices. Then steps of the sizes that are
trained: bytes that a device reads and writes and sends, kernels, and the time of them all at the limit of the device.
The environments of `make tpu` and `make cuda` compile; no accelerator is needed, and nothing is run. It takes
about 30 minutes of CPU time, and ends after 90 minutes (M): what is not compiled by then is a line that says so.

MaxText is asked where .cache/maxtext has it, an environment of Python 3.12 or newer with `pip install 'maxtext[tpu]'`.
"""

import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import Lines, Result, flags

ENVIRONMENTS = Path(__file__).parent.parent / ".cache"
COMPILERS = {"v5e": "tpu", "v6e": "tpu", "h100": "cuda", "h200": "cuda"}
TARGETS = {"h100:1x8": 8, "h100:8x8": 64, "v5e:2x2": 4, "v5e:16x16": 256}
QUICK = ("v5e:2x2", "h100:1x8")
MINUTES = 90
MODELS: dict[str, dict[str, Any]] = {
    "124M": {"dim": 768, "num_blocks": 12, "n_heads": 12, "vocab_size": 50_304, "max_context": 1024},
    "1.3B": {"dim": 2048, "num_blocks": 24, "n_heads": 16, "vocab_size": 50_304, "max_context": 2048},
}
OPTIONS = {"bf16_compute": True, "fsdp": True, "scan_layers": True, "gradient_checkpointing": True, "val_fraction": 0}
AT_MOST = 1.05
MAXTEXT = ENVIRONMENTS / "maxtext" / "bin" / "python"


class Step(NamedTuple):
    """A training step as it is run: rows of 1,024 computed tokens or more, 32 x 1,024 of them on a GPU."""

    target: str
    rows: int
    length: int = 1025
    fields: Mapping[str, Any] = {}
    plain: Mapping[str, Any] | None = None
    """What differs in the step that it is held against; None: nothing."""
    bytes: float | None = None
    """At most so many times those of the plain step."""
    flops: float | None = None
    maxtext: str = ""
    """The model of `compiled_maxtext.py`, which scans its blocks and keeps nothing of them but their inputs."""


CUT = {"fsdp": True}
PACKED = {"phase": {"packing": "documents"}}
EXPERTS = {"use_moe": True, "n_experts": 8, "top_k_mlp": 2}
AS_WIDE = {"hidden_dim": 2 * 2048}
SCANNED = {"scan_layers": True, "gradient_checkpointing": True}
LARGE = MODELS["1.3B"] | CUT | SCANNED
STEPS = {
    "124M cut to 2 blocks, 32 x 1,024": Step("h200:1x1", 32, fields={"num_blocks": 2}, bytes=0.85),
    "124M cut to 4 blocks, 64 x 1,024 on 8, fsdp": Step("h100:1x8", 64, fields={"num_blocks": 4} | CUT, bytes=1.0),
    "124M, 32 x 1,024": Step("h200:1x1", 32, bytes=1.0),
    "124M, 32 x 1,024, packed": Step("h200:1x1", 32, fields=PACKED, plain={}, bytes=1.1),
    "124M, 1 x 32,768": Step("h200:1x1", 1, 32_769, {"max_context": 32_768}, bytes=1.0),
    "124M with 8 experts, 2 chosen, 32 x 1,024": Step("h200:1x1", 32, fields=EXPERTS, plain=AS_WIDE, flops=1.3),
    "124M, 16 x 1,024 on 4, fsdp, scanned": Step("v5e:2x2", 16, fields=CUT | SCANNED, bytes=1.0, maxtext="124M"),
    "124M with 8 experts, 2 chosen, 64 x 1,024 on 16, fsdp, scanned": Step(
        "v5e:4x4", 64, fields=EXPERTS | CUT | SCANNED, plain=AS_WIDE | CUT | SCANNED, maxtext="8 x 124M"
    ),
    "124M, 256 x 1,024 on 8, fsdp": Step("h100:1x8", 256, fields=CUT, bytes=1.0),
    "124M, 2,048 x 1,024 on 64, fsdp": Step("h100:8x8", 2048, fields=CUT, bytes=1.0),
    "1.3B, 64 x 2,048 on 8, fsdp, scanned": Step("h100:1x8", 64, 2049, LARGE, bytes=1.0),
    "124M cut to 2 blocks, 64 x 1,024 on 4, fsdp": Step("v6e:2x2", 64, fields={"num_blocks": 2} | CUT, bytes=1.0),
    "124M cut to 2 blocks, 256 x 1,024 on 16, fsdp": Step("v5e:4x4", 256, fields={"num_blocks": 2} | CUT, bytes=1.0),
}
QUICK_STEPS = 2
"""The first ones are quick to compile: less than half a minute each."""


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M", help="at most (%(default)s)")
    asked = parser.parse_args()
    report, end = Lines(asked.json), time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50_000, 1 << 21).astype(np.uint16)
        np.save(Path(folder, "tokens.npy"), tokens)
        for target, count in TARGETS.items():
            if asked.quick and target not in QUICK:
                continue
            for name in MODELS if not asked.quick else ["124M"]:
                report.add(f"{target}, {name}", partial(compiled, Path(folder), target, count, name, end))
        for name, step in itertools.islice(STEPS.items(), QUICK_STEPS if asked.quick else None):
            report.add(f"{step.target}: {name}", partial(beside_others, name, step, end))
    return report.end()


def beside_others(name: str, step: Step, end: float) -> Iterable[Result]:
    """A step of ours against the plain one, and MaxText's on a TPU."""
    python = ENVIRONMENTS / COMPILERS[step.target.split(":", maxsplit=1)[0]] / "bin" / "python"
    what, peer = f"{step.target}, {name}", "x flax and optax alone"
    if not python.exists():
        yield Result(what=f"{what}: bytes", against=peer, measured=None, target=step.bytes, at_most=True)
        return
    program = Path(__file__).parent / "compiled_step.py"
    shape = step.target, f"rows={step.rows}", f"length={step.length}"
    ours = figures(end, python, program, *shape, *words(step.fields))
    fields = step.fields if step.plain is None else step.plain
    plain = figures(end, python, program, "--plain", *shape, *words(fields))
    note = f"{shown(ours)}; plain {shown(plain)}"
    yield Result(
        what=f"{what}: bytes", against=peer, measured=ours["bytes"] / plain["bytes"], target=step.bytes, at_most=True,
        note=note,
    )  # fmt: skip
    yield Result(
        what=f"{what}: FLOPs", against=peer, measured=ours["flops"] / plain["flops"], target=step.flops, at_most=True,
    )  # fmt: skip
    if plain["sent"]:
        yield Result(what=f"{what}: bytes sent", against=peer, measured=ours["sent"] / plain["sent"])
    yield Result(what=f"{what}: time at the limit of the device", against="ms", measured=ours["roofline_ms"])
    if step.maxtext:
        yield from beside_maxtext(what, step, ours, end)


def beside_maxtext(what: str, step: Step, ours: Mapping[str, Any], end: float) -> Iterable[Result]:
    """The same model, as MaxText trains it on as many chips."""
    chips = math.prod(int(size) for size in step.target.partition(":")[2].split("x"))
    result = partial(Result, what=f"{what}: bytes", against="x MaxText")
    if not MAXTEXT.exists():
        yield result(measured=None)
        return
    words = str(chips), step.maxtext, str(step.rows // chips)
    theirs = figures(end, MAXTEXT, Path(__file__).parent / "compiled_maxtext.py", *words)
    yield result(measured=ours["bytes"] / theirs["bytes"], note=f"MaxText {shown(theirs)}")
    limit = partial(Result, what=f"{what}: time at the limit of the device", against="x MaxText")
    yield limit(measured=ours["roofline_ms"] / theirs["roofline_ms"])


def words(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a configuration for a command line."""
    return [f"{name}={json.dumps(value)}" for name, value in fields.items()]


@cache
def figures(end: float, python: Path, *command: Any) -> dict[str, Any]:
    """What a program prints as JSON in its last line."""
    done = compile_until(end, [python, *command])
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["ended without a word"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def compile_until(end: float, words: list[Any], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed.

    Raises:
        TimeoutError: it did not end in time.
    """
    try:
        left = max(0.0, end - time.monotonic())
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError("not compiled within --minutes") from error


def shown(found: Mapping[str, Any]) -> str:
    """The figures of a step in words."""
    return (
        f"{found['bytes'] / 1e9:.1f} GB, {found['flops'] / 1e12:.2f} TFLOP, {found['sent'] / 1e6:.0f} MB sent, "
        f"{found['launches']:.0f} kernels, {found['roofline_ms']:.1f} ms, {found['peak_bytes'] / 1e9:.1f} GB of memory"
    )


def compiled(folder: Path, target: str, count: int, name: str, end: float) -> Iterable[Result]:
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
    done = compile_until(end, [*words, "--target", target], folder)
    if not done.stdout:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
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
