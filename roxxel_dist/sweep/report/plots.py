"""What a study shows of its parameters: the share of each in the spread of the metric, and pictures as PNG files."""

import contextlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.place.directory import METRICS, SUMMARY, is_run
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.sweep.report.text import varied_parameters
from roxxel_dist.sweep.space.distributions import is_number
from roxxel_dist.sweep.study.folder import BASE, LEFT_OUT, Study, flat, short
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.train.log.csv_jsonl import read_rows
from roxxel_dist.utils.display import counted, figure, label

FEWEST = 8
"""Trials with a value below which shares would be made of chance."""
SAMPLES = 2048
CONDITIONED_ON = 500
"""Trials that the process is given: its cost grows with their cube."""


def importances(study: Study) -> dict[str, float]:
    """The share that each searched parameter has in the spread of the metric over the space; they sum to 1.

    The Gaussian process of `bayes` is fitted to the trials, and predicts points all over the space: a share is the
    parameter's total Sobol' index (Jansen 1999, doi 10.1016/S0010-4655(98)00154-4), what it does together with others
    included. Empty where there are too few trials, or nothing to tell apart.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    from roxxel_dist.sweep.samplers import gp
    from roxxel_dist.sweep.samplers.acquisition import DIVERGED, FIT_TO, is_diverged, standardize, training_subset
    from roxxel_dist.sweep.samplers.bayes import SpaceTransform

    space = study.sweep.space
    keys = [key for mixture in space.mixtures for key in mixture.keys]
    trials = [t for t in study.done if len(t.point) == len(space.axes) and all(key in t.params for key in keys)]
    if len(trials) < FEWEST or len({trial.value for trial in trials}) < 2 or not space.axes:
        return {}
    transform, rng = SpaceTransform(study.sweep), np.random.default_rng(0)
    # The points of shares as the search has them depend on the data, which need not be here.
    points = [space.with_shares(trial.point, space.shares_of(trial.params)) for trial in trials]
    features = transform.encode(transform.rows(points))
    groups: dict[str, Any] = {parameter.name: dim for dim, parameter in enumerate(space.free)}
    for mixture, axes in zip(space.mixtures, space.share_axes, strict=True):
        groups[f"mixture.{mixture.phases[0]}"] = axes
    # Most trials of a search are near the best, so the others are most of the spread over the space and must not be
    # cut off as in the search. A diverged loss counts as the worst of those that did not diverge.
    found = study.sweep.sign * np.array([float(trial.value or 0.0) for trial in trials])
    values = standardize(np.minimum(found, found[~is_diverged(found)].max()), DIVERGED)
    rows, others = (transform.from_cube(rng.random((SAMPLES, transform.dims))) for _ in range(2))
    with threadpool_limits(1, user_api="blas"):
        subset, given = training_subset(values, FIT_TO), training_subset(values, CONDITIONED_ON)
        theta = gp.fit_hyperparameters(features[subset], values[subset])
        process = gp.condition(features[given], values[given], theta)
        means, spread = process.predict(transform.encode(rows))[0], []
        for dims in groups.values():
            changed = rows.copy()
            changed[:, dims] = others[:, dims]
            spread.append(float(np.mean((means - process.predict(transform.encode(changed))[0]) ** 2)))
    total = sum(spread)
    return {name: share / total for name, share in zip(groups, spread, strict=True)} if total > 0 else {}


COMPARED = 6
"""Values of a parameter whose curves are compared at most."""
POINTS = 60
"""Of a median curve."""
FENCE = 30.0
"""Times the median distance from the median that a value may be away from it, before it is drawn at the edge."""
MEMORY = ("vram_gb", "ram_gb")
MOE = "use_moe"
Curve = list[tuple[float, float]]


def _order(name: str, value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, before all else by its name: null, texts, truth values, lists."""
    return (False, float(value), name) if is_number(value) else (True, 0.0, name)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis on which most of the values can be told apart, however far away some are.

    The distance of a value from the median may be `FENCE` times the median distance; where most values are equal, the
    least distance of another one.
    """
    middle = statistics.median(values)
    distances = [abs(value - middle) for value in values]
    usual = statistics.median(distances) or min((distance for distance in distances if distance), default=0.0)
    inside = [value for value, distance in zip(values, distances, strict=True) if distance <= FENCE * usual]
    return min(inside), max(inside)


def draw(study: Study, folder: Path) -> list[Path]:
    """A plot for each parameter with few values, and one of the memory; only of trials that this package trained.

    Raises:
        ImportError: matplotlib is not installed.
    """
    trials = [trial for trial in study.done if is_run(study.run_dir(trial))]
    logs = [read_rows(study.run_dir(trial) / METRICS) for trial in trials]
    metric, pictures = study.sweep.metric, []
    curves = [[(row.get("tokens", math.nan), row[metric]) for row in rows if metric in row] for rows in logs]
    params = [flat(trial.params) for trial in trials]
    for name in varied_parameters(study):
        values = {str(row[name]): row[name] for row in params if row.get(name, LEFT_OUT) is not LEFT_OUT}
        groups: dict[str, list[Curve]] = {
            value: [] for value in sorted(values, key=lambda key: _order(key, values[key]))
        }
        for row, curve in zip(params, curves, strict=True):
            if row.get(name, LEFT_OUT) is not LEFT_OUT and curve:
                groups[str(row[name])].append(curve)
        groups = {value: lines for value, lines in groups.items() if lines}
        few = 1 < len(groups) <= COMPARED and any(len(group) > 1 for group in groups.values())
        if few and not any(isinstance(value, float) for value in values.values()):
            picture = folder / f"by_{re.sub(r'[^A-Za-z0-9-]', '_', name)}.png"
            named = [(short(values[value]), lines) for value, lines in groups.items()]
            pictures.append(_curves(metric, name, named, picture))
    used = [[[row[key] for row in rows if key in row] for key in MEMORY] for rows in logs]
    if peaks := [(trial, max(gpu or ram)) for trial, (gpu, ram) in zip(trials, used, strict=True) if gpu or ram]:
        pictures.append(_memory(study, peaks, folder / "memory.png"))
    return pictures


def median_curve(lines: Sequence[Curve]) -> Curve:
    """The median of several lines of (x, y); one that has ended keeps its last value, and counts from its first."""
    xs = np.linspace(max(line[0][0] for line in lines), max(line[-1][0] for line in lines), POINTS)
    heights = [np.interp(xs, *np.array(line, dtype=float).T) for line in lines]
    return list(zip(xs.tolist(), np.median(heights, 0).tolist(), strict=True))


def _curves(metric: str, name: str, groups: Sequence[tuple[str, list[Curve]]], picture: Path) -> Path:
    """The metric over the tokens: a thin line a trial, a thick one for the median of those that share a value."""
    with figure(picture) as axes:
        from matplotlib.collections import LineCollection

        for index, (value, lines) in enumerate(groups):
            axes.add_collection(LineCollection(lines, colors=f"C{index}", lw=0.7, alpha=0.3))
            text = label(f"{name} {value}: median of {len(lines)}")
            axes.plot(*zip(*median_curve(lines), strict=True), color=f"C{index}", lw=2.4, label=text, zorder=3)
        axes.autoscale_view()
        low, high = limits([y for _, lines in groups for line in lines for _, y in line])
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low)) if high > low else None
        axes.set(xlabel="tokens", ylabel=label(metric))
        beyond = sum(any(not low <= y <= high for _, y in line) for _, lines in groups for line in lines)
        title = f"{counted(beyond, 'curve')} beyond the edge" if beyond else None
        axes.legend(fontsize=8, loc="upper right", title=title, title_fontsize=8)
    return picture


def _memory(study: Study, peaks: Sequence[tuple[Trial, float]], picture: Path) -> Path:
    """Peak memory (GB, 10^9 bytes, of the fullest device, or of the process on CPU) over the parameters.

    Dense models against mixtures of experts, where there are both.
    """
    base = load_yaml(study.path / BASE) if (study.path / BASE).exists() else {}
    is_moe = [bool(trial.params.get(MOE, base.get(MOE))) for trial, _ in peaks]
    with figure(picture, inches=(7, 4.5)) as axes:
        for name, kind, colour in (("dense", False, "#4f86c6"), ("mixture of experts", True, "#d9822b")):
            if those := [pair for pair, moe in zip(peaks, is_moe, strict=True) if moe is kind]:
                text = name if len(set(is_moe)) == 2 else "all trials"
                text += f": median {statistics.median(used for _, used in those):.3g} GB of {len(those)}"
                millions = [_parameters(study.run_dir(trial)) / 1e6 for trial, _ in those]
                axes.scatter(millions, [used for _, used in those], color=colour, s=26, label=text)
        axes.set(xlabel="parameters (millions)", ylabel="peak memory (GB)")
        axes.legend(fontsize=8, loc="upper left")
    return picture


def _parameters(run: Path) -> int:
    """Of the model of a run; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be being written
        return int(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["parameters"])
    return 0
