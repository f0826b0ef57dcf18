"""A study as pictures, each a PNG file. matplotlib is imported when one is drawn."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.sweep.axes import Axis, axis, column
from roxxel_dist.sweep.distributions import Distribution
from roxxel_dist.sweep.importance import importances
from roxxel_dist.sweep.report import STATES, varied
from roxxel_dist.sweep.study import Study

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

    from roxxel_dist.sweep.ablations import draw_ablations

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
    axes_of = [axis(name, found, kinds.get(name)) for name, found in columns.items()]
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


def _scaled(one: Axis, values: Sequence[Any]) -> list[float | None]:
    places = [one.place(value) for value in values]
    return [None if place is None else math.log(place) if one.is_log else place for place in places]


def _heights(one: Axis, values: Sequence[Any]) -> list[float | None]:
    """Places from 0 to 1."""
    places = _scaled(one, values)
    known = [place for place in places if place is not None]
    least, span = min(known), max(known) - min(known)
    return [None if place is None else (place - least) / span if span else 0.5 for place in places]


def _ticks(one: Axis, values: Sequence[Any]) -> list[tuple[str, float]]:
    """What is written along an axis, and how high."""
    if one.names is not None:
        most = max(1, len(one.names) - 1)
        return [(name, number / most if len(one.names) > 1 else 0.5) for number, name in enumerate(one.names)]
    places = [place for place in map(one.place, values) if place is not None]
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
        found = axis(name, values, kinds.get(name))
        places = [found.place(value) for value in values]
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
