"""The output in a notebook: a bar and the curve of the loss, redrawn in one place, and lines below it."""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roxxel_dist.launcher.output.bar import clock, scaled

WIDTH, HEIGHT, MARGIN = 640, 180, 44
MOST = 600
"""Points of a curve that are drawn about, at most."""
CURVES = {"train_loss": "#1f6fd6", "val_loss": "#d9720b"}

Points = list[tuple[int, float]]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; one that runs scripts or a shell of IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookTracker:
    """Shows the run in the output of the cell that trains; `total_steps` is 0 while unknown."""

    def __init__(self, total_steps: int = 0) -> None:
        from IPython.display import HTML, display

        self.total_steps = total_steps
        self._html = HTML
        self._record: Mapping[str, Any] = {}
        self._curves: dict[str, Points] = {name: [] for name in CURVES}
        self._place: Any = display(HTML(self._drawn()), display_id=True)

    def text(self, text: str) -> None:
        """Print lines."""
        print(text, flush=True)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in one logged step."""
        for name, points in self._curves.items():
            if name in row:
                points.append((int(row["step"]), float(row[name])))

    def rewind(self, step: int) -> None:
        """The rows after `step` are void."""
        for points in self._curves.values():
            points[:] = [point for point in points if point[0] <= step]

    def status(self, record: Mapping[str, Any]) -> None:
        """Redraw."""
        self._record = record
        self._place.update(self._html(self._drawn()))

    def close(self) -> None:
        """Draw the last rows."""
        self._place.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        step = self._record.get("step", 0)
        total = self._record.get("total") or self.total_steps
        words = [f"step {step:,}" + (f" of {total:,}" if total else ""), self._record.get("phase") or ""]
        speed, left = self._record.get("tokens_per_s"), self._record.get("eta_s")
        words += [f"{scaled(speed)} tokens/s" if speed else "", f"{clock(left)} left" if left and step < total else ""]
        bar = f'<progress value="{step}" max="{total or 1}" style="width: 240px" aria-label="steps"></progress>'
        return f"<div>{bar} {escape(' | '.join(filter(None, words)))}</div>{curve(self._curves)}"


def curve(curves: Mapping[str, Points]) -> str:
    """An SVG picture of curves by name; nothing where there are no two points."""
    points = [point for curve in curves.values() for point in curve]
    if len(points) < 2:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(point: tuple[int, float]) -> str:
        x = MARGIN + (point[0] - left) / max(1, right - left) * (WIDTH - MARGIN - 8)
        y = 8 + (high - point[1]) / ((high - low) or 1.0) * (HEIGHT - 34)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{CURVES[name]}" points="{" ".join(map(place, _thin(line)))}"/>'
        f'<text x="{WIDTH - 8}" y="{20 + 16 * i}" text-anchor="end" fill="{CURVES[name]}">'
        f"{name} {line[-1][1]:.4f}</text>"
        for i, (name, line) in enumerate(curves.items())
        if line
    )
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{text}</text>'
        for x, y, anchor, text in (
            (MARGIN - 6, 16, "end", f"{high:.4g}"),
            (MARGIN - 6, HEIGHT - 26, "end", f"{low:.4g}"),
            (MARGIN, HEIGHT - 6, "start", f"{left:,}"),
            (WIDTH - 8, HEIGHT - 6, "end", f"{right:,}"),
        )
    )
    title = "; ".join(f"{name} {line[-1][1]:.4f}" for name, line in curves.items() if line)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
        f'font-family="sans-serif" font-size="12">{lines}{labels}</svg>'
    )


def _thin(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    every = max(1, len(points) // MOST)
    return [*points[: len(points) - 1 : every], points[-1]]
