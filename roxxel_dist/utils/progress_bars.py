"""Progress of a long operation on stderr: a bar on a terminal, a few plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
