"""A 124M-parameter Transformer in bfloat16 on a GPU: how much of its peak training uses, what the trainer adds, and
which part of the step takes how long, beside the limit of the device.

    python benchmarks/gpu.py            wants a GPU; the targets are those of one H200
    python benchmarks/gpu.py --tiny     a tiny model on whatever there is, to see that this program works

Options: --batch ROWS (32), --steps N (400, of the first phase), --folder FOLDER for data and run directory.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.profiler import ProfileData
from measure import Result, table
from training import Bare, conversions, make_trainer, random_tokens, stall, step_times, take_turns

from roxxel_dist.cluster.step_parts import part_of
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.run.estimate.step_costs import costs_of, largest
from roxxel_dist.train.step.throughput import mfu

GPT2 = ModelConfig(dim=768, num_blocks=12, n_heads=12, vocab_size=50_304, max_context=1024)
TINY = ModelConfig(dim=64, num_blocks=2, n_heads=2, vocab_size=512, max_context=64)
LOG_EVERY = 50
NEVER = 1_000_000
PROFILED = 10
"""Steps."""
OPTIONS = {"bf16_compute": True, "log_every": LOG_EVERY, "eval_every": NEVER, "checkpoint_every": NEVER}


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.tiny:
        print(
            f"no GPU: jax has {len(jax.devices())} {device.platform} device(s) ({device.device_kind}). A GPU and "
            f"its jax are missing: pip install 'jax[cuda12]', and see that JAX_PLATFORMS does not say cpu.\n"
            f"`python benchmarks/gpu.py --tiny` tries this program out without one.",
            file=sys.stderr,
        )
        return 2
    if not args.tiny and peak_flops(device.device_kind) is None:
        print(f"the peak of {device.device_kind} is not known: MFU is left out", file=sys.stderr)
    jax.config.update("jax_enable_compilation_cache", False)
    model = TINY if args.tiny else GPT2
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        data = random_tokens(Path(folder, "tokens.rox"), 1 << (18 if args.tiny else 26), model.vocab_size or 0)
        rows = [*by_part(data, model, args.batch, Path(folder, "profile"))]
        rows += speed(data, model, args.batch, args.steps, Path(folder, "speed"))
        rows += boundary(data, model, args.batch, args.steps, Path(folder, "phases"))
    print(f"{device.device_kind}, {args.batch} rows a step, of each {model.max_context} tokens computed")
    print(table(rows))
    return 0


def by_part(data: Roxxel, model: ModelConfig, batch: int, folder: Path) -> Iterable[Result]:
    """Milliseconds of the kernels of each part of the bare step, by jax's profiler, and at the limit of the device."""
    trainer = make_trainer(data, [Phase(100, batch, model.max_context + 1)], model, folder / "run", **OPTIONS)
    bare = Bare(trainer)
    bare.run(PROFILED)
    with jax.profiler.trace(folder / "trace"):
        bare.run(PROFILED)
    cost = program_cost(bare.program.as_text(), [0])
    trainer.close()
    part = {kernel.name: part_of(kernel.paths) for kernel in cost.kernels}
    [file] = (folder / "trace").rglob("*.xplane.pb")
    spent: Counter[str] = Counter()
    for name, milliseconds in kernel_times(file):
        spent[part.get(name, "not in the program's text")] += milliseconds / PROFILED  # pyright: ignore[reportArgumentType]
    costs = costs_of(cost, jax.devices()[0].device_kind)
    limits = {each.part: each.milliseconds for each in costs}
    for name, milliseconds in spent.most_common():
        limit = f"ms; {limits[name]:.3f} at the limit of the device" if name in limits else "ms"
        yield Result(what=f"kernels of a step: {name}", against=limit, measured=milliseconds)
    yield Result(what="kernels of a step: all", against="ms", measured=sum(spent.values()))
    print(largest(costs))


def kernel_times(file: Path) -> Iterable[tuple[str, float]]:
    """(name of an instruction, milliseconds of one run of it) from a trace of jax's profiler."""
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            # On a GPU the other lines say again, summed up, what the streams ran.
            if plane.name.startswith("/device:GPU") and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    yield str(stats["hlo_op"]), event.duration_ns / 1e6


def speed(data: Roxxel, model: ModelConfig, batch: int, steps: int, folder: Path) -> Iterable[Result]:
    """Blocks of the trainer's steps and of the bare program's, in turns."""
    block, turns = LOG_EVERY, max(steps // LOG_EVERY, 3)
    total = block * (turns + 1) + block // 2
    trainer = make_trainer(data, [Phase(total, batch, model.max_context + 1)], model, folder, **OPTIONS)
    parameters = sum(leaf.size for leaf in trainer.state.params.values())
    with conversions(lambda: trainer.step) as converted:
        ((mine, bare),) = take_turns(trainer, block, block // 2, [time.perf_counter])
    inputs = model.max_context  # of a row, whose last token is none
    flops = trainer.state.model.flops_per_token(inputs)
    trainer.close()
    logged = {done - 1 for done in range(total + 1) if done in (1, total) or done % LOG_EVERY == 0}
    between = [step for step in converted if not {step, step - 1} & logged and step < total - 1]
    yield Result(what="parameters", against="millions", measured=parameters / 1e6)
    yield Result(what="a step of the trainer", against="ms", measured=1000 * mine)
    yield Result(what="tokens", against="thousands a second", measured=batch * inputs / mine / 1000, target=520)
    used = mfu(batch * inputs / mine, flops, jax.devices()[:1])
    if used is not None:
        yield Result(what="model FLOPs utilisation", against="of the peak", measured=used, target=0.40)
    yield Result(
        what="trainer", against="x the bare step", measured=mine / bare, target=1.01, at_most=True,
    )  # fmt: skip
    yield Result(
        what="steps between rows of the log with a fetch",
        against="steps",
        measured=len(between),
        target=0,
        at_most=True,
    )


def boundary(data: Roxxel, model: ModelConfig, batch: int, steps: int, folder: Path) -> Iterable[Result]:
    """A second phase of half as long rows, compiled while the first one runs."""
    first = max(steps, 100)
    phases = [Phase(first, batch, model.max_context + 1), Phase(60, batch, model.max_context // 2 + 1)]
    trainer = make_trainer(data, phases, model, folder, **OPTIONS)
    ready: list[bool] = []
    times = step_times(trainer, lambda step: ready.append(len(trainer.loop.held.compiler.seconds) == 2))
    *_, compiling = trainer.loop.held.compiler.seconds.values()
    trainer.close()
    if not ready[first]:
        print("phase 1 ended before phase 2 was compiled: give more --steps", file=sys.stderr)
    lost = stall(times, first)
    yield Result(what="compilation of phase 2's step", against="s", measured=compiling)
    yield Result(what="median step of phase 2", against="ms", measured=1000 * statistics.median(times[first + 2 :]))
    yield Result(what="lost at the beginning of phase 2", against="ms", measured=1000 * lost)
    yield Result(
        what="lost at the beginning of phase 2", against="x its compilation", measured=lost / compiling, target=0.05,
        at_most=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
