"""The loss curve of a run as a picture."""

import csv
from pathlib import Path


def plot_losses(log: Path, picture: Path, phase_starts: list[int]) -> None:
    """Draw `training_log.csv` as a PNG: training and validation loss by step, a line where a phase begins.

    Args:
        log: the CSV file.
        picture: where the PNG goes; its folder is made.
        phase_starts: first step of each phase after the first.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with log.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for column, marker in (("train_loss", ""), ("val_loss", "o")):
        points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        if points:
            axes.plot(*zip(*points, strict=True), label=column.replace("_", " "), lw=1.3, marker=marker, markersize=3.5)
    for start in phase_starts:
        axes.axvline(start, color="0.5", ls="--", lw=1)
        axes.annotate(
            "next phase", (start, 1), xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points",
            va="top", fontsize=8, color="0.4",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(picture))
