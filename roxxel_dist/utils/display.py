"""Text tables, figures, numbers and the progress of a long operation, for people; values for JSON."""

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def aligned(rows: Sequence[Sequence[str]], *, left: int | None = 1) -> list[str]:
    """The lines of a table: its first `left` columns are aligned to the left (None: all), the others to the right."""
    columns = [
        [cell.ljust(width) if left is None or number < left else cell.rjust(width) for cell in column]
        for number, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def duration(seconds: float) -> str:
    """A time for people: in seconds, minutes or hours, by its size."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.{1 if seconds >= 36_000 else 2}f} h"


def counted(count: int, what: str) -> str:
    """A number of things: "1 trial", "4 trials"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes in units of 10^3."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:,.2f} {unit}"
    return f"{count:.0f} B"


def plain(value: Any) -> Any:
    """A value for JSON: None for numbers that are not finite, text for types that JSON does not have."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def label(name: str) -> str:
    """A name in a figure: `$` begins no formula, and `_` does not keep a curve out of the legend."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


@contextlib.contextmanager
def figure(picture: Path, *, inches: tuple[float, float] = (8, 4.5)) -> Iterator[Any]:
    """The axes of a figure, which is written as a PNG file at the end of the block; its folder is made. Raises
    ImportError: matplotlib is not installed. OSError: the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=inches, dpi=120, layout="constrained")
    axes = drawing.add_subplot()
    axes.grid(alpha=0.25)
    yield axes
    picture.parent.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font has no letters of a name: boxes are drawn
            FigureCanvasAgg(drawing).print_png(str(picture))
    except OSError as error:  # an error of a write, such as a full disk, names no file
        picture.unlink(missing_ok=True)
        error.filename = error.filename or str(picture)
        raise


PLAIN_STEPS = 4


@dataclass(frozen=True)
class ProgressBars:
    """Prints lines and bars, or nothing if it is not enabled."""

    enabled: bool

    def line(self, text: str) -> None:
        """Print one line."""
        if self.enabled:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how much of `total` is done; call the yielded function with each increment."""
        if self.enabled and sys.stderr.isatty():
            from rich import console, progress

            with progress.Progress(console=console.Console(stderr=True)) as shown:
                task = shown.add_task(text, total=total)
                yield lambda more: shown.advance(task, more)
            return
        done = quarters = 0

        def advance(more: int) -> None:
            nonlocal done, quarters
            done += more
            if done * PLAIN_STEPS // total > quarters:
                quarters = done * PLAIN_STEPS // total
                self.line(f"{text}: {100 * quarters // PLAIN_STEPS} %")

        yield advance
