"""Does the best learning rate carry over to other widths? Trainings at several rates, by width and parametrization."""

import math
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from measure import Lines, Result, flags

from roxxel_dist.corpus.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.run.components import build_components
from roxxel_dist.settings.config import Config
from roxxel_dist.train.lr_finder import sweep, sweep_stream

WIDTHS = (32, 64, 128, 256)
RATES = tuple(2.0**power for power in range(-11, -3))
STEPS = 150
INIT_STD = {"standard": 0.02, "mup": 0.1}
"""Standard: the usual one. mup: the best of 0.02, 0.05, 0.1 and 0.2 at the base width, where one searches it."""
LAST = 20
"""Steps whose mean loss counts."""


def final_loss(data: Roxxel, dim: int, parametrization: str, optimizer: str, rate: float, steps: int) -> float:
    """The mean loss of the last steps of a training at one rate; infinity where it diverged."""
    config = Config(
        dim=dim, num_blocks=2, max_context=64, dropout_rate=0.0, seed=0, optimizer=optimizer,
        parametrization=parametrization, base_dim=WIDTHS[0] if parametrization == "mup" else None,
        init_std=INIT_STD[parametrization],
        phases=[{"steps": steps, "batch_size": 16, "seq_len": 65}], n_devices=1,
    )  # fmt: skip
    components = build_components(config, data)
    stream = sweep_stream(components.curriculum, steps, 0, components.mesh())
    rates = [rate] * steps
    losses = sweep(components.build, components.optimizer, stream, components.loss, rates, options=components.options)
    last = losses[-LAST:]
    return statistics.fmean(last) if len(losses) == steps and all(map(math.isfinite, last)) else math.inf


def best_rates(data: Roxxel, optimizer: str, steps: int, widths: Sequence[int]) -> Iterable[Result]:
    """For each parametrization, by how many steps of a factor-2 grid the best rate moves between the widths."""
    for parametrization in ("standard", "mup"):
        best, notes = [], []
        for dim in widths:
            losses = [final_loss(data, dim, parametrization, optimizer, rate, steps) for rate in RATES]
            lowest = min(range(len(RATES)), key=losses.__getitem__)
            best.append(lowest)
            notes.append(f"dim {dim}: {RATES[lowest]:.2g} (loss {losses[lowest]:.3f})")
            print(
                f"{parametrization} {optimizer} dim {dim}: {[round(loss, 3) for loss in losses]}",
                file=sys.stderr,
                flush=True,
            )
        yield Result(
            what=f"best lr of {optimizer}, {parametrization}, dim {' to '.join(map(str, (widths[0], widths[-1])))}",
            against="steps of a factor-2 grid that it moves by", measured=float(max(best) - min(best)),
            target=1.0 if parametrization == "mup" else None, at_most=True, note="; ".join(notes),
        )  # fmt: skip


def main() -> int:
    """1 where something could not be measured."""
    parser = flags(__doc__)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    options = parser.parse_args()
    lines, source = Lines(options.json), Path(sysconfig.get_paths()["stdlib"])
    widths = WIDTHS[:3] if options.quick else WIDTHS
    with (
        tempfile.TemporaryDirectory() as folder,
        build([source / "email", source / "asyncio"], Path(folder, "data"), tokenizer="byte") as data,
    ):
        for optimizer in options.optimizers[: 1 if options.quick else None]:
            lines.add(f"best rates of {optimizer}", partial(best_rates, data, optimizer, STEPS, widths))
    return lines.end()


if __name__ == "__main__":
    raise SystemExit(main())
