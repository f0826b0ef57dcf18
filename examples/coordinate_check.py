"""The coordinate check of mup: how far a few steps move the activations of a model, at several widths.

With the standard parametrization the changes grow with the width, so that a wider model wants a lower learning rate;
with mup they do not (Yang et al., "Tensor Programs V", 2022, appendix D.1).

    python examples/coordinate_check.py small.yaml data --picture coordinates.png
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.cluster.determinism import enable_compilation_cache, pin_threads
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.config import Parametrization
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import build_components, open_corpus, temporary_folder
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.lr_finder import AT_THE_PEAK, sweep_stream
from roxxel_dist.train.step.optimizer import LONG
from roxxel_dist.train.step.step import SPIKE_FACTOR
from roxxel_dist.train.steps import StepOptions, make_steps
from roxxel_dist.utils.display import aligned, figure

FACTORS = (1, 2, 4, 8)
"""Widths, as multiples of the base width."""
STEPS = 5
GROWTH = 1.15
"""Growth for each doubling of the width; above it, the learning rate does not transfer."""
PARAMETRIZATIONS: tuple[Parametrization, ...] = ("standard", "mup")


@dataclass(frozen=True, kw_only=True)
class CoordinateCheck:
    """The changes of the activations after a few steps, by width."""

    widths: tuple[int, ...]
    steps: int
    changes: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By parametrization and place: the root mean square of the change of the activations there, for each width."""

    def growth(self, parametrization: str, place: str) -> float:
        """The factor by which the change grows for each doubling of the width: a fit over all widths."""
        changes = np.log2(self.changes[parametrization][place])
        return float(2 ** np.polyfit(np.log2(self.widths), changes, 1)[0])


def check_coordinates(config: Config, data_path: str | Path | None) -> CoordinateCheck:
    """Train a few steps at `base_dim` (or `dim`) times `FACTORS`, with both parametrizations, on the first device.

    It uses the learning rate of the config without a warm-up, and writes no files.

    Raises:
        UserError: the config or the data do not allow it.
    """
    base = config.base_dim or config.dim
    sizes = tuple(base * factor for factor in FACTORS)
    with usage_errors():
        if config.base_widths is not None:
            raise UserError(
                f"base_widths is {config.base_widths!r}: the check changes dim alone; leave base_widths out for it"
            )
        config.validate()
        pin_threads()
        initialize()
        enable_compilation_cache()
        data_path = config.primary_path(data_path)
        changes: dict[str, dict[str, tuple[float, ...]]] = {}
        with temporary_folder(data_path, "plan") as folder, open_corpus(config, data_path, folder) as data:
            for kind in PARAMETRIZATIONS:
                base_dim = base if kind == "mup" else None
                of_kind = [
                    _changes(dataclasses.replace(config, dim=dim, parametrization=kind, base_dim=base_dim), data)
                    for dim in sizes
                ]
                changes[kind] = {place: tuple(each[place] for each in of_kind) for place in of_kind[0]}
    return CoordinateCheck(widths=sizes, steps=STEPS, changes=changes)


def _changes(config: Config, data: Roxxel) -> dict[str, float]:
    """The root mean square of the change after some steps, by place."""
    components = build_components(dataclasses.replace(config, n_devices=1), data)
    mesh = components.mesh()
    stream = sweep_stream(components.curriculum, STEPS, config.seed, mesh, components.grad_accum)
    optimizer, sharding = components.optimizer, stream.sharding
    assert sharding is not None
    settings = {**optimizer.settings(LONG), **AT_THE_PEAK, SPIKE_FACTOR: 0.0}
    options = StepOptions(grad_accum=components.grad_accum)
    steps = make_steps(components.build, components.loss, optimizer, sharding, options, settings)
    state, hparams = steps.init()

    places: list[str] = []

    @jax.jit
    def activations(state: Any, hparams: Any, batch: Any) -> list[jax.Array]:
        model = steps.split.merge(state.params, state.rest, hparams, training=False)
        places[:], arrays = zip(*_places(model, jax.tree.leaves(batch)[0][:, :-1]), strict=True)
        return list(arrays)

    with jax.set_mesh(mesh):
        first = next(stream)
        before = activations(state, hparams, first)
        for batch in (first, *(next(stream) for _ in range(STEPS - 1))):
            state, _ = steps.train(state, hparams, batch)
        after = activations(state, hparams, first)
        changes = [float(jnp.sqrt(jnp.mean((new - old) ** 2))) for old, new in zip(before, after, strict=True)]
    return dict(zip(places, changes, strict=True))


def _places(model: Any, tokens_BxL: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    """The activations of a model by place, in order; of a user-defined model only the logits."""
    if isinstance(model, Transformer):
        *stream, final_BxLxD = model.residual_stream(tokens_BxL)
        yield "embedding", stream[0]
        yield from ((f"block {i}", x_BxLxD) for i, x_BxLxD in enumerate(stream[1:], 1))
        yield "logits", model.logits(final_BxLxD)
    else:
        yield "logits", model(tokens_BxL)


def table(check: CoordinateCheck) -> str:
    """The check as text, with its conclusion."""
    lines = [f"change of the activations in {check.steps} steps (root mean square)"]
    for kind, places in check.changes.items():
        rows = [[kind, *map(str, check.widths), "a doubling"]]
        rows += [
            [place, *(f"{change:.3g}" for change in changes), f"x {check.growth(kind, place):.2f}"]
            for place, changes in places.items()
        ]
        lines += ["", *aligned(rows)]
    growth = {kind: max(check.growth(kind, place) for place in places) for kind, places in check.changes.items()}
    lines.append("")
    if growth["mup"] > GROWTH:
        lines.append(
            f"mup: changes grow by up to x {growth['mup']:.2f} a doubling: the learning rate does not carry over"
        )
    else:
        lines.append("mup: no change grows with the width: the learning rate carries over")
    return "\n".join(lines)


def draw(check: CoordinateCheck, picture: Path) -> None:
    """Write the check as a PNG file: changes by width, one line a place, mup solid and standard dashed.

    Raises ImportError if matplotlib is not installed, OSError if the file cannot be written.
    """
    with figure(picture) as axes:
        for kind, style in (("mup", "-"), ("standard", "--")):
            for i, (place, changes) in enumerate(check.changes[kind].items()):
                axes.plot(check.widths, changes, style, color=f"C{i}", marker="o", ms=3, label=f"{place}, {kind}")
        axes.set(xscale="log", yscale="log", xlabel="dim", ylabel=f"change in {check.steps} steps (RMS)")
        axes.set_xticks(check.widths, [str(width) for width in check.widths])
        axes.minorticks_off()
        axes.legend(ncols=2, fontsize="small")


def main() -> None:
    """Check the config that the command line names."""
    parser = argparse.ArgumentParser(description="The coordinate check of mup, at the base width times 1, 2, 4 and 8.")
    parser.add_argument("config", help="a config file, as `roxxel-dist train` takes it")
    parser.add_argument("data", help="a text file, a folder of text, or shards made by `roxxel-dist data build`")
    parser.add_argument("--picture", type=Path, help="a PNG file of the table; needs matplotlib")
    arguments = parser.parse_args()
    check = check_coordinates(Config.from_yaml(arguments.config), arguments.data)
    print(table(check))
    if arguments.picture is not None:
        draw(check, arguments.picture)


if __name__ == "__main__":
    main()
