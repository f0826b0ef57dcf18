"""Runs as pictures. matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path

from roxxel_dist.report.runs import Run
from roxxel_dist.report.table import duration
from roxxel_dist.train.goodput import SPENT

MISSING = "no pictures: pip install 'roxxel-dist[plot]' draws them"
LOSS, GOODPUT = "loss.png", "goodput.png"
COLOURS = ("#2a9d5c", "#a8d5ba", "#9aa0a6", "#f2b134", "#4f86c6", "#8e6bbf", "#d98cb3", "#c8423b")
"""Of what time is spent on, in the order of `SPENT`."""


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw what can be drawn of some runs into a folder, which is made; returns the PNG files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib.backends.backend_agg  # noqa: F401  before anything is made

    made = []
    for name, act, drawn in (
        (LOSS, _draw_losses, [run for run in runs if run.points("train_loss")]),
        (GOODPUT, _draw_goodput, [run for run in runs if sum(run.spent.values()) > 0]),
    ):
        if drawn:
            folder.mkdir(parents=True, exist_ok=True)
            act(drawn, folder / name)
            made.append(folder / name)
    return made


def _draw_losses(runs: Sequence[Run], picture: Path) -> None:
    """Loss over tokens: a colour a run, validation with points, a dotted line where a phase begins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        colour = f"C{number % 10}"
        axes.plot(*zip(*run.points("train_loss"), strict=True), color=colour, lw=1, alpha=0.7, label=run.name)
        if judged := run.points("val_loss"):
            axes.plot(
                *zip(*judged, strict=True), color=colour, lw=1.3, ls="--", marker="o", ms=3.5,
                label=f"{run.name}, validation",
            )  # fmt: skip
        for tokens in run.phase_ends:
            axes.axvline(tokens, color=colour, ls=":", lw=1)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))


def _draw_goodput(runs: Sequence[Run], picture: Path) -> None:
    """What the time of each run went to, a bar a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.45 * len(runs)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    totals = [sum(run.spent.values()) for run in runs]
    places, left = list(range(len(runs))), [0.0] * len(runs)
    for kind, colour in zip(SPENT, COLOURS, strict=True):
        widths = [100 * run.spent[kind] / total for run, total in zip(runs, totals, strict=True)]
        if any(widths):
            axes.barh(places, widths, left=left, color=colour, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [f"{run.name}\n{duration(total)}" for run, total in zip(runs, totals, strict=True)])
    axes.invert_yaxis()
    axes.set(xlabel="% of the time", xlim=(0, 100))
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))
