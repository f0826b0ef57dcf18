"""Mixtures of five sources of real text, in two phases: many small trainings are recorded once, for searches to replay.

    JAX_PLATFORMS=cpu python benchmarks/mixtures.py FOLDER [--build] [--runs 300] [--record FILE]

`--build` makes the sources: Python's library, C headers, documentation, manual pages and licences, as pip and apt
bring them, into shards with validation text. Each line of FILE is a training: its shares in each phase, its seed, and
the loss on each source's validation text after some steps. Lines that are there are not made again.

`sweep_mixtures.py` searches in what is recorded. No training reads more than a pass of any source.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SOURCES = {"python": 4_000_000, "headers": 3_000_000, "docs": 2_000_000, "man": 1_500_000, "licences": 1_500_000}
"""Bytes of text of each, at most."""
NAMES = ("self", *list(SOURCES)[1:])
"""Of the data sets in a config."""
VOCAB, DIM, BLOCKS, CONTEXT, ROWS = 1024, 48, 1, 64, 16
PHASES = (120, 80)
"""Steps of each phase."""
EVERY, EVAL_BATCHES = 50, 8
RUNS = 300
REPLICATED, REPLICAS = 6, 5
"""Mixtures of which there are trainings with other seeds, and how many seeds."""
BEFORE = 40
"""Mixtures that are trained before the other seeds are."""
FILE = Path(__file__).parent / "mixtures.jsonl"


def texts(source: str) -> list[Path]:
    """The files of a source, in an order that depends on their names alone."""
    site, stdlib = Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["stdlib"])
    share = Path("/usr/share")
    places: Mapping[str, list[tuple[Path, tuple[str, ...]]]] = {
        "python": [(stdlib, ("*.py",))],
        "headers": [(Path("/usr/include"), ("*.h",)), (site, ("*.h",))],
        "docs": [(site, ("METADATA", "*.md", "*.rst")), (share / "doc", ("README*", "*.md", "*.rst", "NEWS*"))],
        "man": [(share / "man" / f"man{section}", ("*.gz",)) for section in range(1, 9)],
        "licences": [(share / "doc", ("copyright",)), (site, ("LICENSE*", "LICENCE*", "COPYING*"))],
    }
    found = {path for folder, patterns in places[source] for pattern in patterns for path in folder.rglob(pattern)}
    if source == "python":
        found = {path for path in found if not {"test", "tests", "site-packages"} & set(path.parts)}
    return sorted(
        filter(Path.is_file, found),
        key=lambda path: hashlib.sha256(path.name.encode()).digest() + str(path).encode(),
    )


def gather(source: str, folder: Path) -> None:
    """Copy the texts of a source, each once, until there are enough bytes."""
    folder.mkdir(parents=True)
    seen: set[bytes] = set()
    size = 0
    for number, path in enumerate(texts(source)):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", "ignore")[:60_000]
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 400 or digest in seen:
            continue
        seen.add(digest)
        (folder / f"{number:06}.txt").write_text(text)
        size += len(text)
        if size >= SOURCES[source]:
            break


def build(folder: Path) -> None:
    """The shards of each source, in training and validation text, all with one tokenizer."""
    shutil.rmtree(folder, ignore_errors=True)
    for source in SOURCES:
        gather(source, folder / "texts" / source)
    make = [sys.executable, "-m", "roxxel_dist", "data", "build"]
    subprocess.run([*make, folder / "texts", "--out", folder / "all", "--vocab_size", str(VOCAB)], check=True)
    for source in SOURCES:
        subprocess.run([*make, folder / "texts" / source, "--out", folder / source, "--val_fraction", "0.15",
                        "--tokenizer", folder / "all" / "tokenizer.json"], check=True)  # fmt: skip


def mixtures(natural: NDArray[np.float64], count: int, seed: int = 0) -> list[tuple[list[list[float]], int]]:
    """The mixtures to record: shares by phase float64[2, 5], and the seed of the training.

    After the fixed ones a third is uniform on the simplex in each phase, a third has the same shares in both, a sixth
    is near a corner, and a sixth near natural shares; then come other seeds of the first few.
    """
    rng, sets = np.random.default_rng(seed), len(natural)
    even = np.full(sets, 1 / sets)
    made: list[NDArray[np.float64]] = [np.array([natural, natural]), np.array([even, even]), np.array([even, natural])]
    while len(made) < count - REPLICATED * (REPLICAS - 1):
        kind = rng.integers(6)
        if kind < 2:
            made.append(rng.dirichlet(np.ones(sets), 2))
        elif kind < 4:
            made.append(np.tile(rng.dirichlet(np.ones(sets)), (2, 1)))
        elif kind == 4:
            made.append(rng.dirichlet(np.full(sets, 0.3), 2))
        else:
            made.append(rng.dirichlet(8 * natural + 0.2, 2))
    clean = [np.where(one < 1e-3, 0, one) for one in made]
    clean = [(one / one.sum(1, keepdims=True)).round(6) for one in clean]
    runs = [(one.tolist(), 0) for one in clean]
    again = [(clean[number].tolist(), replica) for replica in range(1, REPLICAS) for number in range(REPLICATED)]
    return runs[:BEFORE] + again + runs[BEFORE:]


def settings(folder: Path) -> dict[str, Any]:
    """The config of a training, without its phases; the first source is the primary data set."""
    return {
        "vocab_size": VOCAB, "dim": DIM, "num_blocks": BLOCKS, "kv_heads": 2, "max_context": CONTEXT,
        "dropout_rate": 0.0, "optimizer": "muon", "lr": 0.02, "eval_iters": EVAL_BATCHES,
        "datasets": {name: str(folder / source / "train") for name, source in zip(NAMES, SOURCES, strict=True)},
        "validation": {name: str(folder / name / "val") for name in SOURCES},
    }  # fmt: skip


def phases(shares: Sequence[Sequence[float]] | None = None, times: int = 1) -> list[dict[str, Any]]:
    """The two phases, with shares float[2, 5] where they are given."""
    made = [{"steps": steps * times, "batch_size": ROWS, "seq_len": CONTEXT + 1, "blend": "row"} for steps in PHASES]
    if shares is None:
        return made
    weights = [{name: share for name, share in zip(NAMES, row, strict=True) if share > 0} for row in shares]
    return [phase | {"weights": one} for phase, one in zip(made, weights, strict=True)]


class Recorder:
    """Trainings of one small model, one after another in this process: the step is compiled once for all.

    Args:
        folder: what `build` made.
        times: how many times as long as `PHASES` they train.
        passes: as in `Curriculum`: of trials of a sweep they are apart.
    """

    def __init__(self, folder: Path, times: int = 1, passes: Literal["together", "apart"] = "together") -> None:
        import jax

        from roxxel_dist.cluster.mesh import batch_sharding
        from roxxel_dist.data.dataset import Roxxel
        from roxxel_dist.run.components import build_components
        from roxxel_dist.settings.config import Config
        from roxxel_dist.train.step.compile import AotCompiler
        from roxxel_dist.train.steps import Steps
        from roxxel_dist.train.validation.evaluator import Validation, ValidationRows

        self.times, self.passes = times, passes
        even = np.full((2, len(SOURCES)), 1 / len(SOURCES)).tolist()
        self.config: Config = Config(**settings(folder), phases=phases(even, times))
        self.data: Roxxel = Roxxel(folder / next(iter(SOURCES)) / "train")
        parts = build_components(self.config, self.data)
        self.sets: Mapping[str, Any] = parts.curriculum.datasets
        self.tokens: list[int] = [data.num_tokens for data in self.sets.values()]
        mesh = parts.mesh()
        self.sharding: Any = batch_sharding(mesh)
        self.compiler: AotCompiler = AotCompiler(mesh)

        def steps_of(seed: int) -> Steps:
            parts = build_components(dataclasses.replace(self.config, seed=seed), self.data)
            return parts.steps(mesh, sum(PHASES) * times)

        @cache
        def start(seed: int) -> Any:
            return jax.device_get(steps_of(seed).init()[0])

        self.start: Callable[[int], Any] = start
        """The state before the first step, by seed."""
        steps = steps_of(0)
        self.state, self.hparams = steps.init()
        self.step: Any = steps.train
        evaluate = steps.evaluate()
        self.validation: Validation = Validation(
            parts.validation,
            self.data,
            evaluate,
            self.compiler,
            self.sharding,
            ValidationRows.of_phases(parts.curriculum.shapes, EVAL_BATCHES, {}),
        )

    def train(self, shares: Sequence[Sequence[float]], seed: int) -> dict[str, list[float]]:
        """One training: the loss on each source's validation text after every `EVERY` steps, as often if longer."""
        import jax

        from roxxel_dist.curriculum.phases import Curriculum
        from roxxel_dist.input.stream import Stream
        from roxxel_dist.train.step.compile import batch_key
        from roxxel_dist.train.step.step import fetch
        from roxxel_dist.train.validation.evaluator import summarize

        others = {name: data for name, data in self.sets.items() if name != "self"}
        made = phases(shares, self.times)
        plan = Curriculum(self.data, made, others, passes=self.passes).plan(seed)
        stream = Stream(plan, self.sets, self.sharding)
        state = jax.tree.map(lambda now, like: jax.device_put(now, like.sharding), self.start(seed), self.state)
        key = batch_key(stream.abstract())
        self.compiler.prepare(key, self.step, self.state, self.hparams, stream.abstract())
        program = self.compiler.get(key)
        curves: dict[str, list[float]] = {name: [] for name in SOURCES}
        for done in range(1, sum(PHASES) * self.times + 1):
            state, _ = program(state, self.hparams, next(stream))
            if done % (EVERY * self.times) == 0:
                losses = summarize(fetch(self.validation.run(state, self.hparams, plan.shapes[0])))
                for name, curve in curves.items():
                    curve.append(round(losses[f"val_loss/{name}"], 6))
        return curves


def record(folder: Path, file: Path, count: int) -> None:
    """Train what the file does not have yet, and add a line for each."""
    recorder = Recorder(folder)
    natural = np.array(recorder.tokens, np.float64)
    runs = mixtures(natural / natural.sum(), count)
    if not file.is_file():
        head = {"sources": list(SOURCES), "tokens": recorder.tokens, "phases": PHASES, "every": EVERY,
                "rows": ROWS, "row_tokens": CONTEXT + 1}  # fmt: skip
        file.write_text(json.dumps(head) + "\n")
    there = len(file.read_text().splitlines()) - 1
    for number, (shares, seed) in enumerate(runs[there:], there):
        begun = time.perf_counter()
        curves = recorder.train(shares, seed)
        line = {"shares": shares, "seed": seed, "losses": curves}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        mean = sum(curve[-1] for curve in curves.values()) / len(curves)
        print(f"{number}: {mean:.4f} in {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build", action="store_true", help="make the sources first")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--record", type=Path, default=FILE, help="the file to write")
    asked = parser.parse_args()
    if asked.build:
        build(asked.folder)
    record(asked.folder, asked.record, asked.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
