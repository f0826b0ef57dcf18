"""The picture of a table: measured over target, as bars, with a line at the target."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from measure import Result

REACHED, MISSED = "#3b6ea5", "#d9730d"
MOST = 2.5
"""Longer bars are cut here; the number beside them is that of the whole."""
LABEL = 58
NO_BREAK = "\u00a0"


def drawn(results: Sequence[Result]) -> list[Result]:
    """Those that have a bar: a target other than zero, and something measured."""
    return [result for result in results if result.target and result.measured is not None]


def label(result: Result) -> str:
    """What a bar is of."""
    bound = f"[{'<=' if result.at_most else '>='} {result.target:.4g} {result.against}".rstrip() + "]"
    return textwrap.fill(f"{result.what} {bound.replace(' ', NO_BREAK)}", LABEL)


def draw(title: str, results: Sequence[Result], path: Path) -> None:
    """Write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = drawn(results)[::-1]
    lines = sum(label(result).count("\n") + 1 for result in shown)
    figure = Figure(figsize=(8.0, 0.9 + 0.15 * lines + 0.08 * len(shown)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, result in enumerate(shown):
        assert result.measured is not None
        assert result.target
        share = result.measured / result.target
        good = result.reached is True
        length = min(max(share, 0.0), MOST)
        axes.barh(place, length, color=REACHED if good else MISSED, hatch=None if good else "//", height=0.6)
        text = f"{share:.2f}{'' if share <= MOST else ' >'} {'' if good else 'MISSED'}".strip()
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line at the target does not cross it
        axes.text(
            length + 0.03, place, text, va="center", fontsize=7, color="black" if good else MISSED, bbox=behind
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.set_yticks(range(len(shown)), [label(result) for result in shown], fontsize=6.5)
    axes.set_xlim(0, MOST + 0.45)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("measured / target (the line is the target)", fontsize=7)
    axes.set_title(title, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
