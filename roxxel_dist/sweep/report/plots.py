"""A study as plots, each a PNG file."""

import contextlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.config import load_yaml
from roxxel_dist.display import figure
from roxxel_dist.run_directory import METRICS, SUMMARY, is_run
from roxxel_dist.sweep.journal import Trial
from roxxel_dist.sweep.report.text import STATES, varied
from roxxel_dist.sweep.space.distributions import Distribution, is_number
from roxxel_dist.sweep.study import BASE, LEFT_OUT, Study, flat, short
from roxxel_dist.train.loggers.csv_jsonl import read_rows

MANY = 12
"""Values beyond which numbers are an axis of numbers, and no longer names beside each other."""
SPREAD = 30.0
"""Times that the largest is the smallest where a logarithm shows more."""
WIDE = 16
"""Axes that parallel coordinates show at most: the most important ones."""
COMPARED = 6
"""Values of a parameter whose curves are compared at most."""
POINTS = 60
"""Of a median curve."""
FENCE = 30.0
"""Times the median distance from the median that a value may be away from it, before it is drawn at the edge."""
LABELS = 24
"""Names that have room along an axis."""
LONGEST, LONGEST_VALUE = 28, 14
"""Characters of a parameter's name, and of a value, beside an axis."""
COLOURS = {"done": "#4f86c6", "stopped": "#f2b134", "paused": "#9a9a9a", "failed": "#c8423b"}
MAP = ("viridis", "viridis_r")
"""Of colours: where less is better, and where more is; good ones are dark."""
STAR: dict[str, Any] = {"marker": "*", "color": "#e63946", "edgecolors": "#222222", "linewidths": 0.6}
"""The best trial, in every plot."""
MEMORY = ("vram_gb", "ram_gb")
MOE = "use_moe"
Curve = list[tuple[float, float]]


def draw(study: Study, folder: Path, weights: Mapping[str, float]) -> list[Path]:
    """Draw what can be drawn of a study into a folder, which is made; `weights` say how much each parameter matters.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not study.done:
        return []
    pictures = [_best_so_far(study, folder / "best_so_far.png")]
    if names := sorted(varied(study), key=lambda name: -weights.get(name, 0.0)):
        pictures.append(_parallel(study, names[:WIDE], folder / "parallel.png"))
        pictures.append(_slices(study, names, folder / "slices.png"))
    if weights:
        pictures.append(_importance(weights, folder / "importance.png"))
    return pictures + draw_ablations(study, folder)


@dataclass(frozen=True, kw_only=True)
class PlotScale:
    """The axis of one parameter, or of the metric."""

    name: str
    names: tuple[str, ...] | None
    """Values in a row beside each other; None for an axis of numbers."""
    is_log: bool

    def position(self, value: Any) -> float | None:
        """Where a value lies: its index among names, or itself. None for one that was left out."""
        if value is LEFT_OUT:
            return None
        return float(value) if self.names is None else float(self.names.index(short(value)))

    def heights(self, values: Sequence[Any]) -> np.ndarray:
        """Positions from 0 to 1, float64[n]; NaN for a value that was left out."""
        positions = np.array([self.position(value) for value in values], dtype=float)
        if self.is_log:
            positions = np.log(positions)
        least, span = np.nanmin(positions), np.nanmax(positions) - np.nanmin(positions)
        return (positions - least) / span if span else positions - least + 0.5

    @property
    def every(self) -> int:
        """Of the names, every which one has room for a label."""
        return math.ceil(len(self.names or ()) / LABELS)

    def ticks(self, values: Sequence[Any]) -> list[tuple[str, float]]:
        """The labels along the axis, and their heights."""
        if self.names is not None:
            labels = list(zip(self.names, self.heights(self.names), strict=True))
            return [(shortened(name, LONGEST_VALUE), height) for name, height in labels[:: self.every]]
        known = [position for position in map(self.position, values) if position is not None]
        return [(f"{min(known):.3g}", 0.0), (f"{max(known):.3g}", 1.0)]


def plot_scale(name: str, values: Sequence[Any], distribution: Distribution | None = None) -> PlotScale:
    """The axis on which these values lie; of a parameter with endless values one of numbers, however few were tried."""
    known = [value for value in values if value is not LEFT_OUT]
    distinct = {short(value): value for value in known}
    numeric = bool(known) and all(map(is_number, known))
    endless = distribution is not None and distribution.choices is None
    if numeric and (endless or len(distinct) > MANY):
        least, most = min(known), max(known)
        is_log = distribution is not None and "log" in distribution.name
        return PlotScale(name=name, names=None, is_log=least > 0 and (is_log or most / least >= SPREAD))
    return PlotScale(name=name, names=tuple(sorted(distinct, key=lambda key: _order(key, distinct[key]))), is_log=False)


def _order(name: str, value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, before all else by its name: null, texts, truth values, lists."""
    return (False, float(value), name) if is_number(value) else (True, 0.0, name)


def shortened(text: str, most: int) -> str:
    """A text of so many characters at most, without its middle: names differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


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


def _columns(study: Study, trials: Sequence[Trial], names: Sequence[str]) -> list[tuple[PlotScale, list[Any]]]:
    """The scale of each parameter that any of the trials has, and its value in each; None where a trial has none."""
    kinds = {parameter.name: parameter.distribution for parameter in study.sweep.space.parameters}
    rows = [flat(trial.params) for trial in trials]
    columns = {name: [row.get(name, LEFT_OUT) for row in rows] for name in names if any(name in row for row in rows)}
    return [(plot_scale(name, values, kinds.get(name)), values) for name, values in columns.items()]


def _values(trials: Sequence[Trial]) -> np.ndarray:
    return np.array([trial.value for trial in trials], dtype=float)


def _at_the_edge(values: np.ndarray) -> tuple[np.ndarray, str]:
    """The values within the limits of their axis, and the words about those that are drawn at its edge."""
    low, high = limits(values.tolist())
    beyond = int(np.sum((values < low) | (values > high)))
    return np.clip(values, low, high), f"; {beyond} lie beyond the axis, and are drawn at its edge" if beyond else ""


def _best_so_far(study: Study, picture: Path) -> Path:
    """The value of every trial in the order in which they were asked for, and the best up to each."""
    trials = sorted(study.history.trials.values(), key=lambda trial: trial.number)
    valued, first = [trial for trial in trials if trial.value is not None], study.done[0]
    better = np.minimum if study.sweep.sign > 0 else np.maximum
    drawn, beyond = _at_the_edge(_values(valued))
    heights = dict(zip([trial.number for trial in valued], drawn, strict=True))
    with figure(picture, inches=(9, 5)) as axes:
        for state in ("done", "stopped", "paused"):
            if those := [trial for trial in valued if trial.state == state]:
                numbers, label = [trial.number for trial in those], STATES[state]
                axes.scatter(
                    numbers, [heights[number] for number in numbers], s=22, color=COLOURS[state], label=label, zorder=3
                )
        best = better.accumulate(drawn)
        axes.step([trial.number for trial in valued], best, where="post", color="#2a9d5c", lw=2, label="best so far")
        if failed := [trial.number for trial in trials if trial.state == "failed"]:
            worst = [heights[study.done[-1].number]] * len(failed)
            axes.scatter(failed, worst, marker="x", color=COLOURS["failed"], label="failed (at the worst)")
        axes.scatter(first.number, heights[first.number], s=160, zorder=4, label=f"best: trial {first.number}", **STAR)
        axes.set(xlabel=f"trial{beyond}", ylabel=study.sweep.metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, loc="upper right" if study.sweep.sign > 0 else "lower right")
    return picture


def _importance(weights: Mapping[str, float], picture: Path) -> Path:
    ordered = sorted(weights.items(), key=lambda pair: pair[1])
    with figure(picture, inches=(8, 1.2 + 0.32 * len(weights))) as axes:
        axes.barh([name for name, _ in ordered], [100 * share for _, share in ordered], color="#4f86c6")
        axes.set(xlabel="share of the spread of the metric (total Sobol' index), %")
        axes.grid(visible=False, axis="y")
    return picture


def _parallel(study: Study, names: Sequence[str], picture: Path) -> Path:
    """A line a trial over one axis a parameter, the metric last; the best are drawn last."""
    with figure(picture, inches=(max(7.0, 1.15 * (len(names) + 1)), 5)) as axes:
        from matplotlib.collections import LineCollection
        from matplotlib.colors import Normalize

        trials = study.done[::-1]
        values, beyond = _at_the_edge(_values(trials))
        ordered, cut = np.sort(values), len(trials) // 10
        # The worst tenth shares one colour.
        ends = (ordered[0], ordered[-1 - cut]) if study.sweep.sign > 0 else (ordered[cut], ordered[-1])
        columns = [*_columns(study, trials, names), (plot_scale(study.sweep.metric, values.tolist()), values.tolist())]
        heights = np.stack([scale.heights(column) for scale, column in columns], 1)
        curves = [[(x, y) for x, y in enumerate(row) if not math.isnan(y)] for row in heights]
        norm, colours = Normalize(*ends, clip=True), MAP[study.sweep.sign < 0]
        lines = LineCollection(curves, array=values, norm=norm, cmap=colours, lw=1.2, alpha=0.75)
        axes.add_collection(lines)
        label = f"best: trial {trials[-1].number}"
        axes.plot(*zip(*curves[-1], strict=True), color=STAR["color"], lw=2.6, marker="*", ms=9, label=label)
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0))
        for x, (scale, column) in enumerate(columns):
            axes.axvline(x, color="#444444", lw=0.8)
            for label, height in scale.ticks(column):
                axes.annotate(label, (x, height), xytext=(3, 0), textcoords="offset points", fontsize=7, va="center")
        labels = [shortened(scale.name, LONGEST) for scale, _ in columns]
        axes.set_xticks(range(len(columns)), labels, rotation=30, ha="right", fontsize=8)
        axes.set(yticks=[], xlim=(-0.2, len(columns) - 0.4), ylim=(-0.05, 1.05))
        axes.grid(visible=False)
        axes.figure.colorbar(lines, ax=axes, label=f"{study.sweep.metric}{beyond}")
    return picture


def _slices(study: Study, names: Sequence[str], picture: Path) -> Path:
    """The metric over each parameter alone."""
    wide = min(4, len(names))
    tall, trials = math.ceil(len(names) / wide), study.done
    with figure(picture, inches=(3.2 * wide, 2.6 * tall)) as whole:
        drawing = whole.figure
        drawing.clear()
        (values, beyond), numbers = _at_the_edge(_values(trials)), np.array([trial.number for trial in trials])
        for index, (scale, column) in enumerate(_columns(study, trials, names)):
            axes = drawing.add_subplot(tall, wide, index + 1)
            positions = np.array([scale.position(value) for value in column], dtype=float)
            has = ~np.isnan(positions)
            axes.scatter(
                positions[has], values[has], c=numbers[has], cmap="Blues", s=16, edgecolors="#444444", linewidths=0.3
            )
            if has[0]:
                axes.scatter(positions[0], values[0], s=70, zorder=3, **STAR)
            if scale.is_log:
                axes.set_xscale("log")
            if scale.names is not None:
                names = [shortened(value, LONGEST_VALUE) for value in scale.names]
                shown, turned = range(0, len(names), scale.every), len("".join(names)) > LONGEST
                axes.set_xticks(shown, [names[i] for i in shown], fontsize=7, rotation=30 if turned else 0)
                axes.set_xlim(-0.5, len(scale.names) - 0.5)
            axes.set_xlabel(shortened(scale.name, LONGEST), fontsize=8)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.25)
        drawing.supylabel(study.sweep.metric, fontsize=9)
        drawing.suptitle(f"a point a trial: the darker, the later; the star is the best{beyond}", fontsize=9)
    return picture


def draw_ablations(study: Study, folder: Path) -> list[Path]:
    """A plot for each parameter with few values, and one of the memory; only of trials that this package trained."""
    trials = [trial for trial in study.done if is_run(study.run_dir(trial))]
    logs = [read_rows(study.run_dir(trial) / METRICS) for trial in trials]
    metric, pictures = study.sweep.metric, []
    curves = [[(row.get("tokens", math.nan), row[metric]) for row in rows if metric in row] for rows in logs]
    for scale, values in _columns(study, trials, varied(study)):
        groups: dict[str, list[Curve]] = {}
        for value, curve in zip(values, curves, strict=True):
            if value is not LEFT_OUT and curve:
                groups.setdefault(short(value), []).append(curve)
        few = 1 < len(groups) <= COMPARED and any(len(group) > 1 for group in groups.values())
        if few and not any(isinstance(value, float) for value in values):
            name = f"by_{re.sub(r'[^A-Za-z0-9-]', '_', scale.name)}.png"
            pictures.append(_curves(metric, scale.name, groups, folder / name))
    used = [[[row[key] for row in rows if key in row] for key in MEMORY] for rows in logs]
    if peaks := [(trial, max(gpu or ram)) for trial, (gpu, ram) in zip(trials, used, strict=True) if gpu or ram]:
        pictures.append(_memory(study, peaks, folder / "memory.png"))
    return pictures


def median_curve(lines: Sequence[Curve]) -> Curve:
    """The median of several lines of (x, y); one that has ended keeps its last value, and counts from its first."""
    xs = np.linspace(max(line[0][0] for line in lines), max(line[-1][0] for line in lines), POINTS)
    heights = [np.interp(xs, *np.array(line, dtype=float).T) for line in lines]
    return list(zip(xs.tolist(), np.median(heights, 0).tolist(), strict=True))


def _curves(metric: str, name: str, groups: dict[str, list[Curve]], picture: Path) -> Path:
    """The metric over the tokens: a thin line a trial, a thick one for the median of those that share a value."""
    with figure(picture) as axes:
        from matplotlib.collections import LineCollection

        for index, (value, lines) in enumerate(sorted(groups.items())):
            axes.add_collection(LineCollection(lines, colors=f"C{index}", lw=0.7, alpha=0.3))
            label = f"{name} {value}: median of {len(lines)}"
            axes.plot(*zip(*median_curve(lines), strict=True), color=f"C{index}", lw=2.4, label=label, zorder=3)
        axes.autoscale_view()
        low, high = limits([y for lines in groups.values() for line in lines for _, y in line])
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low)) if high > low else None
        axes.set(xlabel="tokens", ylabel=metric)
        axes.legend(fontsize=8, loc="upper right")
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
                label = name if len(set(is_moe)) == 2 else "all trials"
                label += f": median {statistics.median(used for _, used in those):.3g} GB of {len(those)}"
                millions = [_parameters(study.run_dir(trial)) / 1e6 for trial, _ in those]
                axes.scatter(millions, [used for _, used in those], color=colour, s=26, label=label)
        axes.set(xlabel="parameters (millions)", ylabel="peak memory (GB)")
        axes.legend(fontsize=8, loc="upper left")
    return picture


def _parameters(run: Path) -> int:
    """Of the model of a run; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be being written
        return int(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["parameters"])
    return 0
