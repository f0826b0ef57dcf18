"""What a person sees: lines, and a bar at the bottom.

On a terminal the bar is drawn here. Under the launcher it is drawn there, from status records that go through the pipe
to the agent. In a file or a pipe there are lines alone; in a notebook a bar and the last losses, redrawn in one place.
"""

import os
import sys
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.output import Bar, clock, scaled
from roxxel_dist.process.durable import put_back
from roxxel_dist.process.exit_codes import STATUS_ENV, UserError
from roxxel_dist.process.progress import agent_pipe

LINE = {
    "vram_gb": "VRAM: {:.2f}GB",
    "ram_gb": "RAM: {:.2f}GB",
    "ms_per_step": "{:.0f} ms/step",
    "tokens_per_s": "{:,.0f} tokens/s",
    "mfu": "MFU: {:.1%}",
    "hfu": "HFU: {:.1%}",
    "expert_load_max": "Busiest expert: {:.1f}x",
    "expert_dropped": "Dropped: {:.1%}",
}
"""How a line shows what comes after the losses, where it is known."""

HIDDEN_COLUMNS = frozenset(
    """step train_loss train_bal val_loss val_bal train_eval_loss phase tokens grad_norm update_norm lr
    expert_load_min expert_load_mean""".split()  # noqa: SIM905
)
"""What every run logs, and a line leaves out or shows in another form; a name with a slash is a data set's."""


class ConsoleTracker:
    """Prints on standard output; `total_steps` is 0 while the run's number of steps is unknown."""

    def __init__(self, total_steps: int = 0) -> None:
        self.total_steps = total_steps
        self._launched = os.environ.get(STATUS_ENV) == "1"
        self._bar = Bar() if sys.stdout.isatty() and not self._launched else None

    def text(self, text: str) -> None:
        """Print lines."""
        for line in text.splitlines():
            if self._bar is not None:
                self._bar.print(line)
            else:
                print(line, flush=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Print one logged step."""
        self.text(format_row(row, self.total_steps))

    def status(self, record: Mapping[str, Any]) -> None:
        """Move the bar."""
        if self._launched:
            agent_pipe().send({**record})
        elif self._bar is not None:
            self._bar.update(dict(record))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


class TextTracker:
    """Appends lines with the time to a file: a rank's own log where no launcher keeps one."""

    def __init__(self, path: Path, total_steps: int = 0) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except (FileExistsError, IsADirectoryError, PermissionError) as error:  # not a disk that is full, or away
            raise UserError(f"{path}: cannot be written ({error.strerror}): move the existing file away") from error
        self.total_steps = total_steps

    def text(self, text: str) -> None:
        """Append lines."""
        if put_back(self._path, self._file.fileno()):  # deleted by a cleaner
            self._file.close()
            self._file = self._path.open("a+", encoding="utf-8")
        now = time.strftime("%H:%M:%S")
        self._file.writelines(f"{now} | {line}\n" for line in text.splitlines())
        self._file.flush()

    def crash(self, text: str) -> None:
        """Append a traceback, through to the disk: the machine may be next."""
        self.text(text)
        os.fsync(self._file.fileno())

    def row(self, row: Mapping[str, float]) -> None:
        """Append one logged step."""
        self.text(format_row(row, self.total_steps))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def format_row(row: Mapping[str, Any], total_steps: int) -> str:
    """One logged step as a line, aligned with its neighbours.

    Of a row with a `train_loss` it shows what a person follows; of any other all there is.
    """
    total = f"/{total_steps}" if total_steps else ""
    step = f"Step {row['step']:>{len(str(total_steps))}}{total}"
    if "train_loss" not in row:
        return " | ".join([step, *(_plain(name, value) for name, value in row.items() if name != "step")])
    parts = [step, _loss("Train", row["train_loss"], row.get("train_bal"))]
    if "val_loss" in row:
        parts.append(_loss("Val", row["val_loss"], row.get("val_bal")))
    for name, form in LINE.items():
        if row.get(name) is not None:
            parts.append(form.format(row[name]))
    if total_steps > row["step"] and row.get("ms_per_step"):
        parts.append(f"{clock((total_steps - row['step']) * row['ms_per_step'] / 1000)} left")
    own = (name for name in row if name not in HIDDEN_COLUMNS and name not in LINE and "/" not in name)
    parts += [_plain(name, row[name]) for name in own if row[name] is not None]
    return " | ".join(parts)


def _loss(title: str, loss: float, balance: float | None) -> str:
    return f"{title}: {loss:.4f}" + (f" (Bal: {balance:.4f})" if balance else "")  # 0: no experts


def _plain(name: str, value: Any) -> str:
    return f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}"


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
