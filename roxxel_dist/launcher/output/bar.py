"""The live bar of a training run, at the bottom of the terminal; lines are printed above it."""

import math
import time
from typing import Any, Self, TextIO


class Bar:
    """A progress bar moved by records of one step; the bottom line is its own from the first to `close`.

    A record: step, total, start (ints), phase (str), loss, tokens_per_s, eta_s (floats or None).
    """

    def __init__(self, file: TextIO | None = None) -> None:
        """Draw on `file`; by default on stdout, and have what others print appear above it."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=file, markup=False, emoji=False, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            expand=True,
            redirect_stdout=file is None,
            redirect_stderr=file is None,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=1, facts="")
        self._first: tuple[int, float] | None = None

    def update(self, record: dict[str, Any]) -> None:
        """Show a record."""
        now = time.monotonic()
        step, total = int(record["step"]), int(record["total"])
        first_step, first_time = self._first = self._first or (int(record["start"]), now)
        left = record.get("eta_s")
        if (left is None or not math.isfinite(left)) and step > first_step:
            left = (now - first_time) / (step - first_step) * (total - step)
        facts = [
            f"loss {record['loss']:.4f}" if record.get("loss") is not None else "",
            f"{scaled(record['tokens_per_s'])} tok/s" if record.get("tokens_per_s") is not None else "",
            f"{clock(left)} left" if left is not None and math.isfinite(left) else "",
        ]
        self._progress.update(
            self._task,
            description=str(record.get("phase") or "train"),
            completed=step,
            total=max(total, 1),
            facts="  ".join(fact for fact in facts if fact),
        )
        self._progress.start()  # with something to show; again and again it does nothing

    def print(self, line: str) -> None:
        """Print text above the bar, as it stands."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal; the bar stays where it was."""
        self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def scaled(number: float) -> str:
    """12345 -> 12.3k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """125 -> 2:05; an hour and more with hours."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
