"""What a person sees: lines, and a bar at the bottom.

On a terminal the bar is drawn here. Under the launcher it is drawn there, from status records that travel as lines
starting with a record separator. In a file or a pipe there are lines alone.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.contract import STATUS_ENV, STATUS_MARK
from roxxel_dist.train.bar import Bar

STATUS_EVERY_S = 0.2


class ConsoleTracker:
    """Prints on standard output."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._launched = os.environ.get(STATUS_ENV) == "1"
        self._bar = Bar() if sys.stdout.isatty() and not self._launched else None
        self._next_status = 0.0

    def text(self, text: str) -> None:
        """Print lines."""
        for line in text.splitlines():
            if self._bar is not None:
                self._bar.print(line)
            else:
                print(line, flush=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Print one logged step."""
        self.text(format_row(row, self._total))

    def status(self, record: Mapping[str, Any]) -> None:
        """Move the bar; at most five times a second."""
        now = time.monotonic()
        if now < self._next_status and record["step"] != record["total"]:
            return
        self._next_status = now + STATUS_EVERY_S
        if self._launched:
            print(STATUS_MARK + json.dumps(record), flush=True)
        elif self._bar is not None:
            self._bar.update(dict(record))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


class TextTracker:
    """The same lines with the time, appended to a file: a rank's own log where no launcher keeps one."""

    def __init__(self, path: Path, total_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._total = total_steps

    def text(self, text: str) -> None:
        """Append lines."""
        now = time.strftime("%H:%M:%S")
        self._file.writelines(f"{now} | {line}\n" for line in text.splitlines())
        self._file.flush()

    def crash(self, text: str) -> None:
        """Append a traceback."""
        self.text(text)

    def row(self, row: Mapping[str, float]) -> None:
        """Append one logged step."""
        self.text(format_row(row, self._total))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def format_row(row: Mapping[str, float], total_steps: int) -> str:
    """One logged step as a line, aligned with its neighbours."""
    width = len(str(total_steps))
    parts = [f"step {row['step']:>{width}}/{total_steps}", f"train {row['train_loss']:.4f}"]
    if "val_loss" in row:
        parts.append(f"val {row['val_loss']:.4f}")
    if "ms_per_step" in row:
        parts.append(f"{row['ms_per_step']:.0f} ms/step")
    if "tokens_per_s" in row:
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    return " | ".join(parts)
