"""The output in a notebook: a bar and the last losses, redrawn in one place, and lines below it."""

import sys
from collections.abc import Mapping
from html import escape
from typing import Any

from roxxel_dist.launcher.output.console import clock, scaled

LOSSES = ("train_loss", "val_loss")


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
        self._losses: dict[str, float] = {}
        self._place: Any = display(HTML(self._drawn()), display_id=True)

    def text(self, text: str) -> None:
        """Print lines."""
        print(text, flush=True)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in one logged step."""
        self._losses |= {name: float(row[name]) for name in LOSSES if name in row}

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
        words += [f"{name} {value:.4f}" for name, value in self._losses.items()]
        bar = f'<progress value="{step}" max="{total or 1}" style="width: 240px" aria-label="steps"></progress>'
        return f"<div>{bar} {escape(' | '.join(filter(None, words)))}</div>"
