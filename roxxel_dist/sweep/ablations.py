"""What one choice does to training, over all trials: how the metric falls with each value, and what memory it takes."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.report import Run, read_runs
from roxxel_dist.run_directory import is_run
from roxxel_dist.sweep.axes import column
from roxxel_dist.sweep.report import varied
from roxxel_dist.sweep.study import Study, short

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


def middle(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
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
        axes.plot(*zip(*middle(lines), strict=True), color=f"C{number}", lw=2.4, label=label)
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
