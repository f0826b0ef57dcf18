"""What a long piece of work says on stderr while it runs: a bar on a terminal, a few plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

PLAIN_STEPS = 4


@dataclass(frozen=True)
class Report:
    """Says things, or nothing if it is not enabled."""

    enabled: bool

    def line(self, text: str) -> None:
        """Say one thing."""
        if self.enabled:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how much of `total` is done; the function given takes how much more has been done."""
        if self.enabled and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as shown:
                task = shown.add_task(text, total=total)
                yield lambda more: shown.advance(task, more)
            return
        done = said = 0

        def advance(more: int) -> None:
            nonlocal done, said
            done += more
            if done * PLAIN_STEPS // total > said:
                said = done * PLAIN_STEPS // total
                self.line(f"{text}: {100 * said // PLAIN_STEPS} %")

        yield advance
