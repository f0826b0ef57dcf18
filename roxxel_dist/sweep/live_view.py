"""What a person sees of a sweep: a live table on a terminal, else a line whenever something happens to a trial."""

import statistics
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from roxxel_dist.launcher.output.bar import clock
from roxxel_dist.sweep.journal import History, Trial
from roxxel_dist.sweep.report.text import STATES
from roxxel_dist.sweep.study import flat, short

ROWS = 12
"""Running trials that the table shows."""
LONGEST = 100


class Screen:
    """Shows a history that somebody else keeps up to date, while the context is open.

    Args:
        count: trials in all; None where there is no end.
        workers: trials that run at once.
        names: the parameters that are searched, which are shown.
        now: seconds since 1970.
    """

    def __init__(
        self,
        count: int | None,
        workers: int,
        names: list[str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._count, self._workers, self._names, self._now = count, workers, names, now
        self._history: History | None = None
        self._told: dict[int, tuple[str, int]] = {}
        self._live: Any = None
        self._begun = now()

    def __enter__(self) -> "Screen":
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(emoji=False, highlight=False)
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line, above the table where there is one."""
        line = f"roxxel-dist: {text}"
        if self._live is not None:
            self._live.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, history: History) -> None:
        """Something has changed."""
        first, self._history = self._history is None, history
        trials = list(history.trials.values())
        for trial in trials:
            now = (trial.state, trial.attempts)
            if self._told.get(trial.number) != now:
                self._told[trial.number] = now
                if not first:
                    self._tell(trial, history)

    def _tell(self, trial: Trial, history: History) -> None:
        if trial.state == "running":
            if self._live is None and trial.attempts:
                again = f" again (attempt {trial.attempts})" if trial.attempts > 1 else ""
                self.say(f"trial {trial.number} runs{again}: {self._params(trial)}")
        elif trial.state == "failed":
            self.say(f"trial {trial.number} failed: {trial.reason}")
        elif self._live is None:
            best = history.best
            tail = "" if best is None else f"; best {best.value:.6g} of trial {best.number}"
            left = self._left(history)
            tail += "" if left is None else f"; {clock(left)} left"
            self.say(f"trial {trial.number} {STATES[trial.state]}: {history.metric} {short(trial.value)}{tail}")

    def render(self) -> Any:
        """The table, as it is now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        history = self._history
        if history is None:
            return Text("starting …")
        trials = list(history.trials.values())
        running = [one for one in trials if one.state == "running"]
        table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        for name in ("trial", "running", "step", history.metric or "", "parameters"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for one in running[:ROWS]:
            step, value = one.reports[-1] if one.reports else ("", "")
            again = f" (attempt {one.attempts})" if one.attempts > 1 else ""
            took = clock(self._now() - one.began) if one.began else "waits"
            table.add_row(str(one.number), f"{took}{again}", str(step), short(value), self._params(one))
        if len(running) > ROWS:
            table.add_row("…", f"{len(running) - ROWS} more")
        best = history.best
        lines = [Text(self.counts(history), style="bold")]
        if best is not None:
            told = f"best {history.metric} {best.value:.6g}: trial {best.number}, {self._params(best)}"
            lines.append(Text(told, style="green", overflow="ellipsis", no_wrap=True))
        return Group(*lines, *([table] if running else []))

    def counts(self, history: History) -> str:
        """How many trials run, are done, failed, were stopped; and the time left."""
        trials = list(history.trials.values())
        number = {state: sum(one.state == state for one in trials) for state in STATES}
        ended = len(trials) - number["running"]
        whole = f" of {self._count}" if self._count else ""
        left = self._left(history)
        said = (
            f"{ended}{whole} trials: {number['running']} running, {number['done']} done, {number['failed']} failed, "
            f"{number['stopped']} stopped early; {clock(self._now() - self._begun)} so far"
        )
        return said if left is None else f"{said}, {clock(left)} left"

    def _left(self, history: History) -> float | None:
        """Seconds to the end, as the trials so far went; None where nobody knows."""
        trials = list(history.trials.values())
        took = [one.seconds for one in trials if one.seconds is not None]
        if not took or self._count is None:
            return None
        usual, now = statistics.fmean(took), self._now()
        running = [
            max(0.0, usual - (now - one.began)) if one.began else usual for one in trials if one.state == "running"
        ]
        waiting = max(0, self._count - len(trials)) * usual
        return max([(sum(running) + waiting) / self._workers, *running])

    def _params(self, trial: Trial) -> str:
        params = flat(trial.params)
        told = ", ".join(f"{name} {short(params[name])}" for name in self._names if name in params)
        return told if len(told) <= LONGEST else told[: LONGEST - 1] + "…"
