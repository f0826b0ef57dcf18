"""The recorded table of curves: every point of a grid was trained once, and its validation losses were kept.

    python benchmarks/sweep_curves.py FOLDER [--limit N]

Trains what `sweep_curves.jsonl` does not have yet and adds a line a trial to it: the parameters, and val_loss
at each of 20 reports. A trial is a training of this package (its model, step, optimizer, order of data) on sources of
Python's standard library, of seconds. Trials that differ in numbers alone share a program, as in a sweep.
`Table` is what `roxxel_dist.sweep.replay` takes.
"""

import itertools
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import flags

RECORDED = Path(__file__).with_suffix(".jsonl")
STEPS, REPORTS = 160, 20
SEQ_LEN, EVAL_ROWS, EVAL_BATCHES = 65, 16, 4
GRID: dict[str, list[Any]] = {
    "dim": [16, 32],
    "use_moe": [False, True],
    "batch_size": [4, 8],
    "optimizer": ["adamw", "lion", "muon"],
    "lr": [2.0**power for power in range(-12, -2)],
    "warmup_steps": [0, 40],
}
"""Outermost first, as it is recorded: what needs another program comes first."""
COMPILED = ("dim", "use_moe", "batch_size", "optimizer")
"""What another program is compiled for."""
FIXED = {"num_blocks": 2, "kv_heads": 2, "max_context": SEQ_LEN - 1, "expansion": 2, "dropout_rate": 0.0, "seed": 0}
KEPT_APART = (
    "(log2(lr) + 12 + log2(dim) + 2 * use_moe + 3 * (batch_size // 8) + warmup_steps // 40 + 2 * (optimizer == 'lion') "
    "+ 4 * (optimizer == 'muon')) % 5 == 0"
)
"""A formula: the fifth of the configurations that tunes nothing. Each value of each parameter is among them."""


class Table:
    """The recorded curves: `table(params)` is a trial's val_loss at each report; raises KeyError for other parameters.

    Attributes:
        steps_per_report: steps between two of them.
        curves: all of them.
    """

    steps_per_report = STEPS // REPORTS

    def __init__(self, file: Path = RECORDED) -> None:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.curves: dict[str, list[float]] = {_key(row["params"]): row["val_loss"] for row in rows}

    def __len__(self) -> int:
        return len(self.curves)

    def __call__(self, params: Mapping[str, Any]) -> list[float]:
        return self.curves[_key(params)]


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps([params[name] for name in GRID])


def grid() -> Iterator[dict[str, Any]]:
    """Every configuration, in the order in which they are recorded."""
    for values in itertools.product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


class Program:
    """The training of all configurations that share a program.

    Args:
        shared: one of them.
        data: the corpus.
    """

    def __init__(self, shared: Mapping[str, Any], data: Any) -> None:
        import jax

        from roxxel_dist.builders import build_components
        from roxxel_dist.cluster.mesh import batch_sharding
        from roxxel_dist.config import Config
        from roxxel_dist.curriculum.even_rows import SpreadRows
        from roxxel_dist.data.loader import Stream
        from roxxel_dist.train.lr_finder import sweep_stream
        from roxxel_dist.train.optimizer import InitialState
        from roxxel_dist.train.train_state import init_state
        from roxxel_dist.train.train_step import make_eval_step, make_step

        fields = {name: shared[name] for name in ("dim", "use_moe", "optimizer")}
        phases = [{"steps": STEPS, "batch_size": shared["batch_size"], "seq_len": SEQ_LEN}]
        self._fields = {**FIXED, **fields, "phases": phases, "n_devices": 1}
        self._config = Config
        components = build_components(Config.from_dict(self._fields, "sweep_curves"), data)
        mesh: Any = components.mesh()
        sharding = batch_sharding(mesh)
        self._mesh = mesh
        self._split, state, self._hparams = init_state(
            components.build, InitialState(components.optimizer), mesh, fsdp=False
        )
        self._start = jax.device_get(state)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._step = make_step(self._split, components.loss, components.optimizer, state, sharding)
        self._evaluate = make_eval_step(self._split, components.loss)
        stream = sweep_stream(components.curriculum, STEPS, FIXED["seed"], mesh)
        self._batches = [stream.batch(step) for step in range(STEPS)]
        [held_out] = components.validation.values()
        shape = replace(components.curriculum.shapes[0], steps=EVAL_BATCHES, batch_size=EVAL_ROWS)
        plan = SpreadRows(held_out.ranges, shape, EVAL_BATCHES)
        validation = Stream(plan, {"self": held_out}, sharding)
        self._held_out = [validation.batch(step) for step in range(plan.total_steps)]

    def train(self, params: Mapping[str, Any]) -> list[float]:
        """val_loss at each report of a trial."""
        import jax

        from roxxel_dist.cluster.mesh import scalars_on
        from roxxel_dist.train.config import OptimizerConfig
        from roxxel_dist.train.train_step import SPIKE_FACTOR

        numbers = {name: params[name] for name in ("lr", "warmup_steps")}
        config = self._config.from_dict({**self._fields, **numbers}, "sweep_curves")
        settings = config.part(OptimizerConfig).settings(STEPS)
        hparams = {**self._hparams, **scalars_on(self._mesh, {**settings, SPIKE_FACTOR: 0.0})}
        state = jax.tree.map(jax.device_put, self._start, self._shardings)
        curve = []
        for step, batch in enumerate(self._batches, 1):
            state, _ = self._step(state, hparams, batch)
            if step % Table.steps_per_report == 0:
                losses = [self._evaluate(state.params, state.rest, hparams, batch)["loss"] for batch in self._held_out]
                curve.append(round(float(sum(losses)) / len(losses), 4))
        return curve


def record(folder: Path, limit: int | None) -> None:
    """Train what is not recorded yet, `limit` trials at most."""
    from roxxel_dist.cluster.determinism import enable_compilation_cache
    from roxxel_dist.data.build.build import build
    from roxxel_dist.data.dataset import Roxxel

    source, shards = Path(sysconfig.get_paths()["stdlib"]), folder / "sources"
    if not shards.exists():
        build([source / "email", source / "asyncio"], shards, tokenizer="byte").close()
    known = (
        {_key(json.loads(line)["params"]) for line in RECORDED.read_text().splitlines()} if RECORDED.exists() else ()
    )
    missing = [params for params in grid() if _key(params) not in known][:limit]
    enable_compilation_cache()
    began = time.process_time()
    with Roxxel(shards) as data, RECORDED.open("a") as file:
        for shared, group in itertools.groupby(missing, lambda params: {name: params[name] for name in COMPILED}):
            program = Program(shared, data)
            for params in group:
                file.write(json.dumps({"params": params, "val_loss": program.train(params)}) + "\n")
            file.flush()
            print(f"{shared}: {time.process_time() - began:.0f} s of CPU", flush=True)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int)
    asked = parser.parse_args()
    record(asked.folder, asked.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
