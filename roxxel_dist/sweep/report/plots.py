"""What one choice does to training, over all trials: how the metric falls with each value, and what memory it takes.

How the values of a parameter lie on an axis of a picture.

A study as pictures, each a PNG file. matplotlib is imported when one is drawn.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.report import Run, read_runs
from roxxel_dist.run_directory import is_run
from roxxel_dist.sweep.report.importance import importances
from roxxel_dist.sweep.report.text import STATES, varied
from roxxel_dist.sweep.space.distributions import Distribution
from roxxel_dist.sweep.study import Study, flat, short

MANY = 12
"""Values beyond which numbers are an axis of numbers, and no longer names beside each other."""
SPREAD = 30.0
"""Times that the largest is the smallest where a logarithm shows more."""


@dataclass(frozen=True, kw_only=True)
class PlotScale:
    """The axis of one parameter, or of the metric."""

    name: str
    names: tuple[str, ...] | None
    """Values in a row beside each other; None for an axis of numbers."""
    is_log: bool

    def position(self, value: Any) -> float | None:
        """Where a value lies: its number among names, or itself. None for one that was left out."""
        if self.names is None:
            return float(value) if _is_number(value) else None
        return float(self.names.index(short(value))) if short(value) in self.names else None


def plot_scale(name: str, values: Sequence[Any], distribution: Distribution | None = None) -> PlotScale:
    """The axis on which these values lie; of a parameter with endless values one of numbers, however few were tried."""
    known = [value for value in values if value is not None]
    distinct = {short(value): value for value in known}
    numeric = bool(known) and all(map(_is_number, known))
    endless = distribution is not None and distribution.choices is None
    if numeric and (endless or len(distinct) > MANY):
        least, most = min(known), max(known)
        is_log = distribution is not None and "log" in distribution.name
        return PlotScale(name=name, names=None, is_log=least > 0 and (is_log or most / least >= SPREAD))
    ordered = sorted(distinct, key=distinct.__getitem__) if numeric else sorted(distinct)
    return PlotScale(name=name, names=tuple(ordered), is_log=False)


def column(params: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """The value of a parameter in each of many trials; None where a trial has none."""
    return [flat(one).get(name) for one in params]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


COLOURS = {"done": "#4f86c6", "stopped": "#f2b134", "failed": "#c8423b"}
MAP = ("viridis", "viridis_r")
"""Of colours: where less is better, and where more is; good ones are dark."""
STAR: dict[str, Any] = {"marker": "*", "color": "#e63946", "edgecolors": "#222222", "linewidths": 0.6}
"""The best trial, in every picture."""
WIDE = 16
"""Axes that parallel coordinates show at most: the most important ones."""


def draw(study: Study, folder: Path) -> list[Path]:
    """Draw what can be drawn of a study into a folder, which is made.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib.backends.backend_agg  # noqa: F401  before anything is made

    if not study.done:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    weights = importances(study)
    made = [_save(folder / "best_so_far.png", (9, 5), lambda axes: _best_so_far(study, axes))]
    if names := varied(study):
        first = sorted(names, key=lambda name: -weights.get(name, 0.0))
        made += [_parallel(study, first[:WIDE], folder / "parallel.png"), _slices(study, first, folder / "slices.png")]
    if weights:
        size = (8, 1.2 + 0.32 * len(weights))
        made.append(_save(folder / "importance.png", size, lambda axes: _importance(weights, axes)))
    return made + draw_ablations(study, folder)


def _save(picture: Path, size: tuple[float, float], paint: Callable[[Any], None]) -> Path:
    """A picture of one pair of axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    paint(figure.add_subplot())
    FigureCanvasAgg(figure).print_png(str(picture))
    return picture


def _best_so_far(study: Study, axes: Any) -> None:
    """The value of every trial in the order in which they were asked for, and the best up to each."""
    trials = sorted(study.history.trials.values(), key=lambda one: one.number)
    told = [one for one in trials if one.value is not None]
    for state in ("done", "stopped"):
        if those := [one for one in told if one.state == state]:
            axes.scatter(
                [one.number for one in those], [one.value for one in those], s=22, color=COLOURS[state],
                label=STATES[state], zorder=3,
            )  # fmt: skip
    best, line = math.inf, []
    for one in told:
        best = min(best, study.sweep.sign * float(one.value or 0.0))
        line.append(study.sweep.sign * best)
    axes.step([one.number for one in told], line, where="post", color="#2a9d5c", lw=2, label="best so far")
    if failed := [one.number for one in trials if one.state == "failed"]:
        height = max(study.sweep.sign * float(one.value or 0.0) for one in told) * study.sweep.sign
        axes.scatter(failed, [height] * len(failed), marker="x", color=COLOURS["failed"], label="failed (at the worst)")
    first = study.done[0]
    axes.scatter(first.number, float(first.value or 0.0), s=160, zorder=4, label=f"best: trial {first.number}", **STAR)
    axes.set(xlabel="trial", ylabel=study.sweep.metric)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _importance(weights: dict[str, float], axes: Any) -> None:
    ordered = sorted(weights.items(), key=lambda pair: pair[1])
    axes.barh([name for name, _ in ordered], [100 * share for _, share in ordered], color="#4f86c6")
    axes.set(xlabel="share of the spread of the metric (total Sobol' index), %")
    axes.grid(axis="x", alpha=0.25)


def _distributions(study: Study) -> dict[str, Distribution]:
    """Of each parameter of the space."""
    return {one.name: one.distribution for one in study.sweep.space.parameters}


def _colours(study: Study) -> tuple[Any, list[float]]:
    """(norm, value) of every trial that has one, the worst first: those beyond the worst tenth share its colour."""
    from matplotlib.colors import Normalize

    values = [float(one.value or 0.0) for one in reversed(study.done)]
    ordered = sorted(values)
    cut = max(0, len(ordered) // 10)
    ends = (ordered[0], ordered[-1 - cut]) if study.sweep.sign > 0 else (ordered[cut], ordered[-1])
    return Normalize(*ends, clip=True), values


def _parallel(study: Study, names: Sequence[str], picture: Path) -> Path:
    """A line a trial over one axis a parameter, the metric last; the best are drawn last."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    norm, values = _colours(study)
    scale = colormaps[MAP[study.sweep.sign < 0]]
    trials = list(reversed(study.done))
    columns = {name: column([one.params for one in trials], name) for name in names} | {study.sweep.metric: values}
    kinds = _distributions(study)
    axes_of = [plot_scale(name, found, kinds.get(name)) for name, found in columns.items()]
    heights = [_heights(one, columns[one.name]) for one in axes_of]
    figure = Figure(figsize=(max(7.0, 1.15 * len(axes_of)), 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, value in enumerate(values):
        points = [(x, found[number]) for x, found in enumerate(heights) if found[number] is not None]
        axes.plot(*zip(*points, strict=True), color=scale(norm(value)), lw=1.2, alpha=0.75)
        if number == len(values) - 1:
            label = f"best: trial {trials[number].number}"
            axes.plot(*zip(*points, strict=True), color=STAR["color"], lw=2.6, marker="*", ms=9, label=label)
            axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    for x, one in enumerate(axes_of):
        axes.axvline(x, color="#444444", lw=0.8)
        for label, height in _ticks(one, columns[one.name]):
            axes.annotate(label, (x, height), xytext=(3, 0), textcoords="offset points", fontsize=7, va="center")
    axes.set_xticks(range(len(axes_of)), [one.name for one in axes_of], rotation=30, ha="right", fontsize=8)
    axes.set(yticks=[], xlim=(-0.2, len(axes_of) - 0.4), ylim=(-0.05, 1.05))
    figure.colorbar(ScalarMappable(norm=norm, cmap=scale), ax=axes, label=study.sweep.metric)
    FigureCanvasAgg(figure).print_png(str(picture))
    return picture


def _scaled(one: PlotScale, values: Sequence[Any]) -> list[float | None]:
    places = [one.position(value) for value in values]
    return [None if place is None else math.log(place) if one.is_log else place for place in places]


def _heights(one: PlotScale, values: Sequence[Any]) -> list[float | None]:
    """Places from 0 to 1."""
    places = _scaled(one, values)
    known = [place for place in places if place is not None]
    least, span = min(known), max(known) - min(known)
    return [None if place is None else (place - least) / span if span else 0.5 for place in places]


def _ticks(one: PlotScale, values: Sequence[Any]) -> list[tuple[str, float]]:
    """What is written along an axis, and how high."""
    if one.names is not None:
        most = max(1, len(one.names) - 1)
        return [(name, number / most if len(one.names) > 1 else 0.5) for number, name in enumerate(one.names)]
    places = [place for place in map(one.position, values) if place is not None]
    return [(f"{min(places):.3g}", 0.0), (f"{max(places):.3g}", 1.0)]


def _slices(study: Study, names: Sequence[str], picture: Path) -> Path:
    """The metric over each parameter alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = min(4, len(names))
    tall = math.ceil(len(names) / wide)
    figure = Figure(figsize=(3.2 * wide, 2.6 * tall), dpi=110, layout="constrained")
    trials, kinds = study.done, _distributions(study)
    for number, name in enumerate(names):
        axes = figure.add_subplot(tall, wide, number + 1)
        values = column([one.params for one in trials], name)
        found = plot_scale(name, values, kinds.get(name))
        places = [found.position(value) for value in values]
        shown = [
            (x, one.value, one.number)
            for x, one in zip(places, trials, strict=True)
            if x is not None and one.value is not None
        ]
        axes.scatter(*zip(*((x, y) for x, y, _ in shown), strict=True), c=[n for *_, n in shown], cmap="Blues", s=16,
                     edgecolors="#444444", linewidths=0.3)  # fmt: skip
        if places[0] is not None:
            axes.scatter(*shown[0][:2], s=70, zorder=3, **STAR)
        if found.is_log:
            axes.set_xscale("log")
        if found.names is not None:
            axes.set_xticks(range(len(found.names)), found.names, fontsize=7)
            axes.set_xlim(-0.5, len(found.names) - 0.5)
        axes.set_xlabel(name, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    figure.supylabel(study.sweep.metric, fontsize=9)
    figure.suptitle("a point a trial: the darker, the later; the star is the best", fontsize=9)
    FigureCanvasAgg(figure).print_png(str(picture))
    return picture


MOST = 6
"""Values of a parameter that are compared at most."""
MEMORY = ("vram_gb", "ram_gb")
MOE = "use_moe"
POINTS = 60


def draw_ablations(study: Study, folder: Path) -> list[Path]:
    """A picture for each parameter with few values, and one of the memory; only of trials that this package trained."""
    trials = [one for one in study.done if is_run(study.run_dir(one))]
    runs = dict(zip([one.number for one in trials], read_runs([study.run_dir(one) for one in trials]), strict=True))
    made = []
    for name in varied(study):
        values = column([one.params for one in trials], name)
        groups: dict[str, list[Run]] = {}
        for trial, value in zip(trials, values, strict=True):
            if value is not None and runs[trial.number].points(study.sweep.metric):
                groups.setdefault(short(value), []).append(runs[trial.number])
        few = 1 < len(groups) <= MOST and any(len(group) > 1 for group in groups.values())
        if few and not any(isinstance(value, float) for value in values):
            made.append(_curves(study, name, groups, folder / f"by_{name.replace('.', '_')}.png"))
    if memory := [(run, used) for run in runs.values() if (used := peak_memory(run)) is not None]:
        made.append(_memory(memory, folder / "memory.png"))
    return made


def peak_memory(run: Run) -> float | None:
    """GB (10^9 bytes) of the fullest device, or of the process on CPU; None where the log does not say."""
    return next((max(found) for key in MEMORY if (found := [row[key] for row in run.rows if key in row])), None)


def median_curve(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The median of several lines of (x, y); one that has ended keeps its last value, and counts from its first."""
    start = max(line[0][0] for line in lines)
    stop = max(line[-1][0] for line in lines)
    places = [start + (stop - start) * number / (POINTS - 1) for number in range(POINTS)]
    return [(x, statistics.median(_at(line, x) for line in lines)) for x in places]


def _at(line: Sequence[tuple[float, float]], x: float) -> float:
    """The height of a line at x, straight between its points."""
    before = max((number for number, point in enumerate(line) if point[0] <= x), default=0)
    (x0, y0), (x1, y1) = line[before], line[min(before + 1, len(line) - 1)]
    return y0 if x1 <= x0 or x >= x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _curves(study: Study, name: str, groups: dict[str, list[Run]], picture: Path) -> Path:
    """The metric over the tokens: a thin line a trial, a thick one for the median of those that share a value."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for number, (value, group) in enumerate(sorted(groups.items())):
        lines: list[Any] = [run.points(study.sweep.metric) for run in group]
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=f"C{number}", lw=0.7, alpha=0.3)
        label = f"{name} {value}: median of {len(group)}"
        axes.plot(*zip(*median_curve(lines), strict=True), color=f"C{number}", lw=2.4, label=label)
    axes.set(xlabel="tokens", ylabel=study.sweep.metric)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))
    return picture


def _memory(found: Sequence[tuple[Run, float]], picture: Path) -> Path:
    """Peak memory over the parameters; dense models against mixtures of experts, where there are both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    kinds = {bool(run.fields.get(MOE)) for run, _ in found}
    for name, is_moe, colour in (("dense", False, "#4f86c6"), ("mixture of experts", True, "#d9822b")):
        those = [(run, used) for run, used in found if bool(run.fields.get(MOE)) is is_moe]
        if those:
            label = name if len(kinds) == 2 else "all trials"
            middle_of = statistics.median(used for _, used in those)
            axes.scatter([(run.parameters or 0) / 1e6 for run, _ in those], [used for _, used in those], color=colour,
                         s=26, label=f"{label}: median {middle_of:.3g} GB of {len(those)}")  # fmt: skip
    axes.set(xlabel="parameters (millions)", ylabel="peak memory (GB)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))
    return picture
