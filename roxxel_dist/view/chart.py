"""A curve in characters: Braille dots, two by four in a cell, or ASCII if the terminal has no Unicode."""

import math
from collections.abc import Sequence

from roxxel_dist.view.curve import Points

BRAILLE, DOTS = 0x2800, ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
LABEL = 8
"""Columns of the values beside a curve."""


def chart(
    curves: Sequence[Points], width: int, height: int, *, ascii_only: bool = False
) -> list[list[tuple[str, int]]]:
    """Lines of a chart of `width` columns and `height` rows: parts of text, each with the number of its curve, or -1.

    The last row has the first and the last step. Empty if there are no points, or no room.
    """
    points = [point for curve in curves for point in curve if math.isfinite(point[1])]
    columns, rows = width - LABEL - 2, height - 1
    if len(points) < 2 or columns < 8 or rows < 2:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, down = (1, 1) if ascii_only else (2, 4)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for number, curve in enumerate(curves):
        for x, y in _dots(curve, (left, right), (low, high), columns * across, rows * down):
            place = (y // down, x // across)
            bits, _ = cells.get(place, (0, number))
            cells[place] = bits | (1 if ascii_only else DOTS[x % 2][y % 4]), number
    labels = {0: high, rows - 1: low}
    lines = []
    for row in range(rows):
        value = f"{labels[row]:.4g}" if row in labels else ""
        parts = [(f"{value:>{LABEL}} {'|' if ascii_only else '│'}", -1)]
        for column in range(columns):
            bits, number = cells.get((row, column), (0, -1))
            text = " " if not bits else "*+xo"[number % 4] if ascii_only else chr(BRAILLE + bits)
            if parts[-1][1] == number:
                parts[-1] = parts[-1][0] + text, number
            else:
                parts.append((text, number))
        lines.append(parts)
    first, last = f"{left:,}", f"{right:,}"
    lines.append([(" " * (LABEL + 2) + first + last.rjust(columns - len(first)), -1)])
    return lines


def _dots(
    curve: Points, span: tuple[int, int], values: tuple[float, float], columns: int, rows: int
) -> list[tuple[int, int]]:
    """(column, row) of each dot: the points, and the line between neighbours."""
    (left, right), (low, high) = span, values
    scale = 1.0 if math.isfinite(high - low) else 0.5  # the width may be more than a float can say
    dots: list[tuple[int, int]] = []
    for step, value in curve:
        if not math.isfinite(value):
            continue
        x = round((step - left) / max(1, right - left) * (columns - 1))
        y = round((high * scale - value * scale) / ((high * scale - low * scale) or 1.0) * (rows - 1))
        if dots and (count := max(abs(x - dots[-1][0]), abs(y - dots[-1][1]))) > 1:
            (x0, y0), part = dots[-1], range(1, count)
            dots += [(x0 + round((x - x0) * i / count), y0 + round((y - y0) * i / count)) for i in part]
        dots.append((x, y))
    return dots
